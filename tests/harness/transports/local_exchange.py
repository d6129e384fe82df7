"""The exchange inside one process, for lock-step tests of thousands of clusters and for threads.

There are two regions of plain arrays, handed out without a copy. So a region that is overwritten
too early shows here as it would in shared memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from data_plane.transport.exchange import (
    Awaited,
    Channel,
    EpochError,
    ExchangeTimeout,
    Field,
    Flags,
    PeerLost,
    RegionLayout,
)
from nanocp.config.limits import LimitsConfig


@dataclass(slots=True)
class _Region:
    """One parity of one channel from a source to a target."""

    fields: dict[str, np.ndarray]
    read_only: dict[str, np.ndarray]
    epoch: int = -1

    @classmethod
    def of(cls, fields: Sequence[Field]) -> _Region:
        """Make a region of zeros."""
        arrays = {f.name: np.zeros(f.shape, f.dtype) for f in fields}
        views = {name: array.view() for name, array in arrays.items()}
        for view in views.values():
            view.flags.writeable = False
        return cls(arrays, views)


class _Regions(dict[tuple[Channel, int, int, int], _Region]):
    """Regions by (channel, source, target, parity), made when they are first used."""

    def __init__(self, layout: RegionLayout) -> None:
        self._layout = layout

    def __missing__(self, key: tuple[Channel, int, int, int]) -> _Region:
        return self.setdefault(key, _Region.of(self._layout[key[0]]))


@dataclass(slots=True)
class _Hub:
    """What the ends of all instances share."""

    limits: LimitsConfig
    regions: _Regions
    changed: threading.Condition = field(default_factory=threading.Condition)
    closed: set[int] = field(default_factory=set)


class LocalExchange:
    """One instance's end of the exchange; exchange.Exchange has the contract of each call."""

    def __init__(self, hub: _Hub, instance: int, num_instances: int) -> None:
        """Make one end of a hub; `create_all` makes them all."""
        self._hub = hub
        self._instance = instance
        self._num_instances = num_instances
        self._waited_ns = 0

    @classmethod
    def create_all(
        cls, num_instances: int, layout: RegionLayout, limits: LimitsConfig
    ) -> list[LocalExchange]:
        """Make the ends of all instances."""
        hub = _Hub(limits, _Regions(layout))
        return [cls(hub, instance, num_instances) for instance in range(num_instances)]

    @property
    def instance(self) -> int:
        """The number of this instance."""
        return self._instance

    @property
    def num_instances(self) -> int:
        """Number of instances, with this one."""
        return self._num_instances

    @property
    def waited_ns(self) -> int:
        """Nanoseconds spent in `wait` since the start, for puts that had not arrived yet."""
        return self._waited_ns

    @property
    def awaited(self) -> int | None:
        """None: no process watches what a thread of a test waits for."""
        return None

    def connect(self, timeout_ms: int) -> None:
        """Do nothing: all regions exist from the start."""

    def outgoing(self, channel: Channel, target: int, epoch: int) -> dict[str, np.ndarray]:
        """Writable views of this instance's region at the target."""
        return self._hub.regions[channel, self._instance, target, epoch & 1].fields

    def put(self, channel: Channel, target: int, epoch: int, num_rows: int | None = None) -> None:
        """Publish the region that was written to `outgoing`, all of its rows."""
        region = self._hub.regions[channel, self._instance, target, epoch & 1]
        assert region.epoch < epoch, (
            f"epoch {epoch} of {channel.name} was put before, or a later one"
        )
        with self._hub.changed:
            region.epoch = epoch
            self._hub.changed.notify_all()

    def incoming(self, channel: Channel, source: int, epoch: int) -> dict[str, np.ndarray]:
        """Read-only views of the source's region."""
        return self._hub.regions[channel, source, self._instance, epoch & 1].read_only

    def flags(self, channel: Channel, peer: int, epoch: int) -> Flags:
        """No addresses: epochs are Python's numbers here."""
        return Flags(None, None)

    def arrived(self, channel: Channel, source: int, epoch: int) -> bool:
        """Whether the source's put of this epoch is here. Raises EpochError if a later one is."""
        arrived = self._hub.regions[channel, source, self._instance, epoch & 1].epoch
        if arrived > epoch:
            raise EpochError(
                f"{channel.name} from instance {source}: epoch {epoch} was awaited, the region has "
                f"epoch {arrived}: it was overwritten before it was read"
            )
        return arrived == epoch

    def wait(self, channel: Channel, source: int, epoch: int) -> dict[str, np.ndarray]:
        """Read-only views of the source's region, once its put has arrived."""
        if not self.arrived(channel, source, epoch):
            self._wait(channel, source, epoch)
        return self._hub.regions[channel, source, self._instance, epoch & 1].read_only

    def wait_any(self, awaited: Sequence[Awaited]) -> None:
        """Block until one of the puts has arrived. Raises what `wait` raises."""
        with self._hub.changed:
            self._hub.changed.wait_for(
                lambda: (
                    any(self.arrived(*put) for put in awaited)
                    or any(put.source in self._hub.closed for put in awaited)
                ),
                self._hub.limits.exchange_timeout_ms / 1000,
            )
        if not any(self.arrived(*put) for put in awaited):
            self.wait(*next((p for p in awaited if p.source in self._hub.closed), awaited[0]))

    def close(self) -> None:
        """Leave the exchange: peers that wait for this instance get PeerLost."""
        with self._hub.changed:
            self._hub.closed.add(self._instance)
            self._hub.changed.notify_all()

    def _wait(self, channel: Channel, source: int, epoch: int) -> None:
        what = f"{channel.name} of epoch {epoch} from instance {source}"
        started_ns = time.monotonic_ns()
        timeout_s = self._hub.limits.exchange_timeout_ms / 1000
        with self._hub.changed:
            happened = self._hub.changed.wait_for(
                lambda: self.arrived(channel, source, epoch) or source in self._hub.closed,
                timeout_s,
            )
        self._waited_ns += time.monotonic_ns() - started_ns
        if not happened:
            raise ExchangeTimeout(
                f"{what} did not come in {self._hub.limits.exchange_timeout_ms} ms"
            )
        if not self.arrived(channel, source, epoch):
            raise PeerLost(f"{what} will not come: it is gone")
