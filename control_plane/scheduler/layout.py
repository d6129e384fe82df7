"""Which instance takes a request's coming pages: the promise at admission, the holder when a page
is allocated.

Enters: the decided state and a request. Leaves: choices. Changes nothing. Does not know: policies,
windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from control_plane.scheduler.cluster_state import ClusterState
from control_plane.scheduler.policies.policy import Choice
from control_plane.scheduler.request import NOTHING_SHARED, Request, SharedPrefix, num_pages


def num_growth_pages(length: int, num_tokens: int) -> int:
    """Pages behind those of `length` tokens for num_tokens coming ones, the last of which has no
    KV."""
    return num_pages(length + max(num_tokens - 1, 0)) - num_pages(length)


def lay_out(
    state: ClusterState, choice: Choice, num_growth: int, shared: SharedPrefix = NOTHING_SHARED
) -> tuple[list[tuple[int, int]], dict[int, int]] | None:
    """Who holds a request's pages if it is placed as chosen, with num_growth more for coming
    tokens.

    (instance, pages) in the order of the pages behind those that are shared, and instance -> the
    sum of all. None if the cluster cannot hold them now.
    """
    moe_binding, shares, _ = choice
    frames_on = _summed(shared.frames_on, shares.items())
    growth = _promised(state, choice, frames_on, num_growth)
    if growth is None:
        return None
    frames_on = _summed(frames_on, growth)
    if not state.can_allocate(moe_binding, frames_on):
        return None
    if not shared.runs and len(frames_on) == 1:
        return list(frames_on.items()), frames_on
    # The MoE binding's pages come last: the prompt's last page is where the row appends first.
    prompt = sorted(shares.items(), key=lambda share: (share[0] == moe_binding, share[0]))
    pages = _joined([*prompt, *growth])
    return pages, _summed(shared.pages_on, pages) if shared.runs else frames_on


def obstacle(state: ClusterState, choice: Choice, num_growth: int) -> tuple[str, str]:
    """Why lay_out answers None: what is short, in a word and in a sentence."""
    for instance, count in choice.shares.items():
        if count > (free := state.pools[instance].num_free):
            return (
                "frames",
                f"instance {instance} should take {count:,} of its pages and has {free:,} free frames",
            )
    growth = _promised(state, choice, choice.shares, num_growth)
    if growth is None:
        return (
            "promise",
            f"{num_growth:,} frames for its coming tokens cannot be promised on the instances it can reach",
        )
    reached = state.committed.bound_reached(
        choice.moe_binding, dict.fromkeys([*choice.shares, *(i for i, _ in growth)])
    )
    assert reached is not None, "frames, the promise or a bound: nothing else stops a placement"
    bound, instance = reached
    limit = getattr(state.bounds, bound)
    return (
        bound,
        f"instance {instance} is at {bound} ({limit}), with instance {choice.moe_binding} as MoE binding",
    )


def choose_holder(state: ClusterState, request: Request) -> int | None:
    """Holder of the request's next page, None if no instance can take it now.

    The MoE binding if it has a frame; else a member of the KV binding; else an extension, its node
    before the rest.
    """
    for instance in _by_preference(state, request.moe_binding, request.pages_on):
        if can_hold_next(state, request, instance):
            return instance
    return None


def can_hold_next(state: ClusterState, request: Request, instance: int) -> bool:
    """Whether the request's next page may go to the instance: a frame, and a link if it is new to
    the KV binding."""
    return state.pools[instance].num_free > 0 and state.can_reach(request, instance)


def _promised(
    state: ClusterState, choice: Choice, frames_on: Mapping[int, int], num_growth: int
) -> list[tuple[int, int]] | None:
    """(instance, pages) of the next num_growth pages, in their order. None if the cluster cannot
    promise so many now. frames_on: the KV binding so far, and the frames that it takes.

    In turns where the choice wants them so and frames allow it; else the MoE binding first, then
    members by load, then others, its node before the rest.
    """
    moe_binding, _, turns = choice
    promise: list[tuple[int, int]] = []
    if turns and (in_turns := _in_turns(state, frames_on, turns, num_growth)):
        return in_turns
    if num_growth == 0:
        return promise
    num_linked = len(frames_on) - (moe_binding in frames_on)
    for instance in _by_preference(state, moe_binding, frames_on):
        room = min(num_growth, state.pools[instance].num_free - frames_on.get(instance, 0))
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
    """One page each, in turns; None if an instance has not so many frames."""
    pages = [(turns[page % len(turns)], 1) for page in range(num_pages)]
    for rank, instance in enumerate(turns):
        count = len(range(rank, num_pages, len(turns)))
        if count > state.pools[instance].num_free - frames_on.get(instance, 0):
            return None
    return pages


def _summed(counts: Mapping[int, int], more: Iterable[tuple[int, int]]) -> dict[int, int]:
    summed = dict(counts)
    for instance, count in more:
        summed[instance] = summed.get(instance, 0) + count
    return summed


def _by_preference(state: ClusterState, moe_binding: int, members: Iterable[int]) -> Iterable[int]:
    """MoE binding, the other members by KV load, then everybody else by (other node, KV load)."""
    yield moe_binding
    inside = [instance for instance in members if instance != moe_binding]
    yield from sorted(inside, key=lambda i: (state.kv_tokens(i), i))
    node = state.cluster.node_of(moe_binding)
    outside = [
        i for i in range(state.cluster.num_instances) if i != moe_binding and i not in inside
    ]
    yield from sorted(
        outside, key=lambda i: (state.cluster.node_of(i) != node, state.kv_tokens(i), i)
    )


def _joined(pages: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(instance, pages) with neighbours of the same instance as one."""
    joined: list[tuple[int, int]] = []
    for instance, count in pages:
        if joined and joined[-1][0] == instance:
            joined[-1] = instance, joined[-1][1] + count
        else:
            joined.append((instance, count))
    return joined
