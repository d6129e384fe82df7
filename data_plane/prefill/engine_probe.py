"""Tickets for engines, and their probe by rings of this member.

For engines the member is one more instance after the last.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from data_plane.kv.page_ring import PageRing, prefill_ring
from data_plane.prefill.completions import EngineAnswer, EngineCompletion, EngineOutcome
from data_plane.prefill.connector.ticket import EngineTicket
from data_plane.prefill.probe import Probe
from data_plane.transport.segments import Segments
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.limits import LimitsConfig
from nanocp.config.prefill import PrefillConfig
from nanocp.values.members import Peer
from nanocp.values.plan import CARRY_PAGE, PAGE_SIZE

_RING_PAGES = 2


class EngineProbe:
    """Probes engines, each in a thread of the caller."""

    def __init__(
        self,
        own: int,
        prefill: PrefillConfig,
        data_plane: DataPlaneConfig,
        limits: LimitsConfig,
        probe: Probe,
        segments: Segments,
    ) -> None:
        """Make a ring for each engine. Raises what PageRing.create raises.

        segments: the member's own, of a term that does not change.
        """
        self._prefill, self._data_plane, self._limits = prefill, data_plane, limits
        self._probe = probe
        self._segments = segments
        self._own = own
        self._rings = [
            PageRing.create(segments, own, _RING_PAGES, probe.page_bytes, prefill_ring(writer))
            for writer in range(prefill.num_writers)
        ]
        self._numbers = itertools.count(1)
        self._term = 0
        self._peers: Sequence[Peer] = ()

    def join(self, term: int, peers: Sequence[Peer]) -> None:
        """Take the term of the instances' rings, and the instances' places."""
        self._term, self._peers = term, peers

    def ticket(
        self,
        writer: int,
        process: str,
        ticket: int,
        num_tokens: int,
        targets: tuple[tuple[int, int, int], ...],
    ) -> EngineTicket:
        """Return the ticket to write these runs of pages (first page, count, instance).

        process: the engine's process of its latest probe; empty in a probe.
        """
        segments, data_plane = self._segments, self._data_plane
        backend = data_plane.page_backend
        if backend == "auto" and data_plane.exchange_backend == "tcp":
            backend = "tcp"
        own = Peer(segments.node, segments.address)
        places = {instance: self._peers[instance] if process else own for _, _, instance in targets}
        return EngineTicket(
            cluster=segments.cluster_id,
            term=self._term if process else segments.term.number,
            ticket=ticket,
            num_tokens=num_tokens,
            targets=targets,
            peers=places,
            writer=writer,
            timeout_ms=self._limits.exchange_timeout_ms,
            page_backend=backend,
            kv_dtype=data_plane.kv_dtype,
            num_layers=self._probe.num_layers,
            fingerprint=self._probe.fingerprint,
            engine=process,
        )

    def run(self, writer: int, url: str, limit_ms: float) -> EngineAnswer:
        """Send the probe's prompt to the engine, and judge its pages. Blocks."""
        ring, number = self._rings[writer], next(self._numbers)
        token_ids = self._probe.token_ids
        num_kv_pages, num_state_pages = -(-len(token_ids) // PAGE_SIZE), self._probe.num_state_pages
        num_pages, runs = num_kv_pages + num_state_pages, [(0, num_kv_pages, self._own)]
        if num_state_pages:
            runs.append((CARRY_PAGE, num_state_pages, self._own))
        for _ in ring.arrived():
            pass  # Pages of an earlier probe.
        ticket = self.ticket(writer, "", number, len(token_ids), tuple(runs))
        api_key = self._prefill.api_key
        completion = EngineCompletion(url, token_ids, ticket, api_key=api_key)
        overdue = threading.Timer(limit_ms / 1000, completion.cancel)
        overdue.daemon = True
        overdue.start()
        answer = completion.run()
        overdue.cancel()
        if answer.outcome is not EngineOutcome.SENT:
            return answer
        pages: dict[int, Any] = {}
        limit_ms = self._limits.exchange_timeout_ms
        deadline = time.monotonic() + limit_ms / 1000
        while len(pages) < num_pages:
            ring.wait(self._limits.tick_ms)
            pages |= {
                page.page: np.array(page.payload)
                for page in ring.arrived()
                if page.ticket == number
            }
            if time.monotonic() > deadline or not ring.is_open:
                return EngineAnswer(
                    EngineOutcome.FAILED,
                    f"it answered, and pages of its probe did not arrive in {limit_ms} ms: see its "
                    "log",
                )
        problem = self._probe.problem(pages)
        return EngineAnswer(EngineOutcome.MISMATCH, problem) if problem else answer

    def close(self) -> None:
        """Remove the rings. Idempotent."""
        for ring in self._rings:
            ring.close()
