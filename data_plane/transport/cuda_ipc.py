"""The routed exchange through peer memory of the GPUs of one node, for captured steps.

Enters: the layout of a region; routing tables and rows on the device. Leaves: rows put into peers'
memory, and rows taken from this instance's own. Does not know: layers, models, which rows a table
names. The mailbox stays with the host's exchange. (The paper's section 5.3.)

Epochs are on the device (triton_exchange.py) and the host does not know them. So an error of a wait
is read after the step, by `check`.
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
"""The channels that a step uses; the mailbox is the host's."""

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
"""For a put on each channel: the channel whose last wait it follows, and its lead in epochs."""
_COUNT = "count"
"""The field that makes a channel a counted one: every instance puts to every one, also no rows."""


def cuda_ipc_obstacle(device: torch.device) -> str:
    """The reason why this exchange cannot run on the device; an empty string if it can."""
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
    """Offset in bytes of [parity, source, slot, row_bytes] in an instance's memory."""
    row_bytes: int


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a channel in the memory of every instance."""

    flag_offset: int
    """Offset of the flags, [parity, source] int64."""
    cell_offset: int
    """Offset of the counts, [parity, source] int32; unused if the channel is not counted."""
    is_counted: bool
    num_slots: int
    fields: tuple[_Field, ...]


class RegionPlaces:
    """The places of the layout's channels, equal in the memory of every instance."""

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
                flag_offset=flag_offset,
                cell_offset=cell_offset,
                is_counted=is_counted,
                num_slots=num_slots,
                fields=tuple(fields),
            )
        self.num_bytes = offset


class GroupMember(NamedTuple):
    """What each process of a group reports to the others before it maps memory."""

    obstacle: str
    """See cuda_ipc_obstacle."""
    node: str
    gpu: int | None


class PeerMemory:
    """An instance's memory that its peers write, and the addresses of the peers' memory."""

    def __init__(
        self, instance: int, memory: Tensor, addresses: list[int], owner: Any = None
    ) -> None:
        """owner: an object that keeps the mappings of the peers' memory alive."""
        self.instance = instance
        self.memory = memory
        """[bytes] uint8, zero at first."""
        self.address_N = torch.tensor(addresses, dtype=torch.int64, device=memory.device)
        self._owner = owner

    @classmethod
    def create_all(cls, places: RegionPlaces, device: torch.device) -> list[PeerMemory]:
        """Make the memory of all instances, in one process on one device."""
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
        """Make the memory of this process's instance; all processes of the group call it together.

        group: a torch.distributed group of the CPU (gloo), whose ranks are the instances. Raises
        ValueError, in every process, if one has no CUDA, or if they are on several nodes.
        """
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symm_mem

        members: list[Any] = [None] * dist.get_world_size(group)
        own = GroupMember(cuda_ipc_obstacle(device), socket.gethostname(), device.index)
        dist.all_gather_object(members, own, group=group)
        _refuse(members, places.num_instances)
        if len({member.gpu for member in members}) < len(members):
            # Ray shows each actor one GPU, as number 0. torch takes these for the same GPU and
            # refuses, as it does for a test with several processes on one GPU. Allowing it costs
            # multicast, which is not used here.
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        memory = symm_mem.empty(places.num_bytes, dtype=torch.uint8, device=device).zero_()
        torch.cuda.synchronize(device)
        handle = symm_mem.rendezvous(memory, group)
        peers = [
            handle.get_buffer(peer, (places.num_bytes,), torch.uint8)
            for peer in range(len(members))
        ]
        dist.barrier(group=group)  # no instance may put before all memory is zero
        return cls(
            dist.get_rank(group), memory, [peer.data_ptr() for peer in peers], (handle, peers)
        )


def _refuse(members: list[GroupMember], num_instances: int) -> None:
    """Raise ValueError if the exchange cannot run between the members."""
    if len(members) != num_instances:
        raise ValueError(
            f"cuda_ipc: the group has {len(members)} members; "
            f"the cluster has {num_instances} instances"
        )
    for instance, member in enumerate(members):
        if member.obstacle:
            raise ValueError(f"cuda_ipc cannot run on instance {instance}: {member.obstacle}")
    nodes = sorted({member.node for member in members})
    if len(nodes) > 1:
        raise ValueError(
            f"cuda_ipc reaches the GPUs of one node; the instances are on {', '.join(nodes)}"
        )


class _WaitError(NamedTuple):
    """The error word of a wait; see triton_exchange.wait_kernel."""

    channel: int
    """The channel's number + 1; 0: no error."""
    source: int
    awaited_epoch: int
    found_epoch: int
    """Below 0: the epoch came with a count of rows that no region holds, and this is minus it."""


class GpuExchange:
    """One instance's end of the exchange. Every instance calls it in every layer, rows or not.

    The calls of a layer are: put, wait and take Q, then put, wait and take RES, on streams that
    keep this order. In a mixture of experts the same follows with DISPATCH and COMBINE.
    """

    def __init__(self, places: RegionPlaces, device: torch.device, timeout_ms: float) -> None:
        """Prepare an end, which can put and wait after `attach`.

        timeout_ms: the limit of each wait, counted in polls and therefore not exact.
        """
        self.places = places
        """Where the regions of every channel lie in an instance's memory."""
        self._timeout_ms = timeout_ms
        self.max_polls = max(1, round(timeout_ms * _POLLS_PER_MS))
        """The limit of each wait, for kernels that count polls."""
        self.timeout_ns = round(timeout_ms * 1e6)
        """The limit of each wait, for kernels that read the GPU's clock."""
        self.epoch_C = torch.zeros(len(CHANNELS), dtype=torch.int64, device=device)
        """[channel] int64: epoch of the last wait. Epochs begin at 1, so a flag of 0 is none."""
        self.error = torch.zeros(4, dtype=torch.int64, device=device)
        """The first error of a wait, all zero without one; see triton_exchange.wait_kernel.

        A fused mixture writes it too (moe/fused_kernel.py).
        """
        self._done_CN = torch.zeros(
            len(CHANNELS), places.num_instances, dtype=torch.int32, device=device
        )

    def attach(self, memory: PeerMemory) -> None:
        """Take the memory of this instance and the addresses of its peers."""
        self.memory = memory

    def put(
        self,
        channel: Channel,
        fields: Mapping[str, Tensor],
        count_N: Tensor,
        row_NL: Tensor | None = None,
    ) -> None:
        """Put rows of the fields into the slots at each peer, then the peer's flag.

        A peer without a row gets nothing, unless the channel is counted: then every instance gets a
        flag, this one too. fields: by name [rows, ...], contiguous. count_N [N] int32: number of
        slots at each peer. row_NL [N, slots] int32: the row of each slot; None: the rows are dense,
        those for lower peers first.
        """
        from data_plane.transport.triton_exchange import put_kernel

        place = self.places.channels[channel]
        follows, ahead = _FOLLOWS[channel]
        tensors, offsets, widths = self._fields(place, fields)
        put_kernel[self._grid(place)](
            self.memory.address_N,
            self.epoch_C[follows:],
            self.error,
            count_N,
            count_N if row_NL is None else row_NL,
            self._done_CN[channel],
            *tensors,
            place.flag_offset,
            place.cell_offset,
            *offsets,
            self.memory.instance,
            place.num_slots,
            AHEAD=ahead,
            HAS_ROWS=row_NL is not None,
            COUNTED=place.is_counted,
            BLOCK_N=_power_of_two(self.places.num_instances),
            **widths,
        )

    def wait(self, channel: Channel, count_N: Tensor) -> None:
        """Wait on the device, a bounded time, until the rows of every peer with a count are here.

        count_N: [N] int32. If the channel is counted, waits for every peer and writes their counts
        to count_N. `check` reports a wait that failed.
        """
        from data_plane.transport.triton_exchange import wait_kernel

        place, num_instances = self.places.channels[channel], self.places.num_instances
        memory = self.memory.memory
        wait_kernel[(1,)](
            memory[place.flag_offset :][: 2 * num_instances * 8].view(torch.int64),
            self.epoch_C[channel:],
            self.error,
            count_N,
            memory[place.cell_offset :][: 2 * num_instances * 4].view(torch.int32),
            num_instances,
            int(channel),
            self.max_polls,
            COUNTED=place.is_counted,
            BLOCK_N=_power_of_two(num_instances),
            num_warps=1,
        )

    def take(self, channel: Channel, count_N: Tensor, fields: Mapping[str, Tensor]) -> None:
        """Copy the rows that were waited for to the first rows of the fields, by ascending peer."""
        from data_plane.transport.triton_exchange import take_kernel

        place = self.places.channels[channel]
        tensors, offsets, widths = self._fields(place, fields)
        take_kernel[self._grid(place)](
            self.memory.address_N,
            self.epoch_C[channel:],
            count_N,
            *tensors,
            *offsets,
            self.memory.instance,
            place.num_slots,
            BLOCK_N=_power_of_two(self.places.num_instances),
            **widths,
        )

    def check(self) -> None:
        """Raise ExchangeTimeout or EpochError if a wait failed. Waits for the device."""
        error = _WaitError._make(self.error.tolist())
        if error.channel == 0:
            return
        what = (
            f"instance {self.memory.instance} awaits {Channel(error.channel - 1).name} of "
            f"instance {error.source}, epoch {error.awaited_epoch}"
        )
        if error.found_epoch < 0:
            raise EpochError(
                f"{what}, but finds a count of {-error.found_epoch} rows in its region"
            )
        if error.found_epoch > error.awaited_epoch:
            raise EpochError(
                f"{what}, but finds epoch {error.found_epoch}: the region was overwritten before "
                "it was read"
            )
        raise ExchangeTimeout(
            f"{what}: it did not come within {self._timeout_ms:g} ms "
            f"(the last epoch here is {error.found_epoch})"
        )

    def _grid(self, place: _Place) -> tuple[int, int]:
        return self.places.num_instances, min(_MAX_PROGRAMS, _power_of_two(place.num_slots))

    def _fields(
        self, place: _Place, fields: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], list[int], dict[str, int]]:
        """Tensors, offsets and widths of four fields; a field that does not exist has width 0."""
        tensors, widths = [], dict.fromkeys("ABCD", 0)
        for letter, field in zip(widths, place.fields, strict=False):
            tensor = fields[field.name]
            assert tensor.is_contiguous(), field.name
            # Rows are copied as bytes: 4 at a time if a row has a multiple of 4.
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
