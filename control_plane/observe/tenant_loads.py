"""Which tenants load the cluster now.

Enters: the scheduler's state. Leaves: counts of requests and tokens. Does not know: keys, names.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from control_plane.observe.observed import ObservedScheduler
from nanocp.values.plan import PAGE_SIZE

_MAX_TENANTS = 8


class TenantLoad(NamedTuple):
    """What one tenant has in the cluster."""

    tenant: str
    """`Arrival.tenant`; empty for requests without a key and a user."""
    placed: int
    """Requests that are placed and have not ended."""
    queued: int
    """Requests in the waiting queue."""
    kv_tokens: int
    """Tokens that its frames have room for."""
    served_tokens: int
    """The virtual token counter, by which tenants are ordered."""


def tenant_loads(scheduler: ObservedScheduler) -> tuple[TenantLoad, ...]:
    """The tenants with most placed and queued requests; at most 8, the most first."""
    state, queue = scheduler.decided
    placed: Counter[str] = Counter()
    pages: Counter[str] = Counter()
    for request in state.requests.values():
        placed[request.arrival.tenant] += 1
        pages[request.arrival.tenant] += request.num_pages
    queued = Counter(entry.arrival.tenant for entry in queue)
    counters = scheduler.fair_share.counters
    return tuple(
        TenantLoad(
            tenant,
            placed[tenant],
            queued[tenant],
            pages[tenant] * PAGE_SIZE,
            counters.get(tenant, 0),
        )
        for tenant, _ in (placed + queued).most_common(_MAX_TENANTS)
    )
