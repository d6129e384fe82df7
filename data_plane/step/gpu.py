"""One decode step of one instance on a GPU, captured for every bucket (5.1, Figure 10).

Enters: a context of the GPU's pool, weights, frames, the GPU's exchange. Leaves: logits, and KV in
the frames. Does not know: requests, plans, sampling, time. The host takes no part in a step. The
slow reference is CpuStep (step/cpu.py).

Legend: B rows, A received attention rows, H heads, C width of `wire_q`, W width of KV, D width of a
query, O width of a partial, V value width, X hidden size, N instances.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from data_plane.attention.paged import Attention
from data_plane.attention.triton_merge import merge_routed
from data_plane.graph.pool_gpu import GpuContext, GpuPages, GpuPool
from data_plane.kv.carry_pool import CarryRows
from data_plane.kv.frame_pool import FramePool
from data_plane.kv.triton_carry import step_states
from data_plane.model import layers as ops
from data_plane.model.config import ModelConfig
from data_plane.model.norm import rms_norm
from data_plane.model.weights import HeadWeights, LayerWeights
from data_plane.moe.gpu_weights import GpuWeights
from data_plane.moe.mixture import MixtureOfExperts
from data_plane.step.triton_turns import next_turn_kernel
from data_plane.transport.cuda_ipc import GpuExchange
from data_plane.transport.exchange import Channel
from nanocp.config.cluster import BoundsConfig
from nanocp.values.plan import PAGE_SIZE


class GpuStep:
    """Runs steps on a GPU.

    Everything that they read and write keeps its address, so that they can be captured.
    """

    def __init__(
        self,
        model: ModelConfig,
        weights: GpuWeights,
        frames: FramePool,
        pool: GpuPool,
        exchange: GpuExchange,
        attention: Attention,
        mixture: MixtureOfExperts[None] | None,
        wire_form: str,
        bounds: BoundsConfig,
    ) -> None:
        self._model, self._weights = model, weights.weights
        self._places = model.places
        self._frames, self._pool, self._exchange, self._attention = (
            frames,
            pool,
            exchange,
            attention,
        )
        self.mixture = mixture
        """None if the model has no experts."""
        self._is_latent = wire_form == "latent"
        embedding = self._weights.embedding
        dtype, device = embedding.dtype, embedding.device
        q_width, v_width = model.attention.wire_widths(wire_form)
        self._received = {
            "position": torch.zeros(bounds.max_attention_rows, dtype=torch.int64, device=device),
            "live": torch.zeros(bounds.max_attention_rows, dtype=torch.bool, device=device),
            "q": torch.zeros(bounds.max_attention_rows, q_width, dtype=dtype, device=device),
            "kv": torch.zeros(
                bounds.max_attention_rows, model.attention.kv_width, dtype=dtype, device=device
            ),
        }
        num_heads = model.attention.num_heads
        self._returned = {
            "partial": torch.zeros(
                bounds.max_partials, num_heads, v_width, dtype=dtype, device=device
            ),
            "lse": torch.zeros(bounds.max_partials, num_heads, device=device),
        }
        self.logits = torch.zeros(bounds.max_rows, model.vocab_size, device=device)
        """Logits of the last step, or of the drafting behind it, in its first num_rows rows:
        [max_rows, vocabulary] fp32."""
        mtp_size = model.hidden_size if self._weights.mtp else 0
        self.hidden = torch.zeros(bounds.max_rows, mtp_size, dtype=dtype, device=device)
        """What the MTP layer takes beside the next tokens: rows after the model's last norm."""
        self._drafted = torch.zeros_like(self.hidden)
        self._ids = torch.zeros(
            PAGE_SIZE, bounds.max_rows if mtp_size else 0, dtype=torch.int64, device=device
        )
        """The highest logits of the last step, then of each turn: a row has less than a page."""
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._last, self._after = self._ids.new_zeros(2, bounds.max_rows)

    def run(self, context: GpuContext) -> None:
        """Run one step eagerly, or into a capture."""
        for _ in self.phases(context):
            pass

    def draft(self, context: GpuContext) -> None:
        """Run the MTP layer eagerly, or into a capture."""
        for _ in self.draft_phases(context):
            pass

    @torch.inference_mode()
    def phases(self, context: GpuContext) -> Iterator[None]:
        """The step, in parts: it yields before each wait for its peers.

        Instances that take turns in one thread change turns there.
        """
        self._pool.run_adopt()
        x_BX = self._weights.embedding[context.token]
        x_BX = yield from self._layers(context, x_BX, range(self._model.num_layers))
        if num_rows := context.bucket.num_rows:
            self.logits[:num_rows] = ops.logits(x_BX, self._weights, self._model)
            if self._weights.mtp is not None and context.bucket.width > 1:
                norm = self._weights.final_norm
                self.hidden[:num_rows] = rms_norm(x_BX, norm, self._model.norm_eps)
                self._ids[0, :num_rows] = self.logits[:num_rows].argmax(dim=-1)
                self._turn.zero_()

    @torch.inference_mode()
    def draft_phases(self, context: GpuContext) -> Iterator[None]:
        """The MTP layer over `hidden` and the pool's tokens, in parts; see `phases`."""
        mtp, first = self._weights.mtp, self._model.num_layers
        assert mtp is not None
        num_rows = context.bucket.num_rows
        if num_rows:
            self._set_up_turn(context)
        x_BX = self._weights.embedding[context.token]
        if num_rows:
            x_BX = ops.mtp_rows(x_BX, self.hidden[:num_rows], mtp, self._model)
        x_BX = yield from self._layers(context, x_BX, range(first, first + 1))
        if num_rows:
            self._drafted[:num_rows] = x_BX
            head = HeadWeights(mtp.head_norm, self._weights.lm_head)
            self.logits[:num_rows] = ops.logits(x_BX, head, self._model)
            self._turn.add_(1)
            drafted = self.logits[:num_rows].argmax(dim=-1)
            self._ids[:, :num_rows].index_copy_(0, self._turn, drafted[None])

    def _set_up_turn(self, context: GpuContext) -> None:
        """Launch the kernel that sets up a turn of drafting if the host has not."""
        width, hidden_size = context.bucket.width, self._model.hidden_size
        next_turn_kernel[(context.bucket.num_rows // width,)](
            context.by_host,
            self._turn,
            self._ids,
            context.token,
            context.position,
            context.live.view(torch.uint8),
            self._last,
            self._after,
            self.hidden,
            self._drafted,
            self._ids.stride(0),
            hidden_size,
            WIDTH=width,
            BLOCK_W=triton.next_power_of_2(width),
            BLOCK_X=min(triton.next_power_of_2(hidden_size), 1024),
        )

    def _layers(
        self, context: GpuContext, x_BX: Tensor, layers: range
    ) -> Generator[None, None, Tensor]:
        """Run layers of one kind after the other over hidden rows."""
        num_rows = context.bucket.num_rows
        own, slot_NB = None, torch.empty(0)
        if num_rows:
            slots, lengths = self._locate(context.own, context.position, context.live)
            own = _Local(slots, self._plan(context.own, lengths, context))
            slot_NB = self._pool.run_route(context)
        received: _Local | None = None
        for index in layers:
            layer = self._weights.layers[index]
            out_BHV, lse_BH = torch.empty(0), torch.empty(0)
            if index in self._model.linear_layers:
                if own is not None:
                    o_BHV = self._linear_attention(context, index, layer, x_BX)
            else:
                if own is not None:
                    out_BHV, lse_BH = self._start_attention(context, index, layer, x_BX, own)
                yield
                received = self._answer(context, index, layer, received)
                yield
                self._exchange.wait(Channel.RES, context.num_sent)
                if own is not None:
                    o_BHV = self._merged(context, layer, out_BHV, lse_BH, slot_NB)
                    o_BHV = ops.gated_heads(x_BX, o_BHV, layer, self._model)
            if own is not None:
                x_BX = x_BX + ops.output_projection(o_BHV, layer)
            normed_BX = rms_norm(x_BX, layer.post_attention_norm, self._model.norm_eps)
            if layer.mlp is not None:
                x_BX = x_BX + ops.gated_mlp(normed_BX, layer.mlp)
            else:
                assert self.mixture is not None, "the model has experts"
                x_BX = yield from self.mixture.phases(x_BX, normed_BX, context.live, index)
        return x_BX

    def logits_of(self, rows: list[int]) -> Tensor:
        """The last step's logits of these rows: [rows, vocabulary] fp32, on the GPU."""
        return self.logits[self._index(rows)]

    def draft_logits_of(self, rows: list[int]) -> Tensor:
        """Logits of the MTP layer's rows: [rows, vocabulary] fp32, on the GPU."""
        return self.logits_of(rows)

    def highest_ids(self, num_turns: int, num_rows: int) -> list[list[int]]:
        """The token of the highest logit of each step row: of the step, then of each turn.

        Right as long as the host set up no turn.
        """
        ids: list[list[int]] = self._ids[: 1 + num_turns, :num_rows].tolist()
        return ids

    def go_on_drafting(self, places: list[int], rows: list[int]) -> None:
        """The next turn of these MTP rows takes them at these places."""
        self.hidden[self._index(places)] = self._drafted[self._index(rows)]

    def _index(self, rows: list[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self.logits.device)

    def meet(self, peers: Sequence[int]) -> None:
        """Begin another term; who is in it, captured steps read in the exchange's table."""
        if self.mixture is not None:
            self.mixture.meet(peers)

    def place_experts(self, seats: Sequence[int]) -> None:
        """Set the instance of each expert; captured steps read it anew."""
        if self.mixture is not None:
            self.mixture.place_experts(seats)

    @property
    def awaited(self) -> int | None:
        """The instance that a wait of a step polls for now; see GpuExchange.awaited."""
        return self._exchange.awaited

    def check(self) -> None:
        """Raise what ended a wait of the steps so far, if something did. Waits for the GPU.

        See GpuExchange.check.
        """
        self._exchange.check()

    def _locate(self, pages: GpuPages, position: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        return self._pool.run_locate(pages, position, live, self._exchange.error)

    def _plan(self, pages: GpuPages, lengths: Tensor, context: GpuContext) -> Any:
        return self._attention.plan(pages.frame, lengths, context.bucket.width)

    def _attend(self, q_AHD: Tensor, place: int, plan: Any) -> tuple[Tensor, Tensor]:
        return self._attention.run(
            q_AHD, self._frames.layers[place], plan, self._model.attention.softmax_scale
        )

    def _start_attention(
        self, context: GpuContext, index: int, layer: LayerWeights, x_BX: Tensor, own: _Local
    ) -> tuple[Tensor, Tensor]:
        """Send the rows that other instances read too, append, and attend.

        Returns (output [B, H, V], lse [B, H]); in the absorbed form the output is O wide.
        """
        wire_q_BC, kv_BW, q_BHD = ops.attention_rows(
            x_BX, context.position, layer, self._weights.rope, self._model
        )
        sent_B = wire_q_BC if self._is_latent else q_BHD.flatten(1)
        fields = {
            "position": context.position,
            "live": context.live,
            "q": sent_B.contiguous(),
            "kv": kv_BW,
        }
        self._exchange.put(Channel.Q, fields, context.num_sent, context.send_row)
        self._frames.append(self._places[index], own.slots, kv_BW)
        partial, lse_BH = self._attend(q_BHD, self._places[index], own.plan)
        if self._is_latent:
            partial = ops.finish_attention(partial, layer, self._model)
        return partial.contiguous(), lse_BH

    def _linear_attention(
        self, context: GpuContext, index: int, layer: LayerWeights, x_BX: Tensor
    ) -> Tensor:
        """Run a token of each row through its state, which is here: heads' values [B, H, V]."""
        delta, carry = self._model.delta, self._frames.carry
        assert delta is not None and carry is not None
        return step_states(
            delta,
            layer.attention,
            carry.layers[self._places[index]],
            CarryRows(context.carry_frame, context.position, context.live),
            rms_norm(x_BX, layer.input_norm, self._model.norm_eps),
            self._exchange.error,
        )

    def _merged(
        self,
        context: GpuContext,
        layer: LayerWeights,
        out_BHV: Tensor,
        lse_BH: Tensor,
        slot_NB: Tensor,
    ) -> Tensor:
        """Phase 4, LSE merge at the MoE binding: heads' values [B, H, V]."""
        self._exchange.take(Channel.RES, context.num_sent, self._returned)
        returned = self._returned["partial"], self._returned["lse"]
        merge_routed(out_BHV, lse_BH, *returned, context.num_sent, slot_NB)
        if self._is_latent:
            return out_BHV
        return ops.finish_attention(out_BHV, layer, self._model)

    def _answer(
        self, context: GpuContext, index: int, layer: LayerWeights, local: _Local | None
    ) -> _Local | None:
        """Phases 2 and 3: append and attend for the rows of others, return partials."""
        model, rope, count = self._model, self._weights.rope, context.bucket.num_received
        self._exchange.wait(Channel.Q, context.num_received)
        if not count:
            return None
        self._exchange.take(Channel.Q, context.num_received, self._received)
        position_A, live_A, q_AC, kv_AW = (
            self._received[name][:count] for name in ("position", "live", "q", "kv")
        )
        if local is None:
            # The first layer: a row's position and live flag are the same in every layer behind
            # it. A wait that fails later leaves the slots, which are of the position in flight.
            slots, lengths = self._locate(context.received, position_A, live_A)
            local = _Local(slots, self._plan(context.received, lengths, context))
        self._frames.append(self._places[index], local.slots, kv_AW)
        if self._is_latent:
            q_AHD = ops.attention_queries(q_AC, position_A, layer, rope, model)
        else:
            q_AHD = q_AC.view(count, model.attention.num_heads, -1)
        partial, lse = self._attend(q_AHD, self._places[index], local.plan)
        if self._is_latent:
            partial = ops.finish_attention(partial, layer, model)
        self._exchange.put(
            Channel.RES, {"partial": partial.contiguous(), "lse": lse}, context.num_received
        )
        return local


class _Local:
    """What depends on no layer: where a step's rows append, and attention's plan."""

    __slots__ = ("plan", "slots")

    def __init__(self, slots: Tensor, plan: Any) -> None:
        self.slots, self.plan = slots, plan
