"""Metrics of recovery: what was lost and why, how long it took to serve again, what was dropped.

Enters: losses, ends and beginnings of terms, dropped messages, on the controller's thread. Leaves:
samples for scrapes, a row for the cluster page. Does not know: how a service recovers. The names
are explained in docs/use/operate.md.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from control_plane.observe.metric_families import PAUSE_S, counter, gauge, histogram, total
from nanocp.values.members import Report
from nanocp.values.plan import PAGE_SIZE

PHASES = ("leave", "load", "join")
"""What a term that is to come waits for: instances that are in the last one, processes that are not
there yet, instances that attach to one another."""
_MEMBER_KINDS = ("instance", "prefill")
_LOSS_CAUSES = ("exit", "stream", "silent", "stuck", "gone", "unread")
_REGROUP_CAUSES = ("loss", "request")
SEAT_STATES = ("empty", "loading", "serving", "draining")
_REPORT_KINDS = ("window_done", "transfer_done", "transfer_fenced")


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
        self._lost = counter(
            registry, "members_lost", "Members that were lost, by cause.", "kind", "cause"
        )
        self._regroups = counter(registry, "regroups", "Terms that began, by cause.", "cause")
        self._recovery = histogram(
            registry, "recovery_seconds", "From the end of a term to the next one.", PAUSE_S
        )
        self._recovery_phase = histogram(
            registry,
            "recovery_phase_seconds",
            "The parts of recovery_seconds, by what the next term waited for.",
            PAUSE_S,
            "phase",
        )
        self._attempts = counter(
            registry, "request_attempts", "Submissions of requests that were submitted before."
        )
        self._replayed = counter(
            registry, "replayed_tokens", "Tokens whose KV later attempts computed."
        )
        self._pages_kept = counter(registry, "pages_kept", "Pages whose KV later attempts found.")
        self._stale = counter(
            registry, "stale_messages", "Messages of an earlier term, dropped.", "kind"
        )
        # Before the first loss they are 0: a query then has an answer, and a rate sees the first.
        for kind, cause in product(_MEMBER_KINDS, _LOSS_CAUSES):
            self._lost.labels(kind, cause)
        for cause in _REGROUP_CAUSES:
            self._regroups.labels(cause)
        for kind in _REPORT_KINDS:
            self._stale.labels(kind)
        for phase in PHASES:
            self._recovery_phase.labels(phase)
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
        self._lost.labels(kind, cause).inc()

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
        self._regroups.labels(cause).inc()
        if self._ended_s is not None:
            self.waits_for(self._phase)
            for phase, seconds in self._phases_s.items():
                self._recovery_phase.labels(phase).observe(seconds)
            self._recovery.observe(self._phase_began_s - self._ended_s)
            self._ended_s = None

    def submitted_again(self) -> None:
        """A front end submits a request that it had submitted before."""
        self._attempts.inc()

    def placed(self, attempt: int, prompt_len: int, num_cached: int) -> None:
        """An attempt of a request has a row, and KV of these first tokens of its prompt is there.

        prompt_len: tokens of prompt and known output. Of the last one no KV is needed.
        """
        if attempt:
            self._replayed.inc(prompt_len - 1 - num_cached)
            self._pages_kept.inc(-(-num_cached // PAGE_SIZE))

    def waits(self, num_held: int, num_tickets: int) -> None:
        """Take how many requests wait for their next attempt, and tickets for an answer."""
        self._num_held, self._num_tickets = num_held, num_tickets

    def dropped(self, report: Report) -> None:
        """A report of an earlier term was dropped."""
        kind = re.sub("(?<!^)(?=[A-Z])", "_", type(report).__name__).lower()
        self._stale.labels(kind).inc()

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

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """One sample of each metric that is known when a page is made."""
        yield gauge("term", "Number of the latest term that served.", self._term)
        is_recovering = float(self._ended_s is not None)
        yield gauge("recovering", "1 while no term serves after one ended.", is_recovering)
        yield gauge("requests_held", "Requests that wait for their next attempt.", self._num_held)
        tickets = "Tickets of the prefill that some receiver has not answered."
        yield gauge("tickets_open", tickets, self._num_tickets)
        seats = GaugeMetricFamily("nanocp:seats", "Seats by state.", labels=["state"])
        for state in SEAT_STATES:
            seats.add_metric([state], self._seats.count(state))
        seats.add_metric(["spare"], self._num_spares())
        yield seats
        unlogged = self._num_unlogged()
        yield total("event_log_dropped", "Calls that the event log lacks.", unlogged)
