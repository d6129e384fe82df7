"""Fairness between tenants by the service that each has had (arXiv 2401.00588).

A placed prompt counts its tokens, a generated token OUTPUT_WEIGHT. A tenant that comes back begins
at the lowest waiting counter: idle time earns no credit.
"""

from __future__ import annotations

from nanocp.values.plan import Arrival

OUTPUT_WEIGHT = 2
"""Weight of a generated token, in prompt tokens."""
_MAX_IDLE = 4096
"""Most counters kept for tenants without a request; the oldest are forgotten."""


class FairShare:
    """The tenants' counters; the lowest goes first within a class."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        """Service by tenant, in prompt tokens."""
        self._num_waiting: dict[str, int] = {}
        self._num_rows: dict[str, int] = {}
        self._idle: dict[str, None] = {}
        """Tenants that neither wait nor run, in order of their last request (an ordered set)."""
        self._last = 0
        """Counter of the tenant that left the queue last."""

    @property
    def num_waiting(self) -> int:
        """The number of tenants in the queue."""
        return len(self._num_waiting)

    @property
    def spread(self) -> int:
        """The highest waiting tenant's counter less the lowest; 0 with fewer than two."""
        waiting = [self.counters[tenant] for tenant in self._num_waiting]
        return max(waiting) - min(waiting) if waiting else 0

    def waits(self, arrival: Arrival) -> None:
        """Record that a request enters the queue."""
        tenant = arrival.tenant
        if tenant not in self._num_waiting:
            least = min(map(self.counters.__getitem__, self._num_waiting), default=self._last)
            self.counters[tenant] = max(self.counters.get(tenant, 0), least)
            self._idle.pop(tenant, None)
        self._num_waiting[tenant] = self._num_waiting.get(tenant, 0) + 1

    def leaves(self, arrival: Arrival) -> None:
        """Record that a request leaves the queue, placed or ended."""
        tenant = arrival.tenant
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]
            self._last = self.counters[tenant]
            self._may_be_idle(tenant)

    def placed(self, arrival: Arrival) -> None:
        """Charge for the prompt of a request that is placed for the first time."""
        self.counters[arrival.tenant] += arrival.prompt_len

    def row_starts(self, arrival: Arrival) -> None:
        """Record that a row is in every window from the next one on."""
        tenant = arrival.tenant
        self._idle.pop(tenant, None)
        self.counters.setdefault(tenant, self._last)
        self._num_rows[tenant] = self._num_rows.get(tenant, 0) + 1

    def row_stops(self, arrival: Arrival) -> None:
        """Record that a row is in no window from the next one on."""
        tenant = arrival.tenant
        self._num_rows[tenant] -= 1
        if not self._num_rows[tenant]:
            del self._num_rows[tenant]
            self._may_be_idle(tenant)

    def window(self, num_steps: int) -> None:
        """Charge for a window of this many steps: each running row generates a token a step."""
        for tenant, num_rows in self._num_rows.items():
            self.counters[tenant] += OUTPUT_WEIGHT * num_steps * num_rows

    def generated(self, arrival: Arrival, num_tokens: int) -> None:
        """Charge for tokens that a row generates beside those of windows."""
        self.counters[arrival.tenant] += OUTPUT_WEIGHT * num_tokens

    def end_term(self) -> None:
        """Record that no row runs any more."""
        rows, self._num_rows = self._num_rows, {}
        for tenant in rows:
            self._may_be_idle(tenant)

    def _may_be_idle(self, tenant: str) -> None:
        if tenant not in self._num_waiting and tenant not in self._num_rows:
            self._idle[tenant] = None
            if len(self._idle) > _MAX_IDLE:
                forgotten = next(iter(self._idle))
                del self._idle[forgotten], self.counters[forgotten]
