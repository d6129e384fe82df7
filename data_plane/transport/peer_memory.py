"""Memory of the GPUs of one node that peers write: where regions lie, and who maps what.

Enters: the layout of a region; where the members of a term meet. Leaves: this instance's memory,
and the addresses of its peers'. Does not know: epochs, kernels, what rows mean.

The memory is of one term, as the segments of the host's exchange are: a process that was lost may
still write what it has mapped (docs/protocol.md, terms).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data_plane.transport.exchange import Channel, ExchangeTimeout, RegionLayout

CHANNELS = (Channel.Q, Channel.RES, Channel.DISPATCH, Channel.COMBINE)
"""The channels that a step uses; the mailbox is the host's."""

MAX_FIELDS = 4
"""Most fields of a channel, besides the count."""
_ALIGNMENT = 128
_COUNT = "count"
"""The field that makes a channel a counted one: every instance puts to every one, also no rows."""
_TICK_S = 0.01
_MAP_S = 30.0
"""Limit of what torch does to map memory, when all members are there; it does not see the term."""


def cuda_ipc_obstacle(device: torch.device) -> str:
    """The reason why this exchange cannot run on the device; an empty string if it can."""
    if device.type != "cuda":
        return "it needs an NVIDIA GPU, and this instance runs on the CPU"
    if not torch.cuda.is_available():
        return "it needs an NVIDIA GPU, and torch sees none here"
    if find_spec("triton") is None:
        return "the package triton is not installed (pip install 'nanocp[gpu]')"
    return ""


class FieldPlace(NamedTuple):
    """The place of a field in the memory of every instance."""

    name: str
    offset: int
    """Offset in bytes of [parity, source, slot, row_bytes] in an instance's memory."""
    row_bytes: int


@dataclass(frozen=True, slots=True)
class RegionPlace:
    """The place of a channel in the memory of every instance."""

    flag_offset: int
    """Offset of the flags, [parity, source] int64."""
    cell_offset: int
    """Offset of the counts, [parity, source] int32; unused if the channel is not counted."""
    is_counted: bool
    num_slots: int
    fields: tuple[FieldPlace, ...]


class RegionPlaces:
    """The places of the layout's channels, equal in the memory of every instance."""

    def __init__(self, layout: RegionLayout, num_instances: int) -> None:
        self.num_instances = num_instances
        self.channels: dict[Channel, RegionPlace] = {}
        offset = 0
        for channel in (channel for channel in CHANNELS if channel in layout):
            rows = [field for field in layout[channel] if field.name != _COUNT]
            num_slots = rows[0].shape[0]
            flag_offset, cell_offset = offset, offset + _aligned(2 * num_instances * 8)
            offset = cell_offset + _aligned(2 * num_instances * 4)
            fields = []
            assert len(rows) <= MAX_FIELDS, channel.name
            for field in rows:
                assert field.shape[0] == num_slots, (
                    f"{channel.name}.{field.name} has other slots than the first field"
                )
                row_bytes = (
                    int(np.prod(field.shape[1:], dtype=np.int64)) * np.dtype(field.dtype).itemsize
                )
                fields.append(FieldPlace(field.name, offset, row_bytes))
                offset += _aligned(2 * num_instances * num_slots * row_bytes)
            is_counted = len(rows) < len(layout[channel])
            self.channels[channel] = RegionPlace(
                flag_offset=flag_offset,
                cell_offset=cell_offset,
                is_counted=is_counted,
                num_slots=num_slots,
                fields=tuple(fields),
            )
        self.num_bytes = offset


class GroupMember(NamedTuple):
    """What each process of a term reports to the others before it maps memory."""

    obstacle: str
    """See cuda_ipc_obstacle."""
    node: str
    gpu: int | None


class Meeting(NamedTuple):
    """Where the members of a term exchange what they must know to map each other's memory."""

    name: str
    """The name of this memory; this process has used it for no other."""
    instance: int
    seats: Sequence[int]
    """Instances of the term, ascending, with this one."""
    store: Any
    """A torch.distributed.Store that all members reach, and that no other term uses."""
    timeout_ms: float
    check: Callable[[], None] = lambda: None
    """Raises TermOver if the term is over."""

    def gather(self, what: str, value: str = "") -> list[str]:
        """Wait until every member has called this; returns their values, by seat.

        Raises ExchangeTimeout naming a member that is missing, or what `check` raises.
        """
        deadline = time.monotonic() + self.timeout_ms / 1000
        self.store.set(self._key(what, self.instance), value)
        for seat in self.seats:
            while not self.store.check([self._key(what, seat)]):
                self.check()
                if time.monotonic() > deadline:
                    error = ExchangeTimeout(
                        f"instance {self.instance} awaits memory of instance {seat}: it did not "
                        f"come within {self.timeout_ms:g} ms ({what})"
                    )
                    error.peer = seat
                    raise error
                time.sleep(_TICK_S)
        return [self.store.get(self._key(what, seat)).decode() for seat in self.seats]

    def _key(self, what: str, seat: int) -> str:
        return f"{self.name}/{what}/{seat}"


class PeerMemory:
    """An instance's memory that its peers write in one term, and where the peers' memory is."""

    def __init__(
        self, instance: int, memory: Tensor, addresses: Sequence[int], owner: Any = None
    ) -> None:
        """owner: an object that keeps the mappings of the peers' memory alive."""
        self.instance = instance
        self.memory = memory
        """[bytes] uint8, zero at first."""
        self.addresses = addresses
        """The address of each instance's memory; 0 for one that is not in the term."""
        self._owner = owner

    @classmethod
    def create_all(
        cls, places: RegionPlaces, device: torch.device, seats: Sequence[int] | None = None
    ) -> list[PeerMemory]:
        """Make the memory of all seats of a term in one process on one device; None: every seat."""
        memory_of = {
            seat: torch.zeros(places.num_bytes, dtype=torch.uint8, device=device)
            for seat in (range(places.num_instances) if seats is None else seats)
        }
        addresses = [
            memory_of[seat].data_ptr() if seat in memory_of else 0
            for seat in range(places.num_instances)
        ]
        return [cls(seat, memory, addresses, memory_of) for seat, memory in memory_of.items()]

    @classmethod
    def create(cls, places: RegionPlaces, device: torch.device, meeting: Meeting) -> PeerMemory:
        """Make the memory of this process's instance; all members of the meeting call it together.

        Raises ValueError, in every process, if one has no CUDA, or if they are on several nodes,
        ExchangeTimeout if a member does not map its memory, and what Meeting.gather raises.
        """
        import torch.distributed._symmetric_memory as symm_mem
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed.distributed_c10d import GroupName

        own = GroupMember(cuda_ipc_obstacle(device), socket.gethostname(), device.index)
        found = meeting.gather("member", json.dumps(own))
        members = [GroupMember(*json.loads(member)) for member in found]
        _refuse(meeting.seats, members)
        if len({member.gpu for member in members}) < len(members):
            # Ray shows each actor one GPU, as number 0. torch takes these for the same GPU and
            # refuses, as it does for a test with several processes on one GPU. Allowing it costs
            # multicast, which is not used here.
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        memory = symm_mem.empty(places.num_bytes, dtype=torch.uint8, device=device).zero_()
        torch.cuda.synchronize(device)
        # torch keeps a group's members by its name for as long as the process lives, and a term
        # has other members than the one before. So each has a name, and no process group.
        rank = meeting.seats.index(meeting.instance)
        _SymmetricMemory.set_group_info(meeting.name, rank, len(members), meeting.store)
        meeting.store.set_timeout(timedelta(seconds=_MAP_S))
        began = time.monotonic()
        try:
            handle = symm_mem.rendezvous(memory, GroupName(meeting.name))
        except RuntimeError as error:
            if time.monotonic() - began < _MAP_S:
                raise
            raise ExchangeTimeout(f"peers did not map their memory in {_MAP_S:g} s") from error
        addresses = [0] * places.num_instances
        peers = []
        for peer, seat in enumerate(meeting.seats):
            peers.append(handle.get_buffer(peer, (places.num_bytes,), torch.uint8))
            addresses[seat] = peers[-1].data_ptr()
        meeting.gather("mapped")  # no instance may put before all memory is zero
        return cls(meeting.instance, memory, addresses, (handle, peers))


def _refuse(seats: Sequence[int], members: Sequence[GroupMember]) -> None:
    """Raise ValueError if the exchange cannot run between the members."""
    for seat, member in zip(seats, members, strict=True):
        if member.obstacle:
            raise ValueError(f"cuda_ipc cannot run on instance {seat}: {member.obstacle}")
    nodes = sorted({member.node for member in members})
    if len(nodes) > 1:
        raise ValueError(
            f"cuda_ipc reaches the GPUs of one node; the instances are on {', '.join(nodes)}"
        )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
