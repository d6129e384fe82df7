"""TTFT targets: how late a prompt's KV would be at a class's target, and splits that make it less.

Enters: tokens under way to each instance, a target. Leaves: lateness in milliseconds, and splits by
WaterFill over the NICs of a node. Does not know: the step's time. A target that shrank as steps
grow would add links, and so make the steps longer still.
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
"""Nodes whose NICs a late prompt is offered to; those with the least under way."""


class OnTime:
    """The targets of all classes, and what a placement does to them."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._targets_ms = dict(config.ttft_targets)
        self._ns_per_token = config.costs.ingest_ns_per_token

    def target_ms(self, arrival: Arrival) -> int | None:
        """The target of the request's class; None if it has none or if no KV is to come.

        A request that comes back has its first token.
        """
        if not self._targets_ms or not arrival.needs_prefill or arrival.resumes or arrival.attempt:
            return None
        return self._targets_ms.get(arrival.priority)

    def late_ms(self, state: ClusterState, shares: Mapping[int, int], target_ms: int) -> int:
        """Whole milliseconds after the target at which the last share is there; 0 if on time.

        shares: instance -> pages. What is under way to an instance comes before them.
        """
        arriving = state.loads.arriving_tokens
        tokens = max(arriving[i] + pages * PAGE_SIZE for i, pages in shares.items())
        return max(tokens * self._ns_per_token // 1_000_000 - target_ms, 0)

    def splits(self, state: ClusterState, prompt_len: int) -> Iterator[tuple[int, dict[int, int]]]:
        """Yield (number of a node, instance -> pages): within a node, to be there early.

        For each degree, the instances with the least under way; WaterFill over what is.
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
