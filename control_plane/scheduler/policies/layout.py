"""The layout of a request's pages over instances, at placement and when its row needs one more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.proposal import NOTHING_SHARED, Layout, Proposal, SharedPrefix
from control_plane.scheduler.state.request import Request, num_pages


def num_growth_pages(length: int, num_tokens: int) -> int:
    """Count the pages for num_tokens coming tokens after `length`; the last token has no KV."""
    return num_pages(length + num_tokens - 1) - num_pages(length) if num_tokens else 0


def lay_out(
    state: ClusterState, proposal: Proposal, num_growth: int, shared: SharedPrefix = NOTHING_SHARED
) -> Layout | None:
    """Lay out a request placed as proposed; None if the cluster has no room now.

    num_growth: pages for coming tokens. shared: pages that are in the cluster.
    """
    moe_binding = proposal.moe_binding
    frames_on = dict(shared.frames_on)
    _add(frames_on, proposal.shares.items())
    growth = _promised(state, proposal, frames_on, num_growth)
    if growth is None:
        return None
    _add(frames_on, growth)
    if not state.can_allocate(moe_binding, frames_on):
        return None
    if not shared.runs and len(frames_on) == 1:
        return Layout(proposal, list(frames_on.items()), frames_on)
    # The MoE binding's pages come last: the prompt's last page is where the row appends first.
    shares = proposal.shares.items()
    prompt = sorted(shares, key=lambda share: (share[0] == moe_binding, share[0]))
    pages = _joined([*prompt, *growth])
    pages_on = frames_on
    if shared.runs:
        pages_on = dict(shared.pages_on)
        _add(pages_on, pages)
    return Layout(proposal, pages, pages_on, shared)


def obstacle(state: ClusterState, proposal: Proposal, num_growth: int) -> tuple[str, str]:
    """Explain why lay_out returns None: the bound or resource that is short, and a sentence."""
    for instance, count in proposal.shares.items():
        if count > (free := state.frames[instance].num_free):
            text = (
                f"instance {instance} should take {count:,} of its pages and has {free:,} free "
                "frames"
            )
            return "frames", text
    growth = _promised(state, proposal, proposal.shares, num_growth)
    if growth is None:
        text = (
            f"{num_growth:,} frames for its coming tokens cannot be promised on the instances it "
            "can reach"
        )
        return "promise", text
    reached = state.committed.bound_reached(
        proposal.moe_binding, dict.fromkeys([*proposal.shares, *(i for i, _ in growth)])
    )
    if reached is None:
        text = (
            f"instance {proposal.moe_binding} has no free frame for its state; those of ended "
            "requests are free when their last windows are reported"
        )
        return "state_frames", text
    bound, instance = reached
    limit = getattr(state.bounds, bound)
    text = (
        f"instance {instance} is at {bound} ({limit}), with instance {proposal.moe_binding} as MoE "
        "binding"
    )
    return bound, text


def choose_holder(state: ClusterState, request: Request) -> int | None:
    """Return the holder of the request's next page, None if no instance can take it now."""
    for instance in _by_preference(state, request.moe_binding, request.pages_on):
        if can_hold_next(state, request, instance):
            return instance
    return None


def can_hold_next(state: ClusterState, request: Request, instance: int) -> bool:
    """Return whether the request's next page may go to the instance.

    It needs a frame there, and a new instance a link.
    """
    return state.frames[instance].num_free > 0 and state.committed.can_reach(
        request.moe_binding, request.span, instance
    )


def _promised(
    state: ClusterState, proposal: Proposal, frames_on: Mapping[int, int], num_growth: int
) -> list[tuple[int, int]] | None:
    """Return (instance, pages) of the next num_growth pages in order; None if they do not fit now.

    The pages go in the proposal's turns if frames allow it; else in the order of `_by_preference`.
    """
    moe_binding, turns = proposal.moe_binding, proposal.turns
    promise: list[tuple[int, int]] = []
    if turns and (in_turns := _in_turns(state, frames_on, turns, num_growth)):
        return in_turns
    if num_growth == 0:
        return promise
    num_linked = len(frames_on) - (moe_binding in frames_on)
    for instance in _by_preference(state, moe_binding, frames_on):
        room = min(num_growth, state.frames[instance].num_free - frames_on.get(instance, 0))
        if room <= 0:
            continue
        if instance not in frames_on and instance != moe_binding:
            if state.committed.link_bound_reached(moe_binding, instance, num_linked) is not None:
                continue
            num_linked += 1
        promise.append((instance, room))
        num_growth -= room
        if num_growth == 0:
            return promise
    return None


def _in_turns(
    state: ClusterState, frames_on: Mapping[int, int], turns: Sequence[int], num_pages: int
) -> list[tuple[int, int]] | None:
    pages = [(turns[page % len(turns)], 1) for page in range(num_pages)]
    for rank, instance in enumerate(turns):
        count = len(range(rank, num_pages, len(turns)))
        if count > state.frames[instance].num_free - frames_on.get(instance, 0):
            return None
    return pages


def _add(counts: dict[int, int], more: Iterable[tuple[int, int]]) -> None:
    for instance, count in more:
        counts[instance] = counts.get(instance, 0) + count


def _by_preference(state: ClusterState, moe_binding: int, members: Iterable[int]) -> Iterable[int]:
    """The MoE binding is first, then members by KV load, then the rest by (other node, KV load)."""
    yield moe_binding
    inside = [instance for instance in members if instance != moe_binding]
    yield from sorted(inside, key=lambda i: (state.loads.kv_tokens(i), i))
    node = state.cluster.node_of(moe_binding)
    outside = [i for i in state.open if i != moe_binding and i not in inside]
    yield from sorted(
        outside, key=lambda i: (state.cluster.node_of(i) != node, state.loads.kv_tokens(i), i)
    )


def _joined(pages: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for instance, count in pages:
        if joined and joined[-1][0] == instance:
            joined[-1] = instance, joined[-1][1] + count
        else:
            joined.append((instance, count))
    return joined
