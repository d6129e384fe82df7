"""The exchange: one-sided puts into pre-allocated regions, an arrival flag, a bounded wait (5.3).

Enters: payloads and the epoch of the exchange. Leaves: views of what peers put. Does not know:
routes, layers, models.

Every ordered pair of instances has, for each channel, two regions (parity = epoch & 1) in the
*receiver's* memory. The sender writes the region, then its flag; the receiver waits until the flag
EQUALS the epoch, never at least (docs/protocol.md, equal epochs): an unequal newer flag means that
a buffer was reused too early, and raises EpochError.

Why two are enough is a property of the protocol, not of this code: each linked pair is bounded by
its reply, all others by the dispatch flags to and from everybody. A channel's epochs therefore
count the uses of that channel: the attention channels count attention layers, the MoE channels
count MoE layers, the mailbox counts windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np


class Channel(IntEnum):
    """What a region is for."""

    Q = 0
    """Rows of the sender for the receiver's attention, with position and live flag and the new
    token's latent KV."""
    RES = 1
    """Partials (partial_o, lse) of the receiver's rows."""
    DISPATCH = 2
    """Hidden states for the receiver's experts, their expert ids and weights."""
    COMBINE = 3
    """Weighted sums of the sender's experts for the receiver's rows."""
    MAILBOX = 4
    """Row state handed over at the edge of a window (docs/protocol.md, hand-offs)."""


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a region."""

    name: str
    dtype: str
    """A numpy dtype name. bfloat16 travels as uint16: numpy has no bfloat16, and the exchange never
    looks inside."""
    shape: tuple[int, ...]


RegionLayout = Mapping[Channel, tuple[Field, ...]]
"""The fields of one region, for each channel. The same on every instance: it follows from
cluster-wide bounds only."""


def row_bytes(layout: RegionLayout) -> dict[Channel, int]:
    """Bytes that one row, or one slot, takes in a channel's region: every field but the count of
    rows."""
    return {
        channel: sum(
            int(np.prod(field.shape[1:], dtype=np.int64)) * np.dtype(field.dtype).itemsize
            for field in fields
            if field.name != "count"
        )
        for channel, fields in layout.items()
    }


class ExchangeError(RuntimeError):
    """The exchange cannot go on. Subclasses: PeerLost, ExchangeTimeout, EpochError."""


class PeerLost(ExchangeError):
    """The peer's process is gone."""


class ExchangeTimeout(ExchangeError):
    """The peer lives but did not send in exchange_timeout_ms."""


class EpochError(ExchangeError):
    """A flag is ahead of the awaited epoch: the region was overwritten before it was read."""


class Exchange(Protocol):
    """One instance's end of the exchange."""

    @property
    def instance(self) -> int:
        """This instance."""

    @property
    def num_instances(self) -> int:
        """Members, this one included. There is no region from an instance to itself."""

    @property
    def waited_ns(self) -> int:
        """Time spent in `wait` since the start, nanoseconds."""

    def connect(self, timeout_ms: int) -> None:
        """Attach to every peer's regions. Raises ExchangeTimeout naming the peers that did not
        appear."""

    def outgoing(self, channel: Channel, target: int, epoch: int) -> dict[str, np.ndarray]:
        """Writable views, by field name, of this instance's region at the target. Valid until `put`
        of this epoch."""

    def put(self, channel: Channel, target: int, epoch: int, num_rows: int | None = None) -> None:
        """Publish the region: everything written to `outgoing` is visible to the target before the
        flag is.

        num_rows: of a field with more than one row (its first axis), only so many need arrive.
        """

    def arrived(self, channel: Channel, source: int, epoch: int) -> bool:
        """Whether the source's put of this epoch is here. Raises EpochError if a later one is."""

    def wait(self, channel: Channel, source: int, epoch: int) -> dict[str, np.ndarray]:
        """Read-only views, by field name, of the source's region, once arrived. Valid until this
        instance's reply.

        Raises PeerLost, ExchangeTimeout, EpochError, each naming channel, source and epoch.
        """

    def close(self) -> None:
        """Drop every view and mapping, and remove what this instance created. Idempotent."""
