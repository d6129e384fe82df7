"""Fairness between tenants: how much service each has had (arXiv 2401.00588).

Enters: requests that wait, prompts that were placed, rows that run, windows. Leaves: a counter for
each tenant; the lowest goes first within a class. Does not know: instances.

A placed prompt counts its tokens, a generated token counts OUTPUT_WEIGHT. A tenant that comes back
begins at the lowest counter of those that wait: idle time earns no credit.
"""

from __future__ import annotations

from nanocp.values.plan import Arrival

OUTPUT_WEIGHT = 2
"""What a generated token counts, in tokens of prompt."""
_MAX_IDLE = 4096
"""Counters of tenants without a request that are remembered, at most; the oldest are forgotten."""


class FairShare:
    """The counters. With one tenant they decide nothing."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        """By tenant, in tokens of prompt."""
        self._num_waiting: dict[str, int] = {}
        self._num_rows: dict[str, int] = {}
        """Running rows of each tenant that has one."""
        self._idle: dict[str, None] = {}
        """Tenants that neither wait nor run, in order of their last request (an ordered set)."""
        self._last = 0
        """Counter of the tenant that left the queue last."""

    @property
    def num_waiting(self) -> int:
        """Tenants with a request in the queue."""
        return len(self._num_waiting)

    @property
    def spread(self) -> int:
        """The highest counter of a tenant that waits, less the lowest; 0 with fewer than two."""
        waiting = [self.counters[tenant] for tenant in self._num_waiting]
        return max(waiting) - min(waiting) if waiting else 0

    def waits(self, arrival: Arrival) -> None:
        """A request enters the queue."""
        tenant = arrival.tenant
        if tenant not in self._num_waiting:
            least = min(map(self.counters.__getitem__, self._num_waiting), default=self._last)
            self.counters[tenant] = max(self.counters.get(tenant, 0), least)
            self._idle.pop(tenant, None)
        self._num_waiting[tenant] = self._num_waiting.get(tenant, 0) + 1

    def leaves(self, arrival: Arrival) -> None:
        """A request leaves the queue: it was placed, or it has ended."""
        tenant = arrival.tenant
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]
            self._last = self.counters[tenant]
            self._may_be_idle(tenant)

    def placed(self, arrival: Arrival) -> None:
        """A request is placed for the first time."""
        self.counters[arrival.tenant] += arrival.prompt_len

    def row_starts(self, arrival: Arrival) -> None:
        """A row of the request is in every window from the next one on."""
        tenant = arrival.tenant
        self._idle.pop(tenant, None)
        self.counters.setdefault(tenant, self._last)
        self._num_rows[tenant] = self._num_rows.get(tenant, 0) + 1

    def row_stops(self, arrival: Arrival) -> None:
        """A row of the request is in no window from the next one on."""
        tenant = arrival.tenant
        self._num_rows[tenant] -= 1
        if not self._num_rows[tenant]:
            del self._num_rows[tenant]
            self._may_be_idle(tenant)

    def window(self, num_steps: int) -> None:
        """A window of this many steps is issued: each running row generates a token a step."""
        for tenant, num_rows in self._num_rows.items():
            self.counters[tenant] += OUTPUT_WEIGHT * num_steps * num_rows

    def generated(self, arrival: Arrival, num_tokens: int) -> None:
        """A row of the request generates this many tokens beside those of windows."""
        self.counters[arrival.tenant] += OUTPUT_WEIGHT * num_tokens

    def end_term(self) -> None:
        """No row runs any more."""
        rows, self._num_rows = self._num_rows, {}
        for tenant in rows:
            self._may_be_idle(tenant)

    def _may_be_idle(self, tenant: str) -> None:
        if tenant not in self._num_waiting and tenant not in self._num_rows:
            self._idle[tenant] = None
            if len(self._idle) > _MAX_IDLE:
                forgotten = next(iter(self._idle))
                del self._idle[forgotten], self.counters[forgotten]
