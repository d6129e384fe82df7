"""Re-levelling between nodes: pages go to one instance of the least loaded node, and home again.

A link between nodes costs at both ends, so a node takes pages in at its gateway, an instance with
such links (docs/decisions/0045).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from control_plane.scheduler.policies.relevel import MAX_PAGES, MIN_PAGES, pages_to_move
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.request import Request
from nanocp.values.plan import PAGE_SIZE

LEAST_NODE_SHARE = 12
"""A gap between nodes is worth a move from one in this many of a node's mean tokens on."""
HOME_SHARE = 32
"""Pages go home until their node's load is higher by one in this many of a node's mean tokens.

It is above LEAST_NODE_SHARE, or pages would go back and forth.
"""
LEAST_PAGES = 64
"""Fewer pages are not worth a ticket, or a new link."""
LINK_WORTH = 2
"""A new link between nodes is made where this many times its cost in tokens may follow."""
PAID_IN_MOVES = 2
"""A new link is made only if it needs no more moves; else more rows would get one each."""

_Move = tuple[Request, range, int]
_LoadOf = Callable[[int], int]


def relevel_nodes(state: ClusterState, load_of: _LoadOf, first_link_tokens: int) -> Iterator[_Move]:
    """Yield at most one move between nodes whose instances are all open.

    load_of: an instance's load in tokens. first_link_tokens: the cost of its first link to another
    node.
    """
    # Means of their instances: the last node may have fewer.
    tokens = [state.loads.kv_tokens_on(node) // len(node) for node in state.nodes]
    least_pages = LINK_WORTH * first_link_tokens // PAGE_SIZE
    if found := _home(state, tokens, load_of) or _away(state, tokens, load_of, least_pages):
        yield found


def _home(state: ClusterState, tokens: Sequence[int], load_of: _LoadOf) -> _Move | None:
    node_of, best, most = state.cluster.node_of, None, MIN_PAGES - 1
    slack = (sum(tokens) - 1) // (len(tokens) * HOME_SHARE)
    for gateway, num_links in enumerate(state.committed.far_to):
        for minus_pages, request_id, run in state.linked.runs[gateway] if num_links else ():
            if -minus_pages <= most:
                break
            request = state.requests[request_id]
            here, home = node_of(gateway), node_of(request.moe_binding)
            if here == home or tokens[home] > tokens[here]:
                continue
            num_instances = min(len(state.nodes[here]), len(state.nodes[home]))
            gap = tokens[here] - tokens[home] + slack
            room = min(gap * num_instances // (2 * PAGE_SIZE), MAX_PAGES)
            pages = pages_to_move(state, request, run, room)[-room:] if room else range(0)
            if len(pages) > most:
                members = {request.moe_binding, *request.pages_on}
                to = min((i for i in state.nodes[home] if i in members), key=load_of)
                if state.can_move(request, pages, to):
                    best, most = (request, pages, to), len(pages)
    return best


def _away(
    state: ClusterState, tokens: Sequence[int], load_of: _LoadOf, least_pages: int
) -> _Move | None:
    """Find pages of the most loaded node for the gateway of the least loaded one.

    Requests with pages there go first. A new link pays if half of the gap has least_pages and needs
    few moves.
    """
    most, gap = max(tokens), max(tokens) - min(tokens)
    if gap * len(tokens) * LEAST_NODE_SHARE < sum(tokens):
        return None
    here, there = state.nodes[tokens.index(most)], state.nodes[tokens.index(min(tokens))]
    far_links = state.committed.num_far_links
    gateway = min(there, key=lambda i: (not far_links(i), load_of(i), i))
    half = gap * len(there) // (2 * PAGE_SIZE)
    # More would make the gateway what the step waits for.
    room = sum(map(load_of, here)) // len(here) - load_of(gateway)
    num_pages = min(half, room // PAGE_SIZE, MAX_PAGES)
    if num_pages < LEAST_PAGES:
        return None
    may_link = least_pages <= min(half, PAID_IN_MOVES * MAX_PAGES)
    has_far = any(map(far_links, here))
    best, best_rank = None, (False, MIN_PAGES - 1)
    for source in here:
        for _, request_id, run in state.linked.runs[source]:
            request = state.requests[request_id]
            if request.moe_binding not in here:
                continue
            is_near = gateway in request.pages_on
            if not is_near and (not may_link or (has_far and not far_links(request.moe_binding))):
                continue
            pages = pages_to_move(state, request, run, num_pages)[-num_pages:]
            rank = is_near, len(pages)
            is_enough = len(pages) >= (MIN_PAGES if is_near else LEAST_PAGES)
            if is_enough and rank > best_rank and state.can_move(request, pages, gateway):
                best, best_rank = (request, pages, gateway), rank
    return best
