"""The puller's writers into the instances' rings, in one term after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from data_plane.kv.page_ring import PULL_RING, PageRingWriter
from data_plane.member.lifetime import meet
from data_plane.transport.segments import Segments
from nanocp.config.limits import LimitsConfig
from nanocp.values.commands import Join

_ATTACH_MS = 2_000
"""The rings are there before a term's first ticket."""


class PullRings:
    """Writers of rings, opened at first use. For one thread."""

    def __init__(self, segments: Segments, limits: LimitsConfig) -> None:
        """segments: the member's own, whose term this object sets."""
        self._segments = segments
        self._limits = replace(limits, start_timeout_ms=_ATTACH_MS)
        self._writers: dict[int, PageRingWriter] = {}

    def join(self, term: int, join: Join) -> None:
        """Leave the rings of the last term, and take the instances' places in this one."""
        self.close()
        self._segments.term.number = term
        meet(self._segments, join)

    def write(self, instance: int, **page: Any) -> bool:
        """Write a page; arguments and result are those of PageRingWriter.write.

        Raises PeerLost, ExchangeTimeout or TermOver, and RuntimeError if the ring takes no page of
        this writer.
        """
        writer = self._writers.pop(instance, None)
        if writer is not None and not writer.receiver_is_alive():
            writer.close()
            writer = None
        try:
            if writer is None:
                writer = PageRingWriter(self._segments, instance, self._limits, PULL_RING)
            self._writers[instance] = writer
            return writer.write(timeout_ms=self._limits.exchange_timeout_ms, **page)
        except ValueError as error:
            raise RuntimeError(str(error)) from error

    def close(self) -> None:
        """Close every writer; written pages stay in the rings. Idempotent."""
        while self._writers:
            self._writers.popitem()[1].close()
