"""The exchange through shared memory and, to other nodes, TCP (Linux on x86-64).

Peers on the receiver's node write its segment in place. For others a thread of the receiver does
(tcp/server.py). A segment has one block for each other instance: for each channel two regions, one
for each parity. A region is a flag in a cache line of its own, the count of rows if there is one,
and the rows, each with its fields side by side. A flag is epoch + 1, since a fresh segment is all
zeros.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
    side_by_side,
)
from data_plane.transport.futex import Word, wait_for_any
from data_plane.transport.segments import Segments
from data_plane.transport.shared_memory import (
    CACHE_LINE,
    OwnedSegment,
    PeerSegment,
    Segment,
    aligned,
)
from nanocp.config.limits import LimitsConfig

_NUM_PARITIES = 2
_KIND = "exchange"


class _Region(NamedTuple):
    flag: Word
    views: dict[str, np.ndarray]
    header_bytes: int
    """Bytes of the count, or 0."""
    num_rows: int
    row_bytes: int

    def run(self, num_rows: int | None = None) -> tuple[int, int]:
        rows = self.num_rows if num_rows is None else min(self.num_rows, num_rows)
        return self.flag.offset + CACHE_LINE, self.header_bytes + rows * self.row_bytes


_Block = list[tuple[_Region, ...]]
"""[channel][parity]; a channel outside the layout has no regions."""


class ShmExchange(Exchange):
    """One instance's end of the exchange, for one thread: `create`, then `connect`."""

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
        self.instance = instance
        self.num_instances = num_instances
        self._layout = layout
        self._limits = limits
        self.waited_ns = 0
        self.awaited: int | None = None
        self._peers: dict[int, Segment] = {}
        self._remote: set[int] = set()
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

        Raises ValueError on another platform, if /dev/shm is too small, or the instance exists.
        """
        if not 0 <= instance < num_instances:
            raise ValueError(f"instance is {instance}; it must be from 0 to {num_instances - 1}")
        data_bytes = (num_instances - 1) * _block_bytes(layout)
        description = _describe(layout, num_instances)
        segment = segments.own(_KIND, instance, description, data_bytes)
        return cls(segment, segments, instance, num_instances, layout, limits)

    def connect(self, timeout_ms: float) -> None:
        """Attach to the term's other instances; also raises ValueError for another layout."""
        deadline = time.monotonic() + timeout_ms / 1000
        for target in self._others():
            if target in self._peers or not self._segments.is_there(target):
                continue
            left_ms = max(0.0, (deadline - time.monotonic()) * 1000)
            writer = _writer(self.instance)
            peer = self._segments.attach(_KIND, target, writer, self._limits, left_ms)
            self._peers[target] = peer
            if not isinstance(peer, PeerSegment):
                self._remote.add(target)
            peer.require(_describe(self._layout, self.num_instances))
            self._outgoing[target] = self._map_block(peer, self.instance, target)

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
        self._peers[target].publish(flag, epoch + 1, [region.run(num_rows)])

    def incoming(self, channel: Channel, source: int, epoch: int) -> dict[str, np.ndarray]:
        return self._incoming[source][channel][epoch & 1].views

    def flags(self, channel: Channel, peer: int, epoch: int) -> Flags:
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
            flag = self._wait_for_flag(region, channel, source, epoch)
        if flag != epoch + 1:
            raise self._epoch_error(channel, source, epoch, flag)
        return region.views

    def wait_any(self, awaited: Sequence[Awaited]) -> None:
        if len(awaited) == 1:
            self.wait(*awaited[0])
            return
        term = self._segments.term
        begin_ns = time.perf_counter_ns()
        self.awaited = awaited[0].source
        has_arrived = self._until_any(
            [
                (self._incoming[source][channel][epoch & 1], epoch + 1)
                for channel, source, epoch in awaited
            ],
            go_on=lambda: not term.is_over and all(self._is_alive(put.source) for put in awaited),
        )
        self.awaited = None
        waited_ns = time.perf_counter_ns() - begin_ns
        self.waited_ns += waited_ns
        if not has_arrived:
            term.check()
            lost = (put for put in awaited if not self._is_alive(put.source))
            raise self._not_arrived(next(lost, awaited[0]), waited_ns)

    def close(self) -> None:
        self._incoming.clear()
        self._outgoing.clear()
        self._segment.close()
        for peer in self._peers.values():
            peer.close()

    def _until_any(self, targets: list[tuple[_Region, int]], go_on: Callable[[], bool]) -> bool:
        limits = self._limits.exchange_timeout_ms, self._limits.tick_ms
        if len(targets) == 1:
            region, value = targets[0]
            return region.flag.wait_at_least(value, *limits, go_on) is not None
        return wait_for_any([(region.flag, value) for region, value in targets], *limits, go_on)

    def _wait_for_flag(self, region: _Region, channel: Channel, source: int, epoch: int) -> int:
        term = self._segments.term
        begin_ns = time.perf_counter_ns()
        self.awaited = source
        has_arrived = self._until_any(
            [(region, epoch + 1)], go_on=lambda: not term.is_over and self._is_alive(source)
        )
        self.awaited = None
        waited_ns = time.perf_counter_ns() - begin_ns
        self.waited_ns += waited_ns
        if has_arrived:
            return region.flag.load()
        term.check()
        raise self._not_arrived(Awaited(channel, source, epoch), waited_ns)

    def _not_arrived(self, awaited: Awaited, waited_ns: int) -> ExchangeError:
        channel, source, epoch = awaited
        word = self._incoming[source][channel][epoch & 1].flag
        what = (
            f"instance {self.instance}, {waited_ns // 1_000_000} ms into its wait for "
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
        """True while the source's process, or its connection, lives.

        If it attached by a connection, that is asked. Puts by TCP come before the connection ends.
        """
        is_attached = self._segment.is_attached(_writer(source))
        return self._peers[source].owner_is_alive() if is_attached is None else is_attached

    def _epoch_error(self, channel: Channel, source: int, epoch: int, flag: int) -> EpochError:
        return EpochError(
            f"instance {self.instance} awaits {channel.name} of instance {source}, epoch {epoch}, "
            f"but finds epoch {flag - 1}: the region was overwritten before it was read"
        )

    def _others(self) -> list[int]:
        return [other for other in range(self.num_instances) if other != self.instance]

    def _map_block(self, segment: OwnedSegment | Segment, source: int, target: int) -> _Block:
        begin = _number(source, target) * _block_bytes(self._layout)
        block = _map_block(segment, segment.data_offset + begin, self._layout)
        if target == self.instance:
            for region in (region for parities in block for region in parities):
                for view in region.views.values():
                    view.flags.writeable = False
        return block


def _writer(instance: int) -> str:
    return f"instance {instance}"


def _number(source: int, target: int) -> int:
    return source if source < target else source - 1


@functools.cache
def _rows(fields: tuple[Field, ...]) -> tuple[int, int, np.dtype]:
    """Return (bytes of the count, number of rows, a row's dtype) of a region.

    A row begins with its largest field, at a cache line; a lone field has no padding.
    """
    of_rows = [field for field in fields if field.name != "count"]
    (num_rows,) = {field.shape[0] for field in of_rows}
    of_rows.sort(key=lambda field: -field.row_bytes)
    *begins, num_bytes = side_by_side(of_rows)
    row: Any = {
        "names": [field.name for field in of_rows],
        "formats": [(field.dtype, field.shape[1:]) for field in of_rows],
        "offsets": begins,
        "itemsize": aligned(num_bytes) if len(of_rows) > 1 else of_rows[0].row_bytes,
    }
    return CACHE_LINE * (len(of_rows) < len(fields)), num_rows, np.dtype(row)


def _region_bytes(fields: tuple[Field, ...]) -> int:
    header_bytes, num_rows, row = _rows(fields)
    return CACHE_LINE + aligned(header_bytes + num_rows * row.itemsize)


def _block_bytes(layout: RegionLayout) -> int:
    return _NUM_PARITIES * sum(map(_region_bytes, layout.values()))


def _map_block(segment: OwnedSegment | Segment, offset: int, layout: RegionLayout) -> _Block:
    block: _Block = [() for _ in Channel]
    for channel in sorted(layout):
        fields = layout[channel]
        header_bytes, num_rows, row = _rows(fields)
        for _ in range(_NUM_PARITIES):
            begin = offset + CACHE_LINE
            rows = np.ndarray(num_rows, row, segment.memory, begin + header_bytes)
            views = {
                field.name: np.ndarray(field.shape, field.dtype, segment.memory, begin)
                if field.name == "count"
                else rows[field.name]
                for field in fields
            }
            flag = Word(segment.memory, offset)
            block[channel] += (_Region(flag, views, header_bytes, num_rows, row.itemsize),)
            offset += _region_bytes(fields)
    return block


def _describe(layout: RegionLayout, num_instances: int) -> str:
    fields = [
        f"{channel.name}.{field.name} {np.dtype(field.dtype)} {field.shape}"
        for channel in sorted(layout)
        for field in layout[channel]
    ]
    sizes = [f"{channel.name} {_region_bytes(layout[channel])} B" for channel in sorted(layout)]
    return "\n".join([f"num_instances {num_instances}", *fields, *sizes])
