"""TTFT targets: the lateness of a prompt's KV, and splits over NICs that reduce it.

Targets do not follow the steps' time: more links would make steps still longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import nsmallest

from control_plane.scheduler.policies.waterfill import waterfill
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.request import num_pages
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import PAGE_SIZE, Arrival

_MAX_NODES = 4
"""Nodes, with the least under way, whose NICs are offered to a late prompt."""


class OnTime:
    """The targets of all classes, and the lateness of placements."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._targets_ms = dict(config.ttft_targets)
        self._ns_per_token = config.costs.ingest_ns_per_token

    def target_ms(self, arrival: Arrival) -> int | None:
        """Return the target of the request's class; None without one, or if no KV is to come."""
        if not self._targets_ms or not arrival.needs_prefill or arrival.resumes or arrival.attempt:
            return None
        return self._targets_ms.get(arrival.priority)

    def late_ms(self, state: ClusterState, shares: Mapping[int, int], target_ms: int) -> int:
        """Return whole milliseconds from the target to the arrival of the last share; 0 if on time.

        shares: pages by instance. Tokens already under way arrive first.
        """
        arriving = state.loads.arriving_tokens
        tokens = max(arriving[i] + pages * PAGE_SIZE for i, pages in shares.items())
        return max(tokens * self._ns_per_token // 1_000_000 - target_ms, 0)

    def splits(self, state: ClusterState, prompt_len: int) -> Iterator[tuple[int, dict[int, int]]]:
        """Yield (number of a node, pages by instance): early splits within a node.

        Each degree takes the instances with the least under way.
        """
        arriving, pages = state.loads.arriving_tokens, num_pages(prompt_len)
        loads = [sum(arriving[node.start : node.stop]) for node in state.nodes]
        for number in nsmallest(_MAX_NODES, range(len(loads)), key=lambda n: (loads[n], n)):
            order = sorted(
                state.nodes[number], key=lambda i: (arriving[i], state.loads.kv_tokens(i), i)
            )
            for degree in range(1, len(order) + 1):
                members = order[:degree]
                shares = waterfill([num_pages(arriving[i]) for i in members], pages)
                yield number, {i: n for i, n in zip(members, shares, strict=True) if n}
