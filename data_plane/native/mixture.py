"""MoE layers in one native call each, on all processors of an instance.

The call returns when it lacks something, and the exchange waits (mixture.h). The slow reference is
moe/all_to_all_cpu.py. Legend: B rows, X hidden size.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from data_plane.model.config import ModelConfig
from data_plane.model.weights import LayerWeights
from data_plane.moe.mixture import MixtureOfExperts, MoeProbe, MoeSchedule, SlotNames
from data_plane.native.calls import LONG, POINTER, MixtureFields
from data_plane.native.experts import region_places
from data_plane.native.kernels import NativeKernels
from data_plane.native.packing import packed_address
from data_plane.transport.exchange import Awaited, Channel, ExchangeError
from data_plane.transport.regions import TensorExchange
from nanocp.values.experts import ExpertTable

# How a call ends: enum Outcome of mixture.h.
_DONE, _AWAITS_ROWS, _AWAITS_SUMS, _PUTS_ROWS, _PUTS_SUMS, _WRONG_COUNT = range(6)
_CHANNEL_OF = {
    _AWAITS_ROWS: Channel.DISPATCH,
    _PUTS_ROWS: Channel.DISPATCH,
    _AWAITS_SUMS: Channel.COMBINE,
    _PUTS_SUMS: Channel.COMBINE,
}


class NativeMixtures(MixtureOfExperts):
    """The MoE layers of one instance, a native call each."""

    def __init__(
        self,
        exchange: TensorExchange,
        model: ModelConfig,
        layers: Sequence[LayerWeights],
        kernels: NativeKernels,
        max_rows: int,
        probe: MoeProbe,
        home: ExpertTable,
        schedule: MoeSchedule = MoeSchedule.BARRIER,
    ) -> None:
        """max_rows: bound of every instance's batch. home: until place_experts.

        probe: gate and shared expert count as experts.
        """
        self._exchange, self._model, self._layers = exchange, model, layers
        self._kernels, self._probe, self._schedule = kernels, probe, schedule
        self._instance = exchange.exchange.instance
        self._num_instances = exchange.exchange.num_instances
        calls = kernels.calls
        self._run, self._resume = calls.run_mixture, calls.resume_mixture
        self._finish = calls.finish_mixture
        self._mixture = calls.new_mixture(
            kernels.processors.address, self._num_instances, self._instance, max_rows
        )
        weakref.finalize(self, calls.delete_mixture, self._mixture)
        self._awaited = (LONG * (self._num_instances + 1))()
        self._counts = (LONG * self._num_instances)()
        # Flags of peers that only the exchange knows: [channel, parity, peer].
        self._told = torch.zeros(2, 2, self._num_instances, dtype=torch.int64)
        self._begun: Any = None
        self._present = [n for n in range(self._num_instances) if n != self._instance]
        self._peers: tuple[Any, ...] = ()
        self._fields: dict[int, tuple[Any, Any]] = {}
        self._names = SlotNames(home, layers, model.num_experts)

    def meet(self, peers: Sequence[int]) -> None:
        self._present = list(peers)
        self._begun = None

    def place_experts(self, table: ExpertTable) -> None:
        self._names.place(table)
        self._kernels.experts_changed()
        self._fields.clear()

    def loads(self) -> Tensor:
        return self._names.loads.take()

    def phases(
        self, x_BX: Tensor, normed_BX: Tensor, live_B: Tensor, layer: int
    ) -> Generator[Awaited, None, Tensor]:
        exchange = self._exchange
        exchange.moe_epoch += 1
        epoch = exchange.moe_epoch
        if exchange.exchange is not self._begun:
            self._begin_term()
        x_BX, normed_BX, live_B = x_BX.contiguous(), normed_BX.contiguous(), live_B.contiguous()
        out_BX = torch.empty_like(x_BX)
        awaited = self._awaited
        self._probe("expert")
        rows = x_BX.data_ptr(), normed_BX.data_ptr(), live_B.data_ptr(), x_BX.shape[0]
        how = self._peers[epoch & 1], epoch, self._schedule, out_BX.data_ptr()
        ended = self._run(self._mixture, self._layer(layer), *rows, *how, awaited, self._counts)
        try:
            while ended != _DONE:
                self._probe("dispatch_combine")
                yield from self._serve(ended, epoch)
                self._probe("expert")
                ended = self._resume(self._mixture, awaited, self._counts)
        except BaseException:
            # No task may outlive the rows and regions that it reads and writes.
            self._finish(self._mixture)
            raise
        exchange.count_sent(Channel.DISPATCH, awaited[0])
        exchange.count_sent(Channel.COMBINE, awaited[1])
        return out_BX

    def _serve(self, ended: int, epoch: int) -> Iterator[Awaited]:
        exchange = self._exchange
        if ended == _WRONG_COUNT:
            peer, count = self._awaited[0], self._counts[0]
            raise ExchangeError(
                f"instance {self._instance} awaits DISPATCH of instance {peer}, epoch {epoch}, but "
                f"finds {count} rows, which are more than max_rows or fewer than none"
            )
        peers, channel = self._awaited[: list(self._awaited).index(-1)], _CHANNEL_OF[ended]
        if ended in (_PUTS_ROWS, _PUTS_SUMS):
            for peer, count in zip(peers, self._counts, strict=False):
                exchange.put(channel, peer, epoch, count)
            return
        puts = [exchange.awaited(channel, peer, epoch) for peer in peers]
        if self._schedule is MoeSchedule.ARRIVAL and ended == _AWAITS_ROWS:
            yield puts[0]
            exchange.exchange.wait_any(puts)
        else:
            for put in puts:
                yield put
                exchange.wait(channel, put.source, epoch)
        for put in puts:
            if exchange.exchange.arrived(*put):
                self._told[int(channel is Channel.COMBINE), epoch & 1, put.source] = epoch + 1

    def _begin_term(self) -> None:
        self._begun = self._exchange.exchange
        self._told.zero_()
        self._peers = tuple(self._addresses(parity) for parity in (0, 1))

    def _addresses(self, parity: int) -> Any:
        """Return struct Peer of every instance (mixture.h); nulls for this and absent ones."""
        exchange, addresses = self._exchange, list[int | None]()
        for peer in range(self._num_instances):
            if peer not in self._present:
                addresses += [None] * 32
                continue
            for channel in (Channel.DISPATCH, Channel.COMBINE):
                for side in (exchange.outgoing, exchange.incoming):
                    addresses += region_places(side(channel, peer, parity))
            rows, sums = (
                exchange.flags(channel, peer, parity)
                for channel in (Channel.DISPATCH, Channel.COMBINE)
            )
            addresses += [rows.outgoing, sums.outgoing]
            addresses += [
                flags.incoming or self._told[number, parity, peer].data_ptr()
                for number, flags in enumerate((rows, sums))
            ]
        return (POINTER * len(addresses))(*addresses)

    def _layer(self, layer: int) -> Any:
        known = self._fields.get(layer)
        if known is None:
            moe, model = self._layers[layer].moe, self._model
            assert moe is not None, f"layer {layer} has no experts"
            experts = self._kernels.addresses_of_experts(moe)
            fields = MixtureFields(
                gate=moe.gate.data_ptr(),
                gate_bias=None if moe.gate_bias is None else moe.gate_bias.data_ptr(),
                gate_up=ctypes.cast(experts.gate_up, POINTER),
                down=ctypes.cast(experts.down, POINTER),
                table=self._names.of(layer).data_ptr(),
                loads=self._names.loads.of(layer).data_ptr(),
                hidden=model.hidden_size,
                experts=model.num_experts,
                groups=model.num_groups,
                groups_per_token=model.num_groups_per_token,
                experts_per_token=model.num_experts_per_token,
                slots=self._names.num_slots,
                first=self._instance * self._names.num_slots,
                inner=experts.inner,
                scale=model.routed_scale,
                limit=moe.limit,
                is_softmax=model.softmax_gate,
                is_normalised=model.weights_normalised,
            )
            if moe.shared is not None:
                fields.shared_gate_up = packed_address(moe.shared.gate_up)
                fields.shared_down = packed_address(moe.shared.down)
                fields.shared_inner = moe.shared.down.shape[1]
                fields.shared_limit = moe.shared.limit
            known = self._fields[layer] = experts, ctypes.pointer(fields)
        return known[1]
