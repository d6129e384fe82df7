"""One decode step of one instance on the CPU. (The paper's section 5.1, Figure 10.)

Legend: B rows, A received attention rows, H heads, C width of `wire_q`, W width of KV, D width of a
query, O width of a partial, V value width, X hidden size.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from data_plane.attention.lse_merge import lse_merge
from data_plane.graph.pool_cpu import StepContext
from data_plane.kv.carry_pool import CarryPool, CarryRows
from data_plane.kv.frame_pool import FramePool, LocalStep
from data_plane.model.layers import gated_heads, mtp_rows
from data_plane.model.norm import rms_norm
from data_plane.model.weights import HeadWeights, LayerWeights, ModelWeights
from data_plane.moe.mixture import MixtureOfExperts
from data_plane.step.cpu_kernels import Arithmetic
from data_plane.step.probe import Probe, no_probe
from data_plane.transport.exchange import Awaited, Channel
from data_plane.transport.regions import TensorExchange
from nanocp.config.cluster import BoundsConfig
from nanocp.values.experts import ExpertTable
from nanocp.values.plan import PAGE_SIZE

Parts = Generator[Awaited, None, torch.Tensor]
"""A part of a step; it awaits puts and ends with a tensor."""


class CpuStep:
    """Captures and runs steps on the CPU, as GpuStep does on a GPU."""

    def __init__(
        self,
        arithmetic: Arithmetic,
        weights: ModelWeights,
        frames: FramePool,
        exchange: TensorExchange,
        mixtures: MixtureOfExperts,
        wire_form: str,
        bounds: BoundsConfig,
        probe: Probe = no_probe,
    ) -> None:
        self._model, self._kernels, self._attention = arithmetic
        self._places, self._carry = arithmetic.model.places, frames.carry
        self._weights = weights
        self._frames = frames
        self._exchange = exchange
        self._mixtures = mixtures
        self._probe = probe
        self._is_latent = wire_form == "latent"
        self._instance = exchange.exchange.instance
        model = arithmetic.model
        q_width, _ = model.attention.wire_widths(wire_form)
        self._received = _ReceivedRows(
            bounds.max_attention_rows, q_width, frames.layers.shape[-1], frames.layers.dtype
        )
        self.logits = torch.zeros(bounds.max_rows, model.vocab_size)
        """[max_rows, vocabulary] fp32, of num_rows rows."""
        mtp_size = model.hidden_size if weights.mtp else 0
        self.hidden = torch.zeros(bounds.max_rows, mtp_size, dtype=frames.layers.dtype)
        """The MTP layer's other input: rows after the model's last norm."""
        self.drafted = self.hidden
        """The MTP layer's rows, [num_rows, X]."""

    def capture(self, context: StepContext) -> CapturedStep:
        """Return a call that runs the step over this context."""
        return CapturedStep(self, context)

    def logits_of(self, rows: list[int]) -> torch.Tensor:
        """Return the last step's logits of these rows: [rows, vocabulary] fp32."""
        return self.logits[rows]

    def meet(self, peers: Sequence[int]) -> None:
        """Set the other instances of the term."""
        self._mixtures.meet(peers)

    def place_experts(self, table: ExpertTable) -> None:
        """Set the place of each expert, between two terms."""
        self._mixtures.place_experts(table)

    def loads(self) -> torch.Tensor:
        """Return and clear the loads (Mixtures.loads)."""
        return self._mixtures.loads()

    @property
    def awaited(self) -> int | None:
        """None: the exchange knows what a step on the CPU awaits."""
        return None

    def check(self) -> None:
        """Do nothing: on the CPU a failed wait of the step has raised already."""

    @torch.inference_mode()
    def run(self, context: StepContext) -> None:
        """Run one step eagerly."""
        for _ in self.phases(context):
            pass

    def phases(self, context: StepContext) -> Iterator[Awaited]:
        """Run the step, in inference mode; yield each awaited put before the wait."""
        x_BX = yield from self._layers(context, self._embed(context), range(self._model.num_layers))
        self._probe("step")
        if num_rows := context.bucket.num_rows:
            self.logits[:num_rows] = self._kernels.logits(x_BX, self._weights, self._model)
            if self._weights.mtp is not None:
                norm = self._weights.final_norm
                self.hidden[:num_rows] = rms_norm(x_BX, norm, self._model.norm_eps)

    def draft_phases(self, context: StepContext) -> Iterator[Awaited]:
        """Run the MTP layer over `hidden` and the row state's tokens, in parts."""
        mtp, first = self._weights.mtp, self._model.num_layers
        assert mtp is not None
        x_BX = self._embed(context)
        if num_rows := context.bucket.num_rows:
            x_BX = mtp_rows(x_BX, self.hidden[:num_rows], mtp, self._model)
        self.drafted = yield from self._layers(context, x_BX, range(first, first + 1))
        self._probe("step")

    def draft_logits_of(self, rows: list[int]) -> torch.Tensor:
        """Return logits of the MTP layer's rows: [rows, vocabulary] fp32."""
        assert self._weights.mtp is not None
        head = HeadWeights(self._weights.mtp.head_norm, self._weights.lm_head)
        return self._kernels.logits(self.drafted[rows], head, self._model)

    def go_on_drafting(self, places: list[int], rows: list[int]) -> None:
        """Put these MTP rows at these places in the next turn."""
        self.hidden[places] = self.drafted[rows]

    def _embed(self, context: StepContext) -> torch.Tensor:
        token_B = torch.from_numpy(context.rows.token)
        return self._weights.embedding[token_B].to(self._frames.layers.dtype)

    def _layers(self, context: StepContext, x_BX: torch.Tensor, layers: range) -> Parts:
        rows, ops = context.rows, self._kernels
        step = _Step(context, self._instance, self._frames.scratch_slot, self._carry)
        step.own_plan = self._attention.plan(step.own.frames, step.own.lengths)
        self._weights.rope.reach(int(rows.position.max(initial=0)))
        for index in layers:
            layer = self._weights.layers[index]
            self._probe("other")
            normed_BX = x_BX
            if index not in self._model.linear_layers:
                o_BHV = yield from self._full_attention(x_BX, step, index)
            elif context.bucket.num_rows:
                o_BHV = self._linear_attention(x_BX, step, index)
            if context.bucket.num_rows:
                x_BX, normed_BX = ops.after_attention(
                    x_BX, o_BHV, layer, self._weights.rope, self._model
                )
            if layer.mlp is not None:
                x_BX = x_BX + ops.gated_mlp(normed_BX, layer.mlp)
            else:
                x_BX = yield from self._mixtures.phases(x_BX, normed_BX, step.live_B, index)
        return x_BX

    def _full_attention(self, x_BX: torch.Tensor, step: _Step, index: int) -> Parts:
        """Attend to the rows' KV on all instances: heads' values [B, H, V]; x_BX without rows."""
        layer, place, ops = self._weights.layers[index], self._places[index], self._kernels
        context, routes, probe = step.context, step.routes, self._probe
        self._exchange.attention_epoch += 1
        if context.bucket.num_rows:
            wire_q_BC, kv_BW, q_BHD = ops.attention_rows(
                x_BX, step.position_B, layer, self._weights.rope, self._model
            )
            sent_B = wire_q_BC if self._is_latent else q_BHD.flatten(1)
            probe("exchange")
            self._send_q(routes, sent_B, kv_BW, context.rows.position, context.rows.live)
            probe("other")
            ops.append(self._frames.slots[place], step.own.slots, kv_BW)
            probe("attention")
            partial_BHO, lse_BH = self._attend(q_BHD, place, step.own_plan)
        if routes.sources:
            probe("exchange")
            yield from self._answer_received(step, index)
        probe("other")
        if not context.bucket.num_rows:
            return x_BX
        o_BHV = yield from self._merged(routes, partial_BHO, lse_BH, layer)
        return gated_heads(x_BX, o_BHV, layer, self._model)

    def _linear_attention(self, x_BX: torch.Tensor, step: _Step, index: int) -> torch.Tensor:
        """Run a token of each row through its recurrent state: heads' values [B, H, V]."""
        assert self._carry is not None and step.carried is not None
        layer = self._weights.layers[index]
        normed_BX = rms_norm(x_BX, layer.input_norm, self._model.norm_eps)
        return self._kernels.linear_attention(
            self._carry, self._places[index], step.carried, normed_BX, layer.attention
        )

    def _attend(self, q: torch.Tensor, place: int, plan: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self._attention.run(
            q, self._frames.layers[place], plan, self._model.attention.softmax_scale
        )

    def _send_q(
        self,
        routes: _Routes,
        sent_B: torch.Tensor,
        kv_BW: torch.Tensor,
        position: np.ndarray,
        live: np.ndarray,
    ) -> None:
        for link in routes.targets:
            region = self._exchange.outgoing(Channel.Q, link.peer, self._exchange.attention_epoch)
            region["position"][: link.count] = torch.from_numpy(position[link.rows])
            region["live"][: link.count] = torch.from_numpy(live[link.rows])
            torch.index_select(sent_B, 0, link.row_index, out=region["q"][: link.count])
            for slot, row in link.tail_rows:
                region["kv"][slot] = kv_BW[row]
            self._exchange.put(Channel.Q, link.peer, self._exchange.attention_epoch, link.count)

    def _answer_received(self, step: _Step, index: int) -> Iterator[Awaited]:
        """Phases 2 and 3: append and attend for the rows of others, return partials."""
        context, routes = step.context, step.routes
        layer, place = self._weights.layers[index], self._places[index]
        received, epoch = self._received, self._exchange.attention_epoch
        for source, begin, end in routes.sources:
            yield self._exchange.awaited(Channel.Q, source, epoch)
            received.copy_from(self._exchange.wait(Channel.Q, source, epoch), begin, end)
        count = context.bucket.num_received
        if not step.received_is_read:
            step.received_is_read = True
            # The position and live flag of a row are the same in every layer of a step.
            received.live[routes.num_received : count] = False
            self._weights.rope.reach(int(received.position[:count].max()))
            received.step = LocalStep(
                context.tables.received,
                received.position[:count].numpy(),
                received.live[:count].numpy(),
                self._frames.scratch_slot,
            )
            received.plan = self._attention.plan(received.step.frames, received.step.lengths)
        assert received.step is not None and received.plan is not None
        self._kernels.append(self._frames.slots[place], received.step.slots, received.kv[:count])
        q = received.q[:count]
        if self._is_latent:
            q_AHD = self._kernels.attention_queries(
                q, received.position[:count], layer, self._weights.rope, self._model
            )
        else:
            q_AHD = q.view(count, self._model.attention.num_heads, -1)
        self._probe("attention")
        partial, lse = self._attend(q_AHD, place, received.plan)
        self._probe("exchange")
        if self._is_latent:
            partial = self._kernels.finish_attention(partial, layer, self._model)
        for source, begin, end in routes.sources:
            region = self._exchange.outgoing(Channel.RES, source, epoch)
            region["partial"][: end - begin] = partial[begin:end]
            region["lse"][: end - begin] = lse[begin:end]
            self._exchange.put(Channel.RES, source, epoch, end - begin)

    def _merged(
        self, routes: _Routes, partial_BHO: torch.Tensor, lse_BH: torch.Tensor, layer: LayerWeights
    ) -> Parts:
        """Phase 4, LSE merge at the MoE binding: [B, H, V].

        Finishing is linear: it precedes the merge (latent form) or follows it (absorbed form).
        """
        finish, model = self._kernels.finish_attention, self._model
        out = finish(partial_BHO, layer, model) if self._is_latent else partial_BHO
        if routes.targets:
            self._probe("exchange")
            yield from self._merge(routes, out, lse_BH)
            self._probe("other")
        return out if self._is_latent else finish(out, layer, model)

    def _merge(self, routes: _Routes, out: torch.Tensor, lse_BH: torch.Tensor) -> Iterator[Awaited]:
        linked = routes.linked_rows
        partial = out.new_zeros(
            len(routes.targets) + 1, len(linked), *out.shape[1:], dtype=torch.float32
        )
        lse = lse_BH.new_full(
            (len(routes.targets) + 1, len(linked), lse_BH.shape[1]), float("-inf")
        )
        partial[0], lse[0] = out[linked], lse_BH[linked]
        epoch = self._exchange.attention_epoch
        for number, link in enumerate(routes.targets, start=1):
            yield self._exchange.awaited(Channel.RES, link.peer, epoch)
            region = self._exchange.wait(Channel.RES, link.peer, epoch)
            partial[number, link.linked_index] = region["partial"][: link.count].float()
            lse[number, link.linked_index] = region["lse"][: link.count]
        merged, _ = lse_merge(partial, lse)
        out[linked] = merged.to(out.dtype)


class CapturedStep:
    """A step over one context, as a call or in phases."""

    __slots__ = ("_context", "_step")

    def __init__(self, step: CpuStep, context: StepContext) -> None:
        self._step, self._context = step, context

    def __call__(self) -> None:
        self._step.run(self._context)

    def phases(self) -> Iterator[Awaited]:
        """Run the step in parts, as CpuStep.phases does."""
        return self._step.phases(self._context)

    def draft_phases(self) -> Iterator[Awaited]:
        """Run the MTP layer in parts, as CpuStep.draft_phases does."""
        return self._step.draft_phases(self._context)


class _Step:
    def __init__(
        self, context: StepContext, instance: int, scratch_slot: int, carry: CarryPool | None
    ) -> None:
        rows = context.rows
        self.context = context
        self.routes = _Routes(context, instance)
        self.own = LocalStep(context.tables.own, rows.position, rows.live, scratch_slot)
        self.own_plan: Any = None
        self.position_B = torch.from_numpy(rows.position)
        self.live_B = torch.from_numpy(rows.live)
        self.received_is_read = False
        self.carried: CarryRows | None = None
        if carry is not None:
            frame = np.where(rows.live, context.tables.carry_frame, carry.scratch)
            frame_B = torch.from_numpy(frame).long()
            self.carried = CarryRows(frame_B, self.position_B, self.live_B)


class _Link:
    def __init__(self, peer: int, rows: np.ndarray, tail_rows: list[tuple[int, int]]) -> None:
        self.peer = peer
        self.count = len(rows)
        self.rows = rows
        self.row_index = torch.from_numpy(rows)
        self.tail_rows = tail_rows
        """(slot, row) of each row whose new KV the peer appends."""
        self.linked_index = torch.empty(0, dtype=torch.int64)


class _Routes:
    def __init__(self, context: StepContext, instance: int) -> None:
        tables, position = context.tables, context.rows.position
        self.targets: list[_Link] = []
        for peer in np.flatnonzero(tables.num_sent).tolist():
            tail = (position // PAGE_SIZE != tables.tail_page).astype(np.int64)
            holder = tables.tail_holder[np.arange(len(position)), tail]
            rows = tables.send_row[peer, : tables.num_sent[peer]].astype(np.int64)
            slots = np.flatnonzero(holder[rows] == peer)
            self.targets.append(_Link(peer, rows, [(int(slot), int(rows[slot])) for slot in slots]))
        self.sources: list[tuple[int, int, int]] = []
        """(peer, first received row, end)."""
        begin = 0
        for peer in np.flatnonzero(tables.num_received).tolist():
            end = begin + int(tables.num_received[peer])
            self.sources.append((peer, begin, end))
            begin = end
        self.num_received = begin
        if self.targets:
            linked = np.unique(np.concatenate([link.rows for link in self.targets]))
            self.linked_rows = torch.from_numpy(linked)
            for link in self.targets:
                link.linked_index = torch.from_numpy(np.searchsorted(linked, link.rows))


class _ReceivedRows:
    def __init__(self, max_rows: int, q_width: int, kv_width: int, dtype: torch.dtype) -> None:
        self.position = torch.zeros(max_rows, dtype=torch.int64)
        self.live = torch.zeros(max_rows, dtype=torch.bool)
        self.q = torch.zeros(max_rows, q_width, dtype=dtype)
        self.kv = torch.zeros(max_rows, kv_width, dtype=dtype)
        self.step: LocalStep | None = None
        self.plan: Any = None

    def copy_from(self, region: dict[str, torch.Tensor], begin: int, end: int) -> None:
        count = end - begin
        self.position[begin:end] = region["position"][:count]
        self.live[begin:end] = region["live"][:count]
        self.q[begin:end] = region["q"][:count]
        self.kv[begin:end] = region["kv"][:count]
