"""What a stage computes with a model's weights: spans of a pass through a range of layers.

Legend: T tokens of a pass, D spans of one token, X hidden, H heads, O width of a partial output, P
pages of the longest row.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_plane.attention.backend import kv_layout
from data_plane.attention.paged import Attention
from data_plane.attention.torch_paged import causal_attention
from data_plane.instance.grammar import GrammarMasks
from data_plane.instance.row_sampling import begin_masks, sample
from data_plane.instance.rows import Row
from data_plane.instance.sampler import report_prompt
from data_plane.instance.stage_edge import StageModel, StageRequests
from data_plane.instance.stage_layers import StageLayers
from data_plane.kv.frame_pool import FramePool
from data_plane.model.layers import gated_heads, mtp_rows, shared_experts
from data_plane.model.norm import rms_norm
from data_plane.model.stage_weights import StageWeights
from data_plane.model.weights import LayerWeights
from data_plane.step.cpu_kernels import Arithmetic
from nanocp.values.passes import Span
from nanocp.values.plan import PAGE_SIZE
from nanocp.values.sampling import TokenLogprobs


class CpuStageModel(StageModel):
    """The weights and KV of a stage's layers. Hidden rows are a tensor [T, X]."""

    _layers: StageLayers
    _requests: StageRequests

    def __init__(
        self,
        arithmetic: Arithmetic,
        weights: StageWeights,
        frames: FramePool,
        grammar_masks: GrammarMasks | None = None,
    ) -> None:
        """frames: a layer of it for each of the pipeline's places.

        Linear attention layers have their states beside the frames; then no layer moves.
        weights: packed by the kernels, at first those of the stage's first layers. grammar_masks:
        of structured output, at the last stage; None if no row may have a grammar.
        """
        self._carry = frames.carry
        self._model, self._kernels, self._attention = model, kernels, _ = arithmetic
        self._weights = weights
        self._frames = frames
        self._grammar_masks = grammar_masks
        self._layout_of_kv = kv_layout(model.attention)
        kind = model.attention
        self._least_plain_chunk = kind.least_plain_chunk if kernels.keeps_heads else sys.maxsize
        self._batch: _Batch | None = None

    def page(self, request_id: int, page: int) -> Tensor:
        """A copy of the KV of the stage's own layers in one page, [layers, 64, W]."""
        frame = self._requests.table.frames(request_id)[page]
        full = [layer for layer in self._layers.own if layer not in self._model.linear_layers]
        places = torch.tensor([self._kept_place(layer) for layer in full], dtype=torch.int64)
        return self._frames.layers[places, frame]

    def carry_part(self, request_id: int, number: int) -> tuple[int, np.ndarray]:
        """What is here of a page of the state of all tokens of a prompt so far (CarryPool.part)."""
        if self._carry is None:  # every layer here attends fully
            return 0, np.empty(0, np.uint8)
        return self._carry.part(self._carried[request_id], number)

    def begin_term(self, layers: StageLayers, requests: StageRequests) -> None:
        self._layers, self._requests = layers, requests
        self._carried: dict[int, int] = {}
        """Request -> the frame of its state."""
        self._free_carries = list(range(self._carry.scratch)) if self._carry is not None else []

    def ended(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            if request_id in self._carried:
                self._free_carries.append(self._carried.pop(request_id))

    def _kept_place(self, layer: int) -> int:
        if self._carry is None:
            return self._layers.place_of[layer]
        return self._model.places[layer] - self._model.places_before(self._layers.own.start)[0]

    def close(self) -> None:
        self._weights.close()

    @torch.inference_mode()
    def embed(self, spans: Sequence[tuple[Span, Sequence[int]]]) -> Tensor:
        assert self._weights.embedding is not None, "only the first stage embeds"
        ids = [token_id for _, token_ids in spans for token_id in token_ids]
        return self._weights.embedding[torch.tensor(ids)].to(self._frames.layers.dtype)

    @torch.inference_mode()
    def run_layer(
        self, layer: int, place: int, spans: Sequence[tuple[Span, Sequence[int]]], rows: Tensor
    ) -> Tensor:
        batch = self._batch_of(spans)
        weights, rope, model = self._weights.layer(layer), self._weights.rope, self._model
        kernels = self._kernels
        if layer in model.linear_layers:
            return self._run_linear(layer, batch, rows)
        place = self._kept_place(layer)
        pool_FSW = self._frames.layers[place]
        kind, position_T = model.attention, batch.position_T
        is_mtp, rows_after = layer == model.num_layers, rows
        if is_mtp:
            rows = self._mtp_rows(spans, rows)
        q_THD: Tensor | None = None
        if self._least_plain_chunk < sys.maxsize:
            normed_TX = rms_norm(rows, weights.input_norm, model.norm_eps)
            wire_q_TC, kv_TW = kind.inputs(normed_TX, position_T, weights.attention, rope)
        else:
            wire_q_TC, kv_TW, q_THD = kernels.attention_rows(rows, position_T, weights, rope, model)
        kernels.append(self._frames.slots[place], batch.slot_T, kv_TW)
        if is_mtp:
            return rows_after  # of a prompt only its KV is wanted
        if self._ends_at(layer, batch):
            return rows  # nobody reads what comes after the last layer's KV

        def queries(part: slice | Tensor) -> Tensor:
            if q_THD is not None:
                return q_THD[part]
            return kernels.attention_queries(
                wire_q_TC[part], position_T[part], weights, rope, model
            )

        o_THV = rows.new_empty(len(rows), kind.num_heads, kind.value_dim)
        if len(batch.single_D):
            partial_DHO, _ = self._attention.run(
                queries(batch.single_D), pool_FSW, batch.plan, kind.softmax_scale
            )
            o_THV[batch.single_D] = kernels.finish_attention(partial_DHO, weights, model)
        for part, frames, num_tokens in batch.chunks:
            kv_UW = pool_FSW.index_select(0, frames).flatten(0, 1)[:num_tokens]
            if part.stop - part.start < self._least_plain_chunk:
                o_THV[part] = self._absorbed(queries(part), kv_UW, weights)
            else:
                heads = weights.attention
                q_THE = kind.prefill_queries(wire_q_TC[part], position_T[part], heads, rope)
                heads_of = functools.partial(kind.keys_and_values, weights=heads)
                o_THV[part] = causal_attention(q_THE, kv_UW, kind.softmax_scale, heads_of)
        o_THV = gated_heads(rows, o_THV, weights, model)
        x_TX, normed_TX = kernels.after_attention(rows, o_THV, weights, rope, model)
        return x_TX + self._mlp(normed_TX, weights)

    def _ends_at(self, layer: int, batch: _Batch) -> bool:
        is_last = layer == self._model.num_layers - 1 and not self._model.num_mtp_layers
        return is_last and not batch.has_output

    def _run_linear(self, layer: int, batch: _Batch, rows: Tensor) -> Tensor:
        """Run a linear attention layer: each span goes on with the state of its request."""
        weights, model, carry = self._weights.layer(layer), self._model, self._carry
        assert carry is not None
        place = model.places[layer] - model.places_before(self._layers.own.start)[1]
        normed_TX, begin, parts = rms_norm(rows, weights.input_norm, model.norm_eps), 0, []
        for span, _ in batch.spans:
            end = begin + span.num_tokens
            if span.request_id not in self._carried:
                self._carried[span.request_id] = self._free_carries.pop()
                carry.clear(self._carried[span.request_id])
            frame, given = self._carried[span.request_id], normed_TX[begin:end]
            parts.append(carry.extend(place, frame, span.first, given, weights.attention))
            begin = end
        if self._ends_at(layer, batch):
            return rows
        x_TX, normed_TX = self._kernels.after_attention(
            rows, torch.cat(parts), weights, self._weights.rope, model
        )
        return x_TX + self._mlp(normed_TX, weights)

    def _mtp_rows(self, spans: Sequence[tuple[Span, Sequence[int]]], rows: Tensor) -> Tensor:
        weights = self._weights
        ids = [each for span, _ in spans for each in self._requests.inputs(span, ahead=1)]
        assert weights.mtp is not None and weights.head is not None
        assert weights.embedding is not None
        next_TX = weights.embedding[torch.tensor(ids)].to(rows.dtype)
        normed_TX = rms_norm(rows, weights.head.final_norm, self._model.norm_eps)
        return mtp_rows(next_TX, normed_TX, weights.mtp, self._model)

    def _absorbed(self, q_THD: Tensor, kv_UW: Tensor, weights: LayerWeights) -> Tensor:
        """Attend as rows that decode do: to KV as it is stored, which costs nothing to read."""
        layout, kind = self._layout_of_kv, self._model.attention
        heads_of = functools.partial(layout.chunk_heads, num_heads=kind.num_heads)
        out_THD = causal_attention(q_THD, kv_UW, kind.softmax_scale, heads_of)
        partial_THO = out_THD[..., : layout.out_width].contiguous()
        return self._kernels.finish_attention(partial_THO, weights, self._model)

    def _mlp(self, normed_TX: Tensor, weights: LayerWeights) -> Tensor:
        kernels, moe = self._kernels, weights.moe
        if moe is None:
            assert weights.mlp is not None
            return kernels.gated_mlp(normed_TX, weights.mlp)
        expert_TK, weight_TK = kernels.gate(normed_TX, moe, self._model)
        every = torch.arange(len(normed_TX))
        routed_TX, _ = kernels.visit_experts(normed_TX, expert_TK, weight_TK, every, (), moe)
        shared_TX = shared_experts(normed_TX, moe, kernels.gated_mlp)
        return routed_TX if shared_TX is None else routed_TX + shared_TX

    @torch.inference_mode()
    def sample(
        self, spans: Sequence[Span], samplers: Sequence[Row | None], rows: Tensor
    ) -> list[tuple[int, TokenLogprobs | None]]:
        ends = np.cumsum([span.num_tokens for span in spans])
        self._report_prompts(spans, ends, rows)
        sampling = [
            (row, end - 1) for row, end in zip(samplers, ends, strict=True) if row is not None
        ]
        if not sampling:
            return []
        sampled_rows = [row for row, _ in sampling]
        pending = begin_masks(self._grammar_masks, sampled_rows)
        assert self._weights.head is not None, "only the last stage samples"
        x_BX = rows[[int(last) for _, last in sampling]]
        logits_BV = self._kernels.logits(x_BX, self._weights.head, self._model)
        return sample(sampled_rows, logits_BV, None if pending is None else pending.result())

    def _report_prompts(self, spans: Sequence[Span], ends: np.ndarray, rows: Tensor) -> None:
        for span, end in zip(spans, ends.tolist(), strict=True):
            if span.request_id not in self._requests.asked:
                continue
            token_ids, wanted = self._requests.asked[span.request_id]
            assert self._weights.head is not None, "only the last stage has the head"
            logits = functools.partial(
                self._kernels.logits, weights=self._weights.head, config=self._model
            )
            next_ids = token_ids[span.first + 1 : span.first + 1 + span.num_tokens]
            report_prompt(wanted, next_ids, rows[end - span.num_tokens : end], logits)

    def _batch_of(self, spans: Sequence[tuple[Span, Sequence[int]]]) -> _Batch:
        """What all layers of a pass have alike; they come with the very same spans."""
        if self._batch is None or self._batch.spans is not spans:
            self._batch = _Batch(spans, self._attention, self._requests.asked)
            self._weights.rope.reach(int(self._batch.position_T.max()))
        return self._batch

    # --- layers and frames

    def load(self, layers: Sequence[int]) -> None:
        for layer in layers:
            self._weights.layer(layer)

    def has(self, layer: int) -> bool:
        return self._weights.has(layer)

    def new_layer(self, layer: int, place: int) -> None:
        # Nothing is wiped: of each frame it is known how many tokens are filled.
        for weights in self._weights.keep(self._layers.place_of):
            self._kernels.forget(weights)

    def read_frame(self, place: int, frame: int) -> np.ndarray:
        return self._frames.read_layer(place, frame)

    def write_frame(self, place: int, frame: int, payload: np.ndarray) -> None:
        self._frames.write_layer(place, frame, payload)


class _Batch:
    def __init__(
        self,
        spans: Sequence[tuple[Span, Sequence[int]]],
        attention: Attention,
        asked: Collection[int],
    ) -> None:
        """asked: requests whose rows after the last layer are wanted, sampled or not."""
        self.spans = spans
        self.has_output = any(span.samples or span.request_id in asked for span, _ in spans)
        """Whether rows are wanted after the last layer."""
        positions, slots = [], []
        single: list[int] = []
        self.chunks: list[tuple[slice, Tensor, int]] = []
        """For each longer span: its rows, its request's frames, and tokens up to its last one."""
        num_rows = 0
        for (_, first, num_tokens, _), frames in spans:
            end = first + num_tokens
            position = np.arange(first, end)
            frame = np.asarray(frames, np.int64)
            positions.append(position)
            slots.append(frame[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE)
            if num_tokens == 1:
                single.append(num_rows)
            else:
                part = slice(num_rows, num_rows + num_tokens)
                self.chunks.append((part, torch.from_numpy(frame), end))
            num_rows += num_tokens
        self.position_T = torch.from_numpy(np.concatenate(positions))
        self.slot_T = torch.from_numpy(np.concatenate(slots))
        self.single_D = torch.tensor(single, dtype=torch.int64)
        self.plan: Any = None
        """What attention needs for spans of one token; None if there are none."""
        if single:
            tables = [frames for span, frames in spans if span.num_tokens == 1]
            frame_DP = np.zeros((len(tables), max(map(len, tables))), np.int32)
            for row, frames in enumerate(tables):
                frame_DP[row, : len(frames)] = frames
            lengths = [span.first + 1 for span, _ in spans if span.num_tokens == 1]
            self.plan = attention.plan(
                torch.from_numpy(frame_DP), torch.tensor(lengths, dtype=torch.int32)
            )
