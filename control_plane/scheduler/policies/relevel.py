"""Re-levelling: full pages move from a node's most loaded instances to its least loaded.

It is not in the paper (docs/decisions/0008).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.request import Request
from nanocp.values.plan import PAGE_SIZE, TargetRun

MIN_PAGES, MAX_PAGES = 8, 512
"""Pages of one move: fewer are not worth a ticket; more would take longer than a step."""
LEAST_SHARE = 40
"""A gap between two instances is worth a move from one in this many of their node's mean tokens
on."""
MAX_RUNS = 4
"""Runs for each member of a KV binding after which only whole runs of the request move."""


def relevel(state: ClusterState, loads: Mapping[int, int]) -> Iterator[tuple[Request, range, int]]:
    """Yield moves within a node, from the most loaded instance to the least, then the next two.

    loads: of the node's open instances, in tokens.
    """
    ascending = sorted(loads, key=lambda i: (loads[i], i))
    least_gap = sum(loads.values()) // (max(len(loads), 1) * LEAST_SHARE)
    for destination, source in zip(ascending, reversed(ascending), strict=True):
        gap = loads[source] - loads[destination]
        num_pages = min(gap // (2 * PAGE_SIZE), MAX_PAGES)
        if num_pages < MIN_PAGES or gap < least_gap:
            return
        if found := _find(state, source, destination, num_pages, loads):
            request, pages = found
            yield request, pages[-num_pages:], destination


def pages_to_move(state: ClusterState, request: Request, run: TargetRun, num_pages: int) -> range:
    """Return a run's movable pages; none if moving num_pages of them cuts too many runs."""
    if request.move is None:
        pages = request.movable_pages(run, state.first_unknown_step)
        is_whole = len(pages) == run.num_pages <= num_pages
        if is_whole or len(request.runs) < MAX_RUNS * len(request.pages_on):
            return pages
    return range(0)


def _find(
    state: ClusterState, source: int, destination: int, num_pages: int, node: Container[int]
) -> tuple[Request, range] | None:
    """Find the request with the most consecutive full pages at the source.

    Requests without a new link come first; rows of other nodes get none.
    """
    best: tuple[Request, range] | None = None
    most = MIN_PAGES - 1
    for is_linked in (True, False):
        for minus_pages, request_id, run in state.linked.runs[source]:
            if -minus_pages <= most:
                break
            request = state.requests[request_id]
            reaches = destination == request.moe_binding or destination in request.pages_on
            if reaches == is_linked and (reaches or request.moe_binding in node):
                pages = pages_to_move(state, request, run, num_pages)
                if len(pages) > most:
                    best, most = (request, pages), len(pages)
        if best is not None:
            return best
    return None
