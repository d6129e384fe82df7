"""Re-levelling: full pages move from a node's most loaded instances to its least (beyond the paper; design 4).

Enters: the decided state and what each instance carries. Leaves: moves. Does not know: how pages travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter

from control_plane.cluster_state import ClusterState
from control_plane.request import Request
from nanocp.plan import PAGE_SIZE

MIN_PAGES, MAX_PAGES = 8, 128
"""Of one move: less is not worth a ticket, more would be decided too long before it is there."""


def relevel(state: ClusterState, node: range, loads: Sequence[int]) -> Iterator[tuple[Request, range, int]]:
    """Moves within a node between its extremes, the most loaded with the least, then the next two and so on; `loads`
    of its instances are in tokens."""
    ascending = sorted(node, key=lambda i: (loads[i - node.start], i))
    for destination, source in zip(ascending, reversed(ascending), strict=True):
        gap = loads[source - node.start] - loads[destination - node.start]
        num_pages = min(gap // (2 * PAGE_SIZE), MAX_PAGES)
        if num_pages < MIN_PAGES:
            return
        if found := _find(state, source, destination):
            request, pages = found
            yield request, pages[-num_pages:], destination


def _find(state: ClusterState, source: int, destination: int) -> tuple[Request, range] | None:
    """The request with the most full pages in a row at the source; one that needs no new link comes first."""
    requests = [state.requests[request_id] for _, request_id in state.multi]
    candidates = [
        (destination in request.span or destination == request.moe_binding, request.pages_on[source], request)
        for request in requests
        if request.pages_on.get(source, 0) >= MIN_PAGES and request.move is None
    ]
    best: tuple[tuple[bool, int], Request, range] | None = None
    for needs_no_link, num_held, request in sorted(candidates, key=itemgetter(0, 1), reverse=True):
        if best is not None and (needs_no_link, num_held) <= best[0]:
            break  # nobody behind holds more
        for index, run in enumerate(request.runs[: request.tail + 1]):
            if run.instance != source:
                continue
            pages = state.movable_pages(request, index)
            rank = needs_no_link, len(pages)
            if len(pages) >= MIN_PAGES and (best is None or rank > best[0]):
                best = rank, request, pages
    return best[1:] if best else None
