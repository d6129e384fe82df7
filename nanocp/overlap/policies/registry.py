"""Policies by the names that commands and lane tables use."""

from __future__ import annotations

import re

from nanocp.overlap.policies import orders
from nanocp.overlap.policies.scheduled import Priority

POLICIES: dict[str, type[orders.Sequential]] = {
    "behind_first": orders.BehindFirst,
    "comet": orders.Comet,
    "dual_batch_overlap": orders.DualBatchOverlap,
    "flux": orders.Flux,
    "nanoflow": orders.NanoFlow,
    "sequential": orders.Sequential,
    "single_batch_overlap": orders.SingleBatchOverlap,
    "token_weave": orders.TokenWeave,
}


def lane_policy(order: str) -> orders.Sequential:
    """The policy of an order of `scheduler.lane_table`."""
    if order in POLICIES:
        return POLICIES[order]()
    return Priority([*map(int, re.findall(r"\d+", order))])
