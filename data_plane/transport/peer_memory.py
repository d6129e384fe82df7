"""Memory of the GPUs of one node that peers write: where regions lie in it, and where it is.

Enters: the layout of a region. Leaves: the places of regions, and the address of each instance's
memory. Does not know: epochs, kernels, what rows mean, how another process's memory is mapped
(ipc_memory.py).

The memory is of one term, as the segments of the host's exchange are: a process that was lost may
still write what it has mapped (protocol.md, terms).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data_plane.transport.cuda_runtime import loaded_cudart
from data_plane.transport.exchange import Channel, RegionLayout

CHANNELS = (Channel.Q, Channel.RES, Channel.DISPATCH, Channel.COMBINE)
"""The channels that a step uses; the mailbox is the host's."""

MAX_FIELDS = 4
"""Most fields of a channel, besides the count."""
_ALIGNMENT = 128
_COUNT = "count"
"""The field that makes a channel a counted one: every instance puts to every one, also no rows."""


def cuda_ipc_obstacle(device: torch.device) -> str:
    """The reason why this exchange cannot run on the device; an empty string if it can."""
    if device.type != "cuda":
        return "it needs an NVIDIA GPU, and this instance runs on the CPU"
    if not torch.cuda.is_available():
        return "it needs an NVIDIA GPU, and torch sees none here"
    if find_spec("triton") is None:
        return "the package triton is not installed (pip install '.[gpu]')"
    if not loaded_cudart():
        return "torch has loaded no CUDA runtime (libcudart), whose calls map memory of peers"
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


class PeerMemory:
    """An instance's memory that its peers write in one term, and where the peers' memory is."""

    def __init__(
        self,
        instance: int,
        addresses: Sequence[int],
        memory: Tensor | None = None,
        owner: Any = None,
    ) -> None:
        """owner: an object that keeps the peers' memory alive."""
        self.instance = instance
        self.addresses = addresses
        """The address of each instance's memory; 0 for one that is not in the term."""
        self.memory = memory
        """[bytes] uint8, this instance's; None if it is no tensor."""
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
        return [cls(seat, addresses, memory, memory_of) for seat, memory in memory_of.items()]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
