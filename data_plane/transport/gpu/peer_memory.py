"""Memory of GPUs that peers write: the places of regions in it, and each instance's address.

The memory is of one term: a lost process may still write what it has mapped (protocol.md, terms).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from socket import gethostname
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from data_plane.transport.exchange import Channel, Field, RegionLayout, side_by_side
from data_plane.transport.gpu.cuda_runtime import loaded_cudart

CHANNELS = (Channel.Q, Channel.RES, Channel.DISPATCH, Channel.COMBINE)
"""Channels of a step; the mailbox stays with the host's exchange."""

MAX_FIELDS = 4
_ALIGNMENT = 128
HEADER_BYTES = _ALIGNMENT
"""Before a region's first packed row, for the count."""
FAR = -1
"""Beyond this GPU's stores, but within reach of NVSHMEM's puts."""
_COUNT = "count"
"""A channel with it is counted: every instance puts to every one, also no rows."""


def cuda_ipc_obstacle(device: torch.device) -> str:
    """Return why this exchange cannot run on the device; empty if it can."""
    if device.type != "cuda":
        return "it needs an NVIDIA GPU, and this instance runs on the CPU"
    if not torch.cuda.is_available():
        advice = "nvidia-smi must list one"
        if torch.version.cuda is None:
            advice = f"torch {torch.__version__} is for CPUs; `make setup` with a driver has CUDA's"
        return f"it needs an NVIDIA GPU, and torch sees none here, on {gethostname()}: {advice}"
    if find_spec("triton") is None:
        return "the package triton is not installed (pip install '.[gpu]')"
    if not loaded_cudart():
        return "torch has loaded no CUDA runtime (libcudart), whose calls map memory of peers"
    return ""


class FieldPlace(NamedTuple):
    """A field's place in the memory of every instance."""

    name: str
    offset: int
    """Offset in bytes of [parity, source, slot]."""
    row_bytes: int
    stride: int
    """Bytes from one slot to the next."""


@dataclass(frozen=True, slots=True)
class RegionPlace:
    """A channel's place in the memory of every instance."""

    flag_offset: int
    """Offset of the flags, [parity, source] int64."""
    cell_offset: int
    """Offset of the counts, [parity, source] int32, of a counted channel."""
    cell_stride: int
    is_counted: bool
    num_slots: int
    """From one source's region to the next; with one for the header if rows are packed."""
    fields: tuple[FieldPlace, ...]
    offset: int = 0
    """Offset of the packed rows, [parity, source, slot, row_bytes], header included."""
    stage_offset: int = 0
    """Offset of the packed rows to be put, [target, slot, row_bytes]."""
    row_bytes: int = 0
    """Bytes of a packed row; 0 if each field has its own array."""

    @property
    def packed(self) -> list[int]:
        """The channel's row of the table for puts to far peers."""
        header = HEADER_BYTES if self.is_counted else 0
        region_bytes = self.num_slots * self.row_bytes
        offsets = [self.flag_offset, self.offset, self.stage_offset]
        return [*offsets, region_bytes, self.row_bytes, header]


class RegionPlaces:
    """The places of the layout's channels, equal in the memory of every instance."""

    def __init__(self, layout: RegionLayout, num_instances: int, is_packed: bool = False) -> None:
        """is_packed: the fields of a slot are side by side, so one put carries all rows."""
        self.num_instances = num_instances
        self.is_packed = is_packed
        self.channels: dict[Channel, RegionPlace] = {}
        self.num_bytes = 0
        for channel in (channel for channel in CHANNELS if channel in layout):
            rows = [field for field in layout[channel] if field.name != _COUNT]
            num_slots = rows[0].shape[0]
            assert len(rows) <= MAX_FIELDS, channel.name
            assert all(field.shape[0] == num_slots for field in rows), (
                f"the fields of {channel.name} have different numbers of slots"
            )
            is_counted = len(rows) < len(layout[channel])
            place = self._packed if is_packed else self._apart
            self.channels[channel] = place(rows, num_slots, is_counted)

    def _apart(self, rows: list[Field], num_slots: int, is_counted: bool) -> RegionPlace:
        regions = 2 * self.num_instances
        flag_offset, cell_offset = self._take(regions * 8), self._take(regions * 4)
        places = []
        for field in rows:
            offset = self._take(regions * num_slots * field.row_bytes)
            places.append(FieldPlace(field.name, offset, field.row_bytes, field.row_bytes))
        return RegionPlace(flag_offset, cell_offset, 4, is_counted, num_slots, tuple(places))

    def _packed(self, rows: list[Field], num_slots: int, is_counted: bool) -> RegionPlace:
        regions = 2 * self.num_instances
        *begins, num_bytes = side_by_side(rows)
        row_bytes = _aligned(num_bytes)
        region_bytes = (num_slots + 1) * row_bytes
        flag_offset, offset = self._take(regions * 8), self._take(regions * region_bytes)
        fields = (
            FieldPlace(field.name, offset + row_bytes + begin, field.row_bytes, row_bytes)
            for field, begin in zip(rows, begins, strict=True)
        )
        return RegionPlace(
            flag_offset=flag_offset,
            cell_offset=offset + row_bytes - HEADER_BYTES,
            cell_stride=region_bytes,
            is_counted=is_counted,
            num_slots=num_slots + 1,
            fields=tuple(fields),
            offset=offset,
            stage_offset=self._take(self.num_instances * region_bytes),
            row_bytes=row_bytes,
        )

    def _take(self, num_bytes: int) -> int:
        offset = self.num_bytes
        self.num_bytes += _aligned(num_bytes)
        return offset


class TermMemory(Protocol):
    """A maker of an instance's memory for one lane's (micro-batch's) exchange, term after term."""

    def begin_term(self, seats: Sequence[int]) -> PeerMemory:
        """Make memory, all zero, and find that of these instances, this one included."""

    def leave(self) -> None:
        """Give up the memory of the term. Idempotent."""


class PeerMemory:
    """An instance's memory that its peers write in one term, and the addresses of theirs."""

    def __init__(
        self,
        instance: int,
        addresses: Sequence[int],
        memory: Tensor | None = None,
        owner: Any = None,
        put_far: Callable[..., None] | None = None,
    ) -> None:
        """owner: keeps the peers' memory alive. put_far: puts packed rows to far peers."""
        self.instance = instance
        self.addresses = addresses
        """Address or FAR; 0 outside the term."""
        self.memory = memory
        """[bytes] uint8, this instance's, if it is a tensor."""
        self._owner, self.put_far = owner, put_far

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
