"""One decode step of one instance on a GPU, captured for every bucket, without the host.

The slow reference, with the legend, is CpuStep (step/cpu.py). (The paper's section 5.1, Figure 10.)
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence

import torch
import triton
from torch import Tensor

from data_plane.attention.paged import Attention
from data_plane.graph.lane_parts import EXCHANGE, OTHER, WAIT, LanePart
from data_plane.graph.pool_gpu import GpuContext, GpuPages, GpuPool
from data_plane.kernels.norm import add_norm, embed_norm
from data_plane.kv.carry_pool import CarryRows
from data_plane.kv.frame_pool import FramePool
from data_plane.kv.triton_carry import step_states
from data_plane.model import layers as ops
from data_plane.model.config import ModelConfig
from data_plane.model.linear import PlainLinear
from data_plane.model.weights import LayerWeights
from data_plane.moe.gpu.all_to_all_gpu import gated_rows
from data_plane.moe.gpu.gpu_weights import GpuWeights
from data_plane.moe.mixture import NormedMixture
from data_plane.step.attending import Attending, LocalRows
from data_plane.step.gpu_rows import attention_rows
from data_plane.step.probe import Probe, no_probe
from data_plane.step.triton_returned import merge_returned
from data_plane.step.triton_turns import next_turn_kernel
from data_plane.transport.exchange import Channel
from data_plane.transport.gpu.cuda_ipc import GpuExchange
from nanocp.config.cluster import BoundsConfig
from nanocp.overlap.policies.orders import ATTENTION
from nanocp.values.experts import ExpertTable
from nanocp.values.plan import PAGE_SIZE


class GpuStep:
    """Runs steps on a GPU, in memory of fixed addresses, for captures."""

    def __init__(
        self,
        model: ModelConfig,
        weights: GpuWeights,
        frames: FramePool,
        pool: GpuPool,
        exchange: GpuExchange,
        attention: Attention,
        mixture: NormedMixture | None,
        wire_form: str,
        bounds: BoundsConfig,
    ) -> None:
        self._model, self._weights = model, weights.weights
        self.probe: Probe = no_probe
        """Called while a step is launched or captured."""
        self._places = model.places
        self._frames, self._pool, self._exchange, self._attention = (
            frames,
            pool,
            exchange,
            attention,
        )
        self.mixture = mixture
        self.check_mixture: Callable[[], None] = lambda: None
        """Raises the error of a MoE layer's own wait."""
        self._is_latent = wire_form == "latent"
        embedding = self._weights.embedding
        dtype, device = embedding.dtype, embedding.device
        q_width, _ = model.attention.wire_widths(wire_form)
        self._received = {
            "position": torch.zeros(bounds.max_attention_rows, dtype=torch.int64, device=device),
            "live": torch.zeros(bounds.max_attention_rows, dtype=torch.bool, device=device),
            "q": torch.zeros(bounds.max_attention_rows, q_width, dtype=dtype, device=device),
            "kv": torch.zeros(
                bounds.max_attention_rows, model.attention.kv_width, dtype=dtype, device=device
            ),
        }
        self._rows = attention_rows(model, self._weights.rope, frames)
        self.logits = torch.zeros(bounds.max_rows, model.vocab_size, dtype=dtype, device=device)
        """[max_rows, vocabulary] in the dtype of rows, of the last step or its drafting."""
        mtp_size = model.hidden_size if self._weights.mtp else 0
        self.hidden = torch.zeros(bounds.max_rows, mtp_size, dtype=dtype, device=device)
        """The MTP layer's other input: rows after the model's last norm."""
        self._drafted = torch.zeros_like(self.hidden)
        self._ids = torch.zeros(
            PAGE_SIZE, bounds.max_rows if mtp_size else 0, dtype=torch.int64, device=device
        )
        """The highest logits of the last step, then of each turn."""
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

    @property
    def tags(self) -> list[str]:
        """Tags of the parts of `phases`."""
        attention = [ATTENTION, *(part.tag for part in (WAIT, EXCHANGE, WAIT, OTHER))]
        tags = [OTHER.tag]
        for index, layer in enumerate(self._weights.layers[: self._model.num_layers]):
            tags += attention if index not in self._model.linear_layers else []
            if layer.mlp is None:
                assert self.mixture is not None, "the model has experts"
                tags += (part.tag for part in self.mixture.parts)
        return tags

    @torch.inference_mode()
    def phases(self, context: GpuContext) -> Iterator[LanePart]:
        """Run the step; yield each part before it is launched.

        Instances in one thread can take turns: a wait is a part. The parts' tags are `tags`, for
        every context.
        """
        yield OTHER
        self._pool.run_adopt()
        weights, num_layers = self._weights, self._model.num_layers
        x_BX, normed_BX = embed_norm(
            weights.embedding, context.token, weights.layers[0].input_norm, self._model.norm_eps
        )
        _, normed_BX = yield from self._layers(
            context, x_BX, normed_BX, range(num_layers), weights.final_norm
        )
        self.probe("step")
        if num_rows := context.bucket.num_rows:
            self._score(normed_BX)
            if weights.mtp is not None and context.bucket.width > 1:
                self.hidden[:num_rows] = normed_BX
                self._ids[0, :num_rows] = self.logits[:num_rows].argmax(dim=-1)
                self._turn.zero_()

    @torch.inference_mode()
    def draft_phases(self, context: GpuContext) -> Iterator[LanePart]:
        """Run the MTP layer over `hidden` and the pool's tokens, in parts."""
        mtp, first = self._weights.mtp, self._model.num_layers
        assert mtp is not None
        num_rows = context.bucket.num_rows
        if num_rows:
            self._set_up_turn(context)
        x_BX = self._weights.embedding[context.token]
        if num_rows:
            x_BX = ops.mtp_rows(x_BX, self.hidden[:num_rows], mtp, self._model)
        norm_X = self._weights.layers[first].input_norm
        x_BX, normed_BX = add_norm(x_BX, norm_X, self._model.norm_eps)
        x_BX, normed_BX = yield from self._layers(
            context, x_BX, normed_BX, range(first, first + 1), mtp.head_norm
        )
        if num_rows:
            self._drafted[:num_rows] = x_BX
            self._score(normed_BX)
            self._turn.add_(1)
            drafted = self.logits[:num_rows].argmax(dim=-1)
            self._ids[:, :num_rows].index_copy_(0, self._turn, drafted[None])

    def _set_up_turn(self, context: GpuContext) -> None:
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

    def _score(self, normed_BX: Tensor) -> None:
        head = self._weights.lm_head
        assert isinstance(head, PlainLinear), "a head is not in FP8"
        torch.mm(normed_BX, head.weight.t(), out=self.logits[: len(normed_BX)])

    def _layers(
        self, context: GpuContext, x_BX: Tensor, normed_BX: Tensor, layers: range, norm_X: Tensor
    ) -> Generator[LanePart, None, tuple[Tensor, Tensor]]:
        """Run layers over hidden rows: (the rows, the rows normed by norm_X)."""
        weights, eps, has_links = self._weights, self._model.norm_eps, context.has_links
        # The norm behind each layer's MLP.
        norms = [*(weights.layers[index].input_norm for index in layers[1:]), norm_X]
        own, slot_NB = None, torch.empty(0)
        if context.bucket.num_rows:
            own = self._rows_at(context.own, context.position, context.live, context)
            if has_links:
                slot_NB = self._pool.run_route(context)
        received: LocalRows | None = None
        for index, next_norm in zip(layers, norms, strict=True):
            layer = weights.layers[index]
            self.probe("other")
            out_BHV, lse_BH = torch.empty(0), torch.empty(0)
            attending = LanePart(ATTENTION)
            if index in self._model.linear_layers:
                if own is not None:
                    o_BHV = self._linear_attention(context, index, layer, normed_BX)
            else:
                if own is not None:
                    attending = self._start_attention(context, index, layer, normed_BX, own)
                # Instances that take turns yield equally often, with links and without.
                yield attending
                if isinstance(attending, Attending):
                    self.probe("attention")
                    out_BHV, lse_BH = attending.run()
                yield WAIT
                if has_links:
                    self.probe("exchange")
                    self._exchange.wait(Channel.Q, context.num_received)
                yield LanePart(EXCHANGE.tag, (out_BHV, lse_BH))
                if own is not None:
                    self.probe("other")
                    if self._is_latent:
                        out_BHV = self._rows.finish(layer, out_BHV)
                    out_BHV = out_BHV.contiguous()
                if has_links:
                    received = self._answer(context, index, layer, received)
                yield WAIT
                if has_links:
                    self.probe("exchange")
                    self._exchange.wait(Channel.RES, context.num_sent)
                yield OTHER
                if own is not None:
                    o_BHV = self._merged(context, layer, out_BHV, lse_BH, slot_NB)
                    o_BHV = ops.gate_heads(normed_BX, o_BHV, layer, self._model)
            if own is not None:
                delta_BX = ops.output_projection(o_BHV, layer)
                x_BX, normed_BX = add_norm(x_BX, layer.post_attention_norm, eps, delta_BX)
            if layer.mlp is not None:
                delta_BX = gated_rows(normed_BX, layer.mlp)
                x_BX, normed_BX = add_norm(x_BX, next_norm, eps, delta_BX)
            else:
                assert self.mixture is not None, "the model has experts"
                x_BX, normed_BX = yield from self.mixture.phases(
                    x_BX, normed_BX, context.live, index, next_norm, self.probe
                )
        if not has_links:
            self._exchange.skip_attention(len(set(layers) - set(self._model.linear_layers)))
        return x_BX, normed_BX

    def logits_of(self, rows: list[int]) -> Tensor:
        """Return the last step's logits: [rows, vocabulary] fp32, on the GPU."""
        return self.logits[self._index(rows)].float()

    def draft_logits_of(self, rows: list[int]) -> Tensor:
        """Return the MTP layer's logits: [rows, vocabulary] fp32, on the GPU."""
        return self.logits_of(rows)

    def highest_ids(self, num_turns: int, num_rows: int) -> list[list[int]]:
        """Return each step row's highest-logit token: of the step, then of each turn."""
        ids: list[list[int]] = self._ids[: 1 + num_turns, :num_rows].tolist()
        return ids

    def go_on_drafting(self, places: list[int], rows: list[int]) -> None:
        """Put these MTP rows at these places in the next turn."""
        self.hidden[self._index(places)] = self._drafted[self._index(rows)]

    def _index(self, rows: list[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self.logits.device)

    def meet(self, peers: Sequence[int]) -> None:
        """Begin another term."""
        if self.mixture is not None:
            self.mixture.meet(peers)

    def place_experts(self, table: ExpertTable) -> None:
        """Set the place of each expert."""
        if self.mixture is not None:
            self.mixture.place_experts(table)

    def loads(self) -> Tensor:
        """Return and clear the loads (Mixtures.loads)."""
        if self.mixture is None:
            return torch.zeros(0, 0, dtype=torch.int64)
        return self.mixture.loads()

    @property
    def awaited(self) -> int | None:
        """The instance that a wait polls for now (GpuExchange.awaited)."""
        return self._exchange.awaited

    def check(self) -> None:
        """Wait for the GPU, and raise as GpuExchange.check does."""
        self._exchange.check()
        self.check_mixture()

    def _rows_at(
        self, pages: GpuPages, position: Tensor, live: Tensor, context: GpuContext
    ) -> LocalRows:
        slots, lengths = self._pool.run_locate(pages, position, live, self._exchange.error)
        return LocalRows(self._attention, pages.frame, lengths, slots, context.bucket.width)

    def _start_attention(
        self,
        context: GpuContext,
        index: int,
        layer: LayerWeights,
        normed_BX: Tensor,
        own: LocalRows,
    ) -> Attending:
        place = self._places[index]
        started = self._rows.start(
            place, layer, normed_BX, context.position, own.slots, context.has_links
        )
        if context.has_links:
            self.probe("exchange")
            sent_B = started.wire_q_BC if self._is_latent else started.q_BHD.flatten(1)
            fields = {
                "position": context.position,
                "live": context.live,
                "q": sent_B.contiguous(),
                "kv": started.kv_BW,
            }
            self._exchange.put(Channel.Q, fields, context.num_sent, context.send_row)
        pool_FSW, scale = self._frames.layers[place], self._model.attention.softmax_scale
        return Attending(own, started.q_BHD, pool_FSW, scale, context.has_links)

    def _linear_attention(
        self, context: GpuContext, index: int, layer: LayerWeights, normed_BX: Tensor
    ) -> Tensor:
        delta, carry = self._model.delta, self._frames.carry
        assert delta is not None and carry is not None
        return step_states(
            delta,
            layer.attention,
            carry.layers[self._places[index]],
            CarryRows(context.carry_frame, context.position, context.live),
            normed_BX,
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
        if context.has_links:
            merge_returned(out_BHV, lse_BH, self._exchange, slot_NB)
        self.probe("other")
        return out_BHV if self._is_latent else self._rows.finish(layer, out_BHV)

    def _answer(
        self, context: GpuContext, index: int, layer: LayerWeights, local: LocalRows | None
    ) -> LocalRows | None:
        """Phases 2 and 3, for the rows of others."""
        place, count = self._places[index], context.bucket.num_received
        self.probe("exchange")
        if not count:
            return None
        self._exchange.take(Channel.Q, context.num_received, self._received)
        position_A, live_A, q_AC, kv_AW = (
            self._received[name][:count] for name in ("position", "live", "q", "kv")
        )
        if local is None:
            # The first layer: a row's position and live flag are the same in every layer behind
            # it. A wait that fails later leaves the slots, which are of the position in flight.
            local = self._rows_at(context.received, position_A, live_A, context)
        self._rows.append(place, local.slots, kv_AW)
        if self._is_latent:
            q_AHD = self._rows.queries(layer, q_AC, position_A)
        else:
            q_AHD = q_AC.view(count, self._model.attention.num_heads, -1)
        self.probe("attention")
        scale = self._model.attention.softmax_scale
        partial, lse = local.attend(q_AHD, self._frames.layers[place], scale)
        self.probe("exchange")
        if self._is_latent:
            partial = self._rows.finish(layer, partial)
        self._exchange.put(
            Channel.RES, {"partial": partial.contiguous(), "lse": lse}, context.num_received
        )
        return local
