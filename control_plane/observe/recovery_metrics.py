"""Metrics of recovery: what was lost and why, how long it took to serve again, what was dropped.

Enters: losses, ends and beginnings of terms, dropped messages, on the controller's thread. Leaves:
samples for scrapes, a row for the cluster page. Does not know: how a service recovers. The names
are explained in docs/operate.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from control_plane.observe.metric_families import counter, gauge, histogram, total

_RECOVERY_S = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0)
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
            registry, "recovery_seconds", "From the end of a term to the next one.", _RECOVERY_S
        )
        self._attempts = counter(
            registry, "request_attempts", "Submissions of requests that were submitted before."
        )
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
            self._ended_s = self._now_s()

    def term_began(self, term: int, cause: str) -> None:
        """Windows run again."""
        self._term = term
        self._regroups.labels(cause).inc()
        if self._ended_s is not None:
            self._recovery.observe(self._now_s() - self._ended_s)
            self._ended_s = None

    def submitted_again(self) -> None:
        """A front end submits a request that it had submitted before."""
        self._attempts.inc()

    def waits(self, num_held: int, num_tickets: int) -> None:
        """Take how many requests wait for their next attempt, and tickets for an answer."""
        self._num_held, self._num_tickets = num_held, num_tickets

    def dropped(self, kind: str) -> None:
        """A message of an earlier term was dropped."""
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
