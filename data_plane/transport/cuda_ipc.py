"""The routed exchange through peer memory of the GPUs of one node: what a captured step calls
(5.3).

Enters: the layout of a region, routing tables and rows on the device. Leaves: rows put into peers'
memory, and taken from one's own. Does not know: layers, models, which rows a table names. The
mailbox stays with the host's exchange.

The host knows no epoch: it is on the device (triton_exchange.py), and so an error is read after the
step, by `check`.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data_plane.transport.exchange import Channel, EpochError, ExchangeTimeout, RegionLayout

CHANNELS = (Channel.Q, Channel.RES, Channel.DISPATCH, Channel.COMBINE)
"""What a step puts; the mailbox is the host's."""

_ALIGNMENT = 128
_MAX_FIELDS = 4
_MAX_PROGRAMS = 16
_MAX_BLOCK = 1024
"""4-byte words that a program copies at once."""
_POLLS_PER_MS = 1_000
"""A poll of device memory takes about a microsecond or less; not measured yet (docs/gpu.md)."""

_FOLLOWS = {
    Channel.Q: (Channel.RES, 1),
    Channel.RES: (Channel.Q, 0),
    Channel.DISPATCH: (Channel.COMBINE, 1),
    Channel.COMBINE: (Channel.DISPATCH, 0),
}
"""Of a put: the channel whose last wait it follows, and by how many epochs it is ahead of that."""
_COUNT = "count"
"""The field of a channel that everybody puts to everybody, with as many rows as it says."""


def cuda_ipc_obstacle(device: torch.device) -> str:
    """Why the exchange cannot run on this device; an empty string if it can."""
    if device.type != "cuda":
        return "it needs an NVIDIA GPU, and this instance runs on the CPU"
    if not torch.cuda.is_available():
        return "it needs an NVIDIA GPU, and torch sees none here"
    if find_spec("triton") is None:
        return "the package triton is not installed (pip install 'nanocp[gpu]')"
    return ""


class _Field(NamedTuple):
    name: str
    offset: int
    """Bytes into the memory; [parity, source, slot, row_bytes] is there."""
    row_bytes: int


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a channel is in the memory of every instance."""

    flag_offset: int
    cell_offset: int
    """Of the counts, if the channel has them."""
    is_counted: bool
    num_slots: int
    fields: tuple[_Field, ...]


class RegionPlaces:
    """The places of the channels that the layout has, the same in the memory of every instance."""

    def __init__(self, layout: RegionLayout, num_instances: int) -> None:
        self.num_instances = num_instances
        self.channels: dict[Channel, _Place] = {}
        offset = 0
        for channel in (channel for channel in CHANNELS if channel in layout):
            rows = [field for field in layout[channel] if field.name != _COUNT]
            num_slots = rows[0].shape[0]
            flag_offset, cell_offset = offset, offset + _aligned(2 * num_instances * 8)
            offset = cell_offset + _aligned(2 * num_instances * 4)
            fields = []
            assert len(rows) <= _MAX_FIELDS, channel.name
            for field in rows:
                assert field.shape[0] == num_slots, (
                    f"{channel.name}.{field.name} has other slots than the first field"
                )
                row_bytes = (
                    int(np.prod(field.shape[1:], dtype=np.int64)) * np.dtype(field.dtype).itemsize
                )
                fields.append(_Field(field.name, offset, row_bytes))
                offset += _aligned(2 * num_instances * num_slots * row_bytes)
            is_counted = len(rows) < len(layout[channel])
            self.channels[channel] = _Place(
                flag_offset, cell_offset, is_counted, num_slots, tuple(fields)
            )
        self.num_bytes = offset


class PeerMemory:
    """An instance's memory that its peers write, and where theirs is. `owner` keeps the mappings."""

    def __init__(
        self, instance: int, memory: Tensor, addresses: list[int], owner: Any = None
    ) -> None:
        self.instance = instance
        self.memory = memory
        """[bytes] uint8, zero at first."""
        self.address_N = torch.tensor(addresses, dtype=torch.int64, device=memory.device)
        self._owner = owner

    @classmethod
    def create_all(cls, places: RegionPlaces, device: torch.device) -> list[PeerMemory]:
        """Of all instances, in one process on one device."""
        memories = [
            torch.zeros(places.num_bytes, dtype=torch.uint8, device=device)
            for _ in range(places.num_instances)
        ]
        addresses = [memory.data_ptr() for memory in memories]
        return [
            cls(instance, memory, addresses, memories) for instance, memory in enumerate(memories)
        ]

    @classmethod
    def create(cls, places: RegionPlaces, device: torch.device, group: Any) -> PeerMemory:
        """Of this process, together with every member of a torch.distributed group of the CPU
        (gloo; instance = rank).

        Raises ValueError, on every member alike, where no CUDA is, or the members are on several
        nodes.
        """
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symm_mem

        members: list[Any] = [None] * dist.get_world_size(group)
        own = (cuda_ipc_obstacle(device), socket.gethostname(), device.index)
        dist.all_gather_object(members, own, group=group)
        _refuse(members, places.num_instances)
        if len({index for _, _, index in members}) < len(members):
            # Ray shows an actor one GPU, which is number 0 to each: torch takes that for the same
            # GPU and refuses. So does a test with several processes on one GPU. What is lost by
            # allowing it, multicast, is not used here.
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        memory = symm_mem.empty(places.num_bytes, dtype=torch.uint8, device=device).zero_()
        torch.cuda.synchronize(device)
        handle = symm_mem.rendezvous(memory, group)
        peers = [
            handle.get_buffer(peer, (places.num_bytes,), torch.uint8)
            for peer in range(len(members))
        ]
        dist.barrier(group=group)  # nobody puts before all is zero
        return cls(
            dist.get_rank(group), memory, [peer.data_ptr() for peer in peers], (handle, peers)
        )


def _refuse(members: list[Any], num_instances: int) -> None:
    if len(members) != num_instances:
        raise ValueError(
            f"cuda_ipc: the group has {len(members)} members; the cluster has {num_instances} instances"
        )
    for instance, (obstacle, _, _) in enumerate(members):
        if obstacle:
            raise ValueError(f"cuda_ipc cannot run on instance {instance}: {obstacle}")
    nodes = sorted({node for _, node, _ in members})
    if len(nodes) > 1:
        raise ValueError(
            f"cuda_ipc reaches the GPUs of one node; the instances are on {', '.join(nodes)}"
        )


class GpuExchange:
    """One instance's end. In every layer, on every instance, rows or not: put Q, wait Q, take Q,
    put RES, wait RES, take RES, on streams that keep this order, and in a mixture of experts the
    same with DISPATCH and COMBINE."""

    def __init__(self, places: RegionPlaces, device: torch.device, timeout_ms: float) -> None:
        """timeout_ms: of each wait, about: it is counted in polls. It can put and wait after
        `attach`."""
        self._places = places
        self._max_polls = max(1, round(timeout_ms * _POLLS_PER_MS))
        self.epoch_C = torch.zeros(len(CHANNELS), dtype=torch.int64, device=device)
        """[channel] int64: of the last wait, so the first epoch is 1, and a flag of 0 is none."""
        self.error = torch.zeros(4, dtype=torch.int64, device=device)
        """See triton_exchange.wait_kernel; all zero while there is none."""
        self._done_CN = torch.zeros(
            len(CHANNELS), places.num_instances, dtype=torch.int32, device=device
        )

    def attach(self, memory: PeerMemory) -> None:
        """Where this instance and its peers are."""
        self._memory = memory

    def put(
        self,
        channel: Channel,
        fields: Mapping[str, Tensor],
        count_N: Tensor,
        row_NL: Tensor | None = None,
    ) -> None:
        """Put rows of the fields into the slots at each peer, and its flag after them. Peers
        without a row get nothing, but for the flag of a counted channel, whose peers include this
        instance.

        fields: name -> [rows, ...], contiguous. count_N [N] int32: slots for each peer. row_NL [N,
        slots] int32: the row of each slot; None: the rows are dense, those of lower peers first.
        """
        from data_plane.transport.triton_exchange import put_kernel

        place = self._places.channels[channel]
        follows, ahead = _FOLLOWS[channel]
        tensors, offsets, widths = self._fields(place, fields)
        put_kernel[self._grid(place)](
            self._memory.address_N,
            self.epoch_C[follows:],
            self.error,
            count_N,
            count_N if row_NL is None else row_NL,
            self._done_CN[channel],
            *tensors,
            place.flag_offset,
            place.cell_offset,
            *offsets,
            self._memory.instance,
            place.num_slots,
            AHEAD=ahead,
            HAS_ROWS=row_NL is not None,
            COUNTED=place.is_counted,
            BLOCK_N=_power_of_two(self._places.num_instances),
            **widths,
        )

    def wait(self, channel: Channel, count_N: Tensor) -> None:
        """Wait on the device until the rows of every peer with a count are here; bounded, see
        `check`.

        Of a counted channel: of every peer, and count_N becomes what they counted.
        """
        from data_plane.transport.triton_exchange import wait_kernel

        place, num_instances = self._places.channels[channel], self._places.num_instances
        memory = self._memory.memory
        wait_kernel[(1,)](
            memory[place.flag_offset :][: 2 * num_instances * 8].view(torch.int64),
            self.epoch_C[channel:],
            self.error,
            count_N,
            memory[place.cell_offset :][: 2 * num_instances * 4].view(torch.int32),
            num_instances,
            int(channel),
            self._max_polls,
            COUNTED=place.is_counted,
            BLOCK_N=_power_of_two(num_instances),
            num_warps=1,
        )

    def take(self, channel: Channel, count_N: Tensor, fields: Mapping[str, Tensor]) -> None:
        """Copy what was waited for to the first rows of the fields, those of lower peers first."""
        from data_plane.transport.triton_exchange import take_kernel

        place = self._places.channels[channel]
        tensors, offsets, widths = self._fields(place, fields)
        take_kernel[self._grid(place)](
            self._memory.address_N,
            self.epoch_C[channel:],
            count_N,
            *tensors,
            *offsets,
            self._memory.instance,
            place.num_slots,
            BLOCK_N=_power_of_two(self._places.num_instances),
            **widths,
        )

    def check(self) -> None:
        """Raise what ended a wait, ExchangeTimeout or EpochError, if one did. Waits for the device."""
        channel, source, epoch, found = self.error.tolist()
        if channel == 0:
            return
        what = f"instance {self._memory.instance} awaits {Channel(channel - 1).name} of instance {source}, epoch {epoch}"
        if found > epoch:
            raise EpochError(
                f"{what}, but finds epoch {found}: the region was overwritten before it was read"
            )
        raise ExchangeTimeout(
            f"{what}: it did not come in {self._max_polls} polls (the last epoch here is {found})"
        )

    def _grid(self, place: _Place) -> tuple[int, int]:
        return self._places.num_instances, min(_MAX_PROGRAMS, _power_of_two(place.num_slots))

    def _fields(
        self, place: _Place, fields: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], list[int], dict[str, int]]:
        """Tensors, offsets and widths of four fields; those that are not there have no width."""
        tensors, widths = [], dict.fromkeys("ABCD", 0)
        for letter, field in zip(widths, place.fields, strict=False):
            tensor = fields[field.name]
            assert tensor.is_contiguous(), field.name
            # Rows are copied as they are: 4 bytes at a time, if they have as many.
            flat = tensor.view(len(tensor), math.prod(tensor.shape[1:]))
            tensors.append(flat.view(torch.int32 if field.row_bytes % 4 == 0 else torch.uint8))
            widths[letter] = tensors[-1].shape[1]
            assert tensors[-1].nbytes == len(tensor) * field.row_bytes, field.name
        widths["BLOCK"] = min(_MAX_BLOCK, _power_of_two(max(widths.values())))
        missing = _MAX_FIELDS - len(tensors)
        offsets = [field.offset for field in place.fields]
        return tensors + tensors[:1] * missing, offsets + [0] * missing, widths


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _power_of_two(high: int) -> int:
    return 1 << (high - 1).bit_length()
