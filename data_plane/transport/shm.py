"""The exchange through shared memory and, to other nodes, TCP (Linux on x86-64).

Enters: the layout of a region and the limits. Leaves: an Exchange (exchange.py) whose regions are
in the receiver's segment. Does not know: routes, layers, models, who decides the epochs.

Peers on the receiver's node write its segment in place; for the others a thread of the receiver
does (tcp_server.py). A segment has one block for each other instance. A block has two regions for
each channel, one for each parity: a flag in a cache line of its own, then the fields. A flag is
epoch + 1, so that a fresh segment, which is all zeros, has no epoch 0.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data_plane.transport.exchange import (
    Awaited,
    Channel,
    EpochError,
    Exchange,
    ExchangeError,
    ExchangeTimeout,
    Field,
    Flags,
    PeerLost,
    RegionLayout,
)
from data_plane.transport.futex import Word, wait_for_any
from data_plane.transport.segments import Segment, Segments
from data_plane.transport.shared_memory import CACHE_LINE, OwnedSegment, aligned
from nanocp.config.limits import LimitsConfig

_NUM_PARITIES = 2
_KIND = "exchange"


class _Place(NamedTuple):
    """The place of a field in the segment."""

    offset: int
    num_rows: int
    row_bytes: int

    def chunk(self, num_rows: int | None) -> tuple[int, int]:
        """(offset, bytes) of the first rows; None: all. A field of one row is never cut."""
        rows = self.num_rows
        if num_rows is not None and rows > 1:
            rows = min(rows, num_rows)
        return self.offset, rows * self.row_bytes


class _Region(NamedTuple):
    flag: Word
    views: dict[str, np.ndarray]
    places: list[_Place]
    """The places of the fields, in the order of the layout."""


_Block = list[tuple[_Region, ...]]
"""[channel][parity]; a channel that the layout leaves out has no regions."""


class ShmExchange(Exchange):
    """One instance's end of the exchange, for one thread; see exchange.Exchange.

    Use `create` to make one. It can put and wait after `connect`.
    """

    def __init__(
        self,
        segment: OwnedSegment,
        segments: Segments,
        instance: int,
        num_instances: int,
        layout: RegionLayout,
        limits: LimitsConfig,
    ) -> None:
        self._segment = segment
        self._segments = segments
        self._instance = instance
        self._num_instances = num_instances
        self._layout = layout
        self._limits = limits
        self._waited_ns = 0
        self._awaited: int | None = None
        self._peers: dict[int, Segment] = {}
        self._remote: set[int] = set()
        """Peers that are reached by TCP."""
        self._outgoing: dict[int, _Block] = {}
        self._incoming = {
            source: self._map_block(segment, source, instance) for source in self._others()
        }

    @classmethod
    def create(
        cls,
        segments: Segments,
        instance: int,
        num_instances: int,
        layout: RegionLayout,
        limits: LimitsConfig,
    ) -> ShmExchange:
        """Make this instance's segment, into which all others will put.

        Raises ValueError on another platform than Linux on x86-64, if /dev/shm is too small, or if
        the instance exists already.
        """
        if not 0 <= instance < num_instances:
            raise ValueError(f"instance is {instance}; it must be from 0 to {num_instances - 1}")
        data_bytes = (num_instances - 1) * _block_bytes(layout)
        segment = segments.own(_KIND, instance, _describe(layout, num_instances), data_bytes)
        return cls(segment, segments, instance, num_instances, layout, limits)

    def connect(self, timeout_ms: float) -> None:
        """Attach to the segments of all other instances of the term, as they appear.

        Raises ExchangeTimeout, PeerLost, TermOver, or ValueError if another instance has a
        different layout.
        """
        deadline = time.monotonic() + timeout_ms / 1000
        for target in self._others():
            if target in self._peers or not self._segments.is_there(target):
                continue
            left_ms = max(0.0, (deadline - time.monotonic()) * 1000)
            writer = _writer(self._instance)
            peer = self._segments.attach(_KIND, target, writer, self._limits, left_ms)
            self._peers[target] = peer
            if not self._segments.is_shared(target):
                self._remote.add(target)
            peer.require(_describe(self._layout, self._num_instances))
            self._outgoing[target] = self._map_block(peer, self._instance, target)

    @property
    def instance(self) -> int:
        return self._instance

    @property
    def num_instances(self) -> int:
        """Number of instances, with this one."""
        return self._num_instances

    @property
    def awaited(self) -> int | None:
        """The instance that a wait is blocked for now; None if none is."""
        return self._awaited

    @property
    def waited_ns(self) -> int:
        return self._waited_ns

    def outgoing(self, channel: Channel, target: int, epoch: int) -> dict[str, np.ndarray]:
        return self._outgoing[target][channel][epoch & 1].views

    def put(self, channel: Channel, target: int, epoch: int, num_rows: int | None = None) -> None:
        region = self._outgoing[target][channel][epoch & 1]
        flag = region.flag
        assert flag.load() <= epoch, (
            f"epoch {epoch} of {channel.name} was put before, or a later one"
        )
        if target not in self._remote:
            flag.store(epoch + 1)
            return
        chunks = [place.chunk(num_rows) for place in region.places]
        self._peers[target].publish(flag, epoch + 1, chunks)

    def incoming(self, channel: Channel, source: int, epoch: int) -> dict[str, np.ndarray]:
        """Read-only views of the source's region; its put may not be there yet."""
        return self._incoming[source][channel][epoch & 1].views

    def flags(self, channel: Channel, peer: int, epoch: int) -> Flags:
        """The addresses of both flags; a peer that is reached by TCP must be put to."""
        outgoing = self._outgoing[peer][channel][epoch & 1].flag.address
        incoming = self._incoming[peer][channel][epoch & 1].flag.address
        return Flags(None if peer in self._remote else outgoing, incoming)

    def arrived(self, channel: Channel, source: int, epoch: int) -> bool:
        flag = self._incoming[source][channel][epoch & 1].flag.load()
        if flag > epoch + 1:
            raise self._epoch_error(channel, source, epoch, flag)
        return flag == epoch + 1

    def wait(self, channel: Channel, source: int, epoch: int) -> dict[str, np.ndarray]:
        region = self._incoming[source][channel][epoch & 1]
        flag = region.flag.load()
        if flag <= epoch:
            flag = self._wait_for_flag(region.flag, channel, source, epoch)
        if flag != epoch + 1:
            raise self._epoch_error(channel, source, epoch, flag)
        return region.views

    def wait_any(self, awaited: Sequence[Awaited]) -> None:
        if len(awaited) == 1:
            self.wait(*awaited[0])
            return
        term = self._segments.term
        begin_ns = time.perf_counter_ns()
        self._awaited = awaited[0].source
        has_arrived = wait_for_any(
            [
                (self._incoming[source][channel][epoch & 1].flag, epoch + 1)
                for channel, source, epoch in awaited
            ],
            self._limits.exchange_timeout_ms,
            self._limits.tick_ms,
            go_on=lambda: not term.is_over and all(self._is_alive(put.source) for put in awaited),
        )
        self._awaited = None
        waited_ns = time.perf_counter_ns() - begin_ns
        self._waited_ns += waited_ns
        if not has_arrived:
            term.check()
            lost = (put for put in awaited if not self._is_alive(put.source))
            raise self._not_arrived(next(lost, awaited[0]), waited_ns)

    def close(self) -> None:
        """Drop every view and mapping, and remove this instance's segment. Idempotent."""
        self._incoming.clear()
        self._outgoing.clear()
        self._segment.close()
        for peer in self._peers.values():
            peer.close()

    def _wait_for_flag(self, word: Word, channel: Channel, source: int, epoch: int) -> int:
        term = self._segments.term
        begin_ns = time.perf_counter_ns()
        self._awaited = source
        flag = word.wait_at_least(
            epoch + 1,
            self._limits.exchange_timeout_ms,
            self._limits.tick_ms,
            go_on=lambda: not term.is_over and self._is_alive(source),
        )
        self._awaited = None
        waited_ns = time.perf_counter_ns() - begin_ns
        self._waited_ns += waited_ns
        if flag is not None:
            return flag
        term.check()
        raise self._not_arrived(Awaited(channel, source, epoch), waited_ns)

    def _not_arrived(self, awaited: Awaited, waited_ns: int) -> ExchangeError:
        channel, source, epoch = awaited
        word = self._incoming[source][channel][epoch & 1].flag
        what = (
            f"instance {self._instance}, {waited_ns // 1_000_000} ms into its wait for "
            f"{channel.name} of epoch {epoch}"
        )
        if not self._is_alive(source):
            return PeerLost(f"{what}: the process of instance {source} is gone", source)
        return ExchangeTimeout(
            f"{what}: instance {source} is alive but sent nothing "
            f"(its last epoch is {word.load() - 1})",
            source,
        )

    def _is_alive(self, source: int) -> bool:
        """Whether the source's process is alive.

        If a connection carries its puts, that is asked: all puts come before the connection ends.
        """
        is_attached = self._segment.is_attached(_writer(source))
        return self._peers[source].owner_is_alive() if is_attached is None else is_attached

    def _epoch_error(self, channel: Channel, source: int, epoch: int, flag: int) -> EpochError:
        return EpochError(
            f"instance {self._instance} awaits {channel.name} of instance {source}, epoch {epoch}, "
            f"but finds epoch {flag - 1}: the region was overwritten before it was read"
        )

    def _others(self) -> list[int]:
        return [other for other in range(self._num_instances) if other != self._instance]

    def _map_block(self, segment: OwnedSegment | Segment, source: int, target: int) -> _Block:
        number = source if source < target else source - 1
        block = _map_block(
            segment, segment.data_offset + number * _block_bytes(self._layout), self._layout
        )
        if target == self._instance:
            for region in (region for parities in block for region in parities):
                for view in region.views.values():
                    view.flags.writeable = False
        return block


def _writer(instance: int) -> str:
    return f"instance {instance}"


def _field_bytes(field: Field) -> int:
    return aligned(int(np.prod(field.shape, dtype=np.int64)) * np.dtype(field.dtype).itemsize)


def _block_bytes(layout: RegionLayout) -> int:
    return sum(
        _NUM_PARITIES * (CACHE_LINE + sum(map(_field_bytes, fields))) for fields in layout.values()
    )


def _map_block(segment: OwnedSegment | Segment, offset: int, layout: RegionLayout) -> _Block:
    block: _Block = [() for _ in Channel]
    for channel in sorted(layout):
        for _ in range(_NUM_PARITIES):
            region = _Region(Word(segment.memory, offset), {}, [])
            offset += CACHE_LINE
            for field in layout[channel]:
                view = np.ndarray(field.shape, field.dtype, buffer=segment.memory, offset=offset)
                region.views[field.name] = view
                rows = field.shape[0] if field.shape else 1
                region.places.append(
                    _Place(offset=offset, num_rows=rows, row_bytes=view.nbytes // rows)
                )
                offset += _field_bytes(field)
            block[channel] += (region,)
    return block


def _describe(layout: RegionLayout, num_instances: int) -> str:
    fields = [
        f"{channel.name}.{field.name} {np.dtype(field.dtype)} {field.shape}"
        for channel in sorted(layout)
        for field in layout[channel]
    ]
    return "\n".join([f"num_instances {num_instances}", *fields])
