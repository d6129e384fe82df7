"""Metrics of recovery: what was lost and why, how long it took to serve again, what was dropped.

Enters: losses, ends and beginnings of terms, dropped messages, on the controller's thread. Leaves:
samples for scrapes, a row for the cluster page. Does not know: how a service recovers. The names
are explained in docs/use/operate.md.
"""

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
    """What recovery does."""

    def __init__(
        self, registry: CollectorRegistry, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._now_s = now_s
        self._term = 1
        self._ended_s: float | None = None
        """When the term ended that no other has followed; None while one serves."""
        self._phase, self._phase_began_s = PHASES[0], 0.0
        self._phases_s = dict.fromkeys(PHASES, 0.0)
        """How long the term that is to come has waited for each."""
        self._num_held = self._num_tickets = 0
        self._num_unlogged: Callable[[], int] = int
        self._num_spares: Callable[[], int] = int
        self._seats: tuple[str, ...] = ()
        self._num_lost = 0
        self._recorded = Recorded(registry, RECOVERY)
        registry.register(self)

    # --- the controller's thread ---

    def log_with(self, num_dropped: Callable[[], int]) -> None:
        """Ask for the calls that the event log lacks when a page is made."""
        self._num_unlogged = num_dropped

    def count_spares_with(self, num_ready: Callable[[], int]) -> None:
        """Ask for the spares that could take a seat when a page is made; from any thread."""
        self._num_spares = num_ready

    def seats(self, states: tuple[str, ...]) -> None:
        """Take the state of each seat, one of SEAT_STATES."""
        self._seats = states

    def lost(self, kind: str, cause: str) -> None:
        """A member of this kind was lost."""
        self._num_lost += 1
        self._recorded.count("members_lost", kind, cause)

    def term_ended(self) -> None:
        """No window runs any more."""
        if self._ended_s is None:
            self._ended_s = self._phase_began_s = self._now_s()
            self._phase, self._phases_s = PHASES[0], dict.fromkeys(PHASES, 0.0)

    def waits_for(self, phase: str) -> None:
        """From now on the next term waits for this, one of PHASES."""
        now_s = self._now_s()
        self._phases_s[self._phase] += now_s - self._phase_began_s
        self._phase, self._phase_began_s = phase, now_s

    def term_began(self, term: int, cause: str) -> None:
        """Windows run again."""
        self._term = term
        self._recorded.count("regroups", cause)
        if self._ended_s is not None:
            self.waits_for(self._phase)
            for phase, seconds in self._phases_s.items():
                self._recorded.observe("recovery_phase_seconds", seconds, phase)
            self._recorded.observe("recovery_seconds", self._phase_began_s - self._ended_s)
            self._ended_s = None

    def submitted_again(self) -> None:
        """A front end submits a request that it had submitted before."""
        self._recorded.count("request_attempts")

    def placed(self, attempt: int, prompt_len: int, num_cached: int) -> None:
        """An attempt of a request has a row, and KV of these first tokens of its prompt is there.

        prompt_len: tokens of prompt and known output. Of the last one no KV is needed.
        """
        if attempt:
            self._recorded.count("replayed_tokens", by=prompt_len - 1 - num_cached)
            self._recorded.count("pages_kept", by=-(-num_cached // PAGE_SIZE))

    def waits(self, num_held: int, num_tickets: int) -> None:
        """Take how many requests wait for their next attempt, and tickets for an answer."""
        self._num_held, self._num_tickets = num_held, num_tickets

    def dropped(self, report: Report) -> None:
        """A report of an earlier term was dropped."""
        kind = re.sub("(?<!^)(?=[A-Z])", "_", type(report).__name__).lower()
        self._recorded.count("stale_messages", kind)

    # --- any thread ---

    def row(self) -> dict[str, Any]:
        """What the cluster page and `nanocp top` show."""
        ended_s = self._ended_s
        return {
            "term": self._term,
            "lost": self._num_lost,
            "recovers_for_s": None if ended_s is None else round(self._now_s() - ended_s, 1),
            "held": self._num_held,
            "seats": self._seats,
            "spares": self._num_spares(),
        }

    def collect(self) -> Iterable[Metric]:
        """One sample of each metric that is known when a page is made."""
        seats = {state: self._seats.count(state) for state in SEAT_STATES}
        return families(
            {
                "term": self._term,
                "recovering": self._ended_s is not None,
                "requests_held": self._num_held,
                "tickets_open": self._num_tickets,
                "seats": {**seats, "spare": self._num_spares()},
                "event_log_dropped": self._num_unlogged(),
            }
        )
