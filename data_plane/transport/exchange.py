"""The exchange: one-sided puts into pre-allocated regions, an arrival flag, a bounded wait.

Every ordered pair of instances has two regions for each channel (parity = epoch & 1), in the
*receiver's* memory. The sender writes the region, then its flag. The receiver waits until the flag
EQUALS the epoch (protocol.md, equal epochs). A channel's epochs count its uses. Two regions suffice
as replies, or all peers' dispatch flags, bound the sender. (The paper's section 5.3.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np


class Channel(IntEnum):
    """The purpose of a region."""

    Q = 0
    """Query, position, live flag and new latent KV for the receiver's attention."""
    RES = 1
    """Partials (partial_o, lse) for the receiver's rows."""
    DISPATCH = 2
    """Hidden states for the receiver's experts, with expert ids and weights."""
    COMBINE = 3
    """Weighted sums over the sender's experts, for the receiver's rows."""
    MAILBOX = 4
    """Row state handed over at a window's edge (protocol.md, hand-offs)."""
    Q_OF_LANE_1 = 5
    RES_OF_LANE_1 = 6
    DISPATCH_OF_LANE_1 = 7
    COMBINE_OF_LANE_1 = 8

    def in_lane(self, lane: int) -> Channel:
        """Return a lane's channel for the same purpose as this channel of lane 0.

        Instances may interleave lanes (micro-batches) differently (protocol.md, equal epochs).
        """
        return _CHANNELS[self + lane * _LANE_OFFSET]


_LANE_OFFSET = Channel.Q_OF_LANE_1 - Channel.Q
_CHANNELS = tuple(Channel)  # looked up at every put and wait


class Awaited(NamedTuple):
    """A put of a peer that a generator awaits."""

    channel: Channel
    source: int
    epoch: int


class Flags(NamedTuple):
    """Addresses of two u64, each epoch + 1 once the region of the epoch was put."""

    outgoing: int | None
    """None: only `put` can raise it."""
    incoming: int | None
    """None: only `arrived` can tell."""


_FIELD_ALIGNMENT = 16
"""Kernels read and write a field 16 bytes at a time."""


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a region."""

    name: str
    dtype: str
    """A numpy dtype name; bfloat16 travels as uint16, because numpy has no bfloat16."""
    shape: tuple[int, ...]
    """Rows, or slots, first."""

    @property
    def row_bytes(self) -> int:
        """Return the bytes of the field in one row."""
        return int(np.prod(self.shape[1:], dtype=np.int64)) * np.dtype(self.dtype).itemsize


def side_by_side(fields: Iterable[Field]) -> list[int]:
    """Return the begin of each field of a row, in order; then the bytes of all."""
    sizes = (-(-field.row_bytes // _FIELD_ALIGNMENT) * _FIELD_ALIGNMENT for field in fields)
    return list(accumulate(sizes, initial=0))


RegionLayout = Mapping[Channel, tuple[Field, ...]]
"""Equal on every instance: they follow from the bounds."""


def in_two_lanes(layout: RegionLayout) -> RegionLayout:
    """Return the layout for windows in two lanes, each with full regions."""
    second = {
        channel.in_lane(1): fields
        for channel, fields in layout.items()
        if channel is not Channel.MAILBOX
    }
    return {**layout, **second}


def row_bytes(layout: RegionLayout) -> dict[Channel, int]:
    """Return the bytes of one row in each channel's region, without the count."""
    return {
        channel: sum(field.row_bytes for field in fields if field.name != "count")
        for channel, fields in layout.items()
    }


NO_TERM = 2**62
"""Above all terms."""


class Term:
    """The term of a process, and whether it is over (protocol.md, terms)."""

    def __init__(self, number: int = 1) -> None:
        self.number = number
        """Part of the term's segment names."""
        self._last_ended = 0.0
        self._mirrors: list[np.ndarray] = []

    def end(self, number: float) -> None:
        """End the term of this number and all before it; math.inf ends all."""
        self._last_ended = max(self._last_ended, number)
        self._write()

    def go_on(self) -> None:
        """Allow terms after this one again: there is another controller."""
        self._last_ended = self.number
        self._write()

    def mirror(self, word: np.ndarray) -> None:
        """Keep word[0], int64, at the last ended term."""
        self._mirrors.append(word)
        self._write()

    def _write(self) -> None:
        for word in self._mirrors:
            word[0] = min(self._last_ended, NO_TERM - 1)

    @property
    def is_over(self) -> bool:
        """True if nothing of this term may be waited for any more."""
        return self._last_ended >= self.number

    def check(self) -> None:
        """Raise TermOver if the term is over."""
        if self.is_over:
            raise TermOver(f"term {self.number} is over")


class TermOver(Exception):
    """The term ended during a wait; a step that was running is abandoned."""


class ExchangeError(RuntimeError):
    """The exchange cannot go on; subclasses are PeerLost, ExchangeTimeout and EpochError."""

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class PeerLost(ExchangeError):
    """The peer's process is gone, or its connection."""


class ExchangeTimeout(ExchangeError):
    """The peer is alive but sent nothing within exchange_timeout_ms."""


class EpochError(ExchangeError):
    """A flag is newer than the awaited epoch: the region was overwritten before it was read."""


class Exchange(Protocol):
    """One instance's end of the exchange."""

    instance: int
    num_instances: int
    """Number of instances, this one included."""
    waited_ns: int
    """Nanoseconds of waits for puts since the start."""
    awaited: int | None
    """The instance that blocks a wait now, for any thread."""

    def connect(self, timeout_ms: int) -> None:
        """Attach to every peer's regions.

        Raises ExchangeTimeout naming a peer that is missing, PeerLost or TermOver.
        """

    def outgoing(self, channel: Channel, target: int, epoch: int) -> dict[str, np.ndarray]:
        """Return writable views, by field name, of this instance's region at the target.

        They are valid until `put` of this epoch.
        """

    def put(self, channel: Channel, target: int, epoch: int, num_rows: int | None = None) -> None:
        """Publish the region, which is visible before its flag.

        num_rows: rows that must arrive of fields with more than one; None: all.
        """

    def incoming(self, channel: Channel, source: int, epoch: int) -> dict[str, np.ndarray]:
        """Return read-only views, by name, of the source's region, perhaps before its put."""

    def flags(self, channel: Channel, peer: int, epoch: int) -> Flags:
        """Return the flags of the regions to and from the peer, for compiled code."""

    def arrived(self, channel: Channel, source: int, epoch: int) -> bool:
        """True once the source's put of this epoch is here. Raises EpochError if a later one is."""

    def wait(self, channel: Channel, source: int, epoch: int) -> dict[str, np.ndarray]:
        """Wait for the source's put; return read-only views, by field name, of its region.

        They are valid until this instance replies. Raises TermOver, or PeerLost, ExchangeTimeout or
        EpochError, which name the put.
        """

    def wait_any(self, awaited: Sequence[Awaited]) -> None:
        """Block until one of the puts has arrived. Raises what `wait` raises."""

    def close(self) -> None:
        """Drop every view and mapping, and remove own memory. Idempotent."""
