"""Metrics of recovery: losses with their causes, the time to serve again, dropped messages."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from control_plane.observe.metrics.families import PHASES, RECOVERY, Recorded, families
from nanocp.values.members import Report
from nanocp.values.plan import PAGE_SIZE

SEAT_STATES = ("empty", "loading", "serving", "draining")


class RecoveryMetrics(Collector):
    """Counts losses and times recoveries."""

    def __init__(
        self, registry: CollectorRegistry, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._now_s = now_s
        self._term = 1
        self._ended_s: float | None = None
        """Time at which the last term ended; None while one serves."""
        self._phase, self._phase_began_s = PHASES[0], 0.0
        self._phases_s = dict.fromkeys(PHASES, 0.0)
        """How long the term that is to come has waited for each."""
        self._num_held = self._num_tickets = 0
        self.num_unlogged: Callable[[], int] = int
        """Counts the calls that the event log lacks."""
        self.num_spares: Callable[[], int] = int
        """Counts the ready spares, for any thread."""
        self._seats: tuple[str, ...] = ()
        self._num_lost = 0
        self._recorded = Recorded(registry, RECOVERY)
        registry.register(self)

    # --- the controller's thread ---

    def seats(self, states: tuple[str, ...]) -> None:
        """Take the state of each seat, one of SEAT_STATES."""
        self._seats = states

    def lost(self, kind: str, cause: str) -> None:
        self._num_lost += 1
        self._recorded.count("members_lost", kind, cause)

    def term_ended(self) -> None:
        """Record that no window runs any more."""
        if self._ended_s is None:
            self._ended_s = self._phase_began_s = self._now_s()
            self._phase, self._phases_s = PHASES[0], dict.fromkeys(PHASES, 0.0)

    def waits_for(self, phase: str) -> None:
        """Record that the next term waits for this phase, one of PHASES."""
        now_s = self._now_s()
        self._phases_s[self._phase] += now_s - self._phase_began_s
        self._phase, self._phase_began_s = phase, now_s

    def term_began(self, term: int, cause: str) -> None:
        """Record that windows run again."""
        self._term = term
        self._recorded.count("regroups", cause)
        if self._ended_s is not None:
            self.waits_for(self._phase)
            for phase, seconds in self._phases_s.items():
                self._recorded.observe("recovery_phase_seconds", seconds, phase)
            self._recorded.observe("recovery_seconds", self._phase_began_s - self._ended_s)
            self._ended_s = None

    def submitted_again(self) -> None:
        self._recorded.count("request_attempts")

    def placed(self, attempt: int, prompt_len: int, num_cached: int) -> None:
        """Record an attempt with a row, and the first tokens of its prompt that have KV.

        prompt_len: with known output; the last token needs no KV.
        """
        if attempt:
            self._recorded.count("replayed_tokens", by=prompt_len - 1 - num_cached)
            self._recorded.count("pages_kept", by=-(-num_cached // PAGE_SIZE))

    def waits(self, num_held: int, num_tickets: int) -> None:
        """Take the numbers of requests that wait for an attempt, and of unanswered tickets."""
        self._num_held, self._num_tickets = num_held, num_tickets

    def dropped(self, report: Report) -> None:
        kind = re.sub("(?<!^)(?=[A-Z])", "_", type(report).__name__).lower()
        self._recorded.count("stale_messages", kind)

    # --- any thread ---

    def row(self) -> dict[str, Any]:
        """Return the values for the cluster page and `nanocp top`."""
        ended_s = self._ended_s
        return {
            "term": self._term,
            "lost": self._num_lost,
            "recovers_for_s": None if ended_s is None else round(self._now_s() - ended_s, 1),
            "held": self._num_held,
            "seats": self._seats,
            "spares": self.num_spares(),
        }

    def collect(self) -> Iterable[Metric]:
        seats = {state: self._seats.count(state) for state in SEAT_STATES}
        return families(
            {
                "term": self._term,
                "recovering": self._ended_s is not None,
                "requests_held": self._num_held,
                "tickets_open": self._num_tickets,
                "seats": {**seats, "spare": self.num_spares()},
                "event_log_dropped": self.num_unlogged(),
            }
        )
