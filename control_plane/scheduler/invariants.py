"""A slow check that all that the scheduler keeps up to date follows from its requests."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from control_plane.scheduler.scheduler import Scheduler
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.request import Request, State, holders_of
from control_plane.scheduler.windows.routing import build_routes
from control_plane.scheduler.windows.row_windows import MAX_WINDOWS_IN_FLIGHT
from nanocp.values.plan import PAGE_SIZE, TargetRun
from nanocp.values.table import InstanceTable


def check(scheduler: Scheduler, tables: Sequence[InstanceTable] | None = None) -> None:
    """Check frames, counts, bounds, routes and loads. Raises AssertionError.

    tables: if given, all tables that followed the plans; they must hold what the requests need.
    """
    state = scheduler._state
    check_frames(state, chain(scheduler._quarantine.frames(), scheduler.held.reserved_frames()))
    _check_requests(scheduler)
    check_loads(state)
    check_commitments(state)
    scheduler.offload.check()
    _check_routes(scheduler)
    if tables is not None:
        _check_tables(scheduler, tables)
    assert len(scheduler._rows.in_flight) <= MAX_WINDOWS_IN_FLIGHT, (
        "more than two windows are in flight"
    )
    queue = scheduler._admission.queue
    num_waiting = sum(waiting.arrival.prompt_len for waiting in queue)
    assert queue.num_tokens == num_waiting, (
        f"the queue counts {queue.num_tokens} prompt tokens; it has {num_waiting}"
    )


def check_frames(state: ClusterState, held: Iterable[tuple[int, int]]) -> None:
    """Check that every frame is free, or has owners and holds that add up. Raises AssertionError.

    held: (instance, frame), once for each hold.
    """
    owners: Counter[tuple[int, int]] = Counter()
    contents: dict[tuple[int, int], set[bytes]] = {}
    for request in state.requests.values():
        for page, instance, frame in _pages(request.held_runs):
            owners[instance, frame] += 1
            if page < len(request.page_hashes):
                contents.setdefault((instance, frame), set()).add(request.page_hashes[page])
    holds = Counter(held)
    cached = {}
    for instance, ledger in enumerate(state.frames):
        for frame, page_hash, num_owners, num_holds in ledger.cached_pages():
            cached[instance, frame] = num_owners, num_holds
            found = contents.get((instance, frame), {page_hash})
            assert found == {page_hash}, (
                f"frame {frame} of instance {instance} should be {page_hash!r}, not {found}"
            )
    for place in {*owners, *holds, *cached}:
        counts = owners[place], holds[place]
        kept = cached.get(place, counts)
        assert kept == counts, (
            f"frame {place} counts {kept} owners and times in quarantine; it has {counts}"
        )
        assert place in cached or sum(counts) == 1, (
            f"frame {place} has {counts} owners and times in quarantine"
        )
    most, carry_pages = state.cluster.num_frames, state.cluster.carry_pages
    groups = owners, holds.keys() - owners.keys()
    sizes = [Counter((i, frame < most) for i, frame in frames) for frames in groups]
    taken: list[set[int]] = [set() for _ in state.frames]
    for instance, frame in chain(owners, holds):
        taken[instance].add(frame)
    for instance, ledger in enumerate(state.frames):
        free = ledger.free_frames()
        assert len(set(free)) == len(free) and taken[instance].isdisjoint(free), (
            "a free frame is owned, or free twice"
        )
        num_free_states = len(free) - bisect_left(free, most)
        num_states = [*(size[instance, False] for size in sizes), num_free_states]
        assert sum(num_states) == ledger.carries.number * carry_pages, (
            f"instance {instance} lost frames of states: {num_states}"
        )
        num_taken = ledger.carries.num_taken
        assert num_states[0] == num_taken * carry_pages, (
            f"instance {instance} counts {num_taken} states; it has {num_states[0]} pages"
        )
        num_frames = [*(size[instance, True] for size in sizes), len(free) - num_free_states]
        num_free = ledger.num_free + (ledger.num_withheld or 0)
        kept_frames = [ledger.num_committed, ledger.num_quarantined, num_free]
        assert kept_frames == num_frames, (
            f"instance {instance} counts {kept_frames} committed, quarantined, free; it has "
            f"{num_frames}"
        )
        lost = ledger.num_frames - sum(num_frames)
        assert not lost, f"instance {instance} lost {lost} frames"


def _check_requests(scheduler: Scheduler) -> None:
    state, advances = scheduler._state, scheduler._rows.advances
    running = parked = 0
    arriving = [0] * state.cluster.num_instances
    for request in state.requests.values():
        running += request.state is State.RUNNING
        parked += request.state is State.PARKED
        pages = list(_pages(request.runs))
        assert [page for page, _, _ in pages] == list(range(request.num_pages)), request
        assert request.pages_on == Counter(instance for _, instance, _ in pages), request
        assert request.holders == tuple(holders_of(request.runs)), request
        assert (request.ticket is not None) == bool(request.receivers), request
        for instance, tokens in request.receivers.items():
            arriving[instance] += tokens
        is_moving = request.move is not None and request not in scheduler._moves.arrived
        is_carried = request.carry_source is not None
        assert is_carried == (request.request_id in scheduler._rows.carried), request
        assert request.carry is None or request.carry.instance == request.moe_binding, request
        assert request.ran_at is None or request.is_started, request
        is_moving |= is_carried and request.ticket is not None
        assert (request.state is State.TRANSFERRING or is_moving) == (request.ticket is not None), (
            request
        )
        assert (request.state is State.RUNNABLE) == (
            request.request_id in scheduler._rows.runnable
        ), request
        if request.state is State.RUNNING:
            # Pages ahead (protocol.md): the windows issued so far have their pages.
            end = min(request.position_at(state.step), request.kv_len_max)
            assert request.num_pages * PAGE_SIZE >= end, (
                f"{request} writes up to {end} without a page"
            )
            most = end + advances._unsettled[request.request_id] + advances.slack
            assert request.num_pages * PAGE_SIZE >= min(most, request.kv_len_max), (
                f"{request} may write up to {most} without a page"
            )
            # It comes to the end of its run in the next window at the earliest.
            assert min(request.tail_end, request.kv_len_max) >= end, (
                f"{request} has run out of its tail at {end}"
            )
            assert set(request.pages_on) | {request.moe_binding} <= set(request.ever_bound), request
    assert arriving == state.loads.arriving_tokens, (
        f"{state.loads.arriving_tokens} tokens are under way to the instances, not {arriving}"
    )
    moving = [request.move.num_pages for request in state.requests.values() if request.move]
    assert sum(moving) == scheduler._moves.num_pages, (
        f"{moving} pages are moving, not {scheduler._moves.num_pages}"
    )
    assert running == scheduler._rows.num_running and parked == len(scheduler._rows.parked)
    held = {r.request_id for r in state.requests.values() if r.state is State.HELD}
    assert scheduler.held._held.keys() == held, "a request is held that nobody waits for"
    assert not scheduler._admission.away.keys() & state.requests.keys(), (
        "a preempted request is placed"
    )
    assert not any(
        request_id in scheduler._admission.queue for request_id in scheduler._admission.away
    ), "a preempted request waits twice"
    tickets = {r.ticket: r for r in state.requests.values() if r.ticket is not None}
    assert scheduler.tickets._owners == tickets, "a ticket in force is not that of its request"
    linked = [
        r
        for r in state.requests.values()
        if r.state is State.RUNNING and r.pages_on.keys() != {r.moe_binding}
    ]
    assert state.linked.by_degree == sorted((len(r.pages_on), r.request_id) for r in linked)
    for instance, listed in enumerate(state.linked.runs):
        runs = sorted(
            (-run.num_pages, r.request_id, run)
            for r in linked
            for run in r.runs
            if run.instance == instance
        )
        assert listed == runs, f"runs of instance {instance} are {runs}, listed are {listed}"


def _pages(runs: Iterable[TargetRun]) -> Iterator[tuple[int, int, int]]:
    for run in runs:
        for index in range(run.num_pages):
            yield run.first_page + index, run.instance, run.frame + index


def _tokens_of_runs(request: Request, step: int) -> Iterator[tuple[int, int]]:
    """Yield (instance, tokens that attention reads, or that are in place if it does not run)."""
    running = request.state is State.RUNNING
    end = request.position_at(step) + running
    for index, run in enumerate(request.runs):
        tokens = end - run.first_page * PAGE_SIZE
        # A row that is at the end of its run goes on to the next when the window is planned.
        most = tokens if running and index == request.tail else run.num_pages * PAGE_SIZE
        yield run.instance, 0 if running and index > request.tail else max(min(tokens, most), 0)
    move = request.move
    if move and not move.is_stopped:  # the decision counts: the load has moved
        yield move.source, -move.num_pages * PAGE_SIZE
        yield move.destination, move.num_pages * PAGE_SIZE


def check_loads(state: ClusterState) -> None:
    """Check that loads follow from the requests. Raises AssertionError."""
    tokens = [state.loads.weights[instance] for instance in range(len(state.frames))]
    rows = list(tokens)
    for request in state.requests.values():
        rows[request.moe_binding] += request.state not in (State.PARKED, State.HELD)
        for instance, count in _tokens_of_runs(request, state.step):
            tokens[instance] += count
    kept = [state.loads.kv_tokens(instance) for instance in range(len(state.frames))]
    assert kept == tokens, f"kv_tokens are {kept}, the requests have {tokens}"
    assert state.loads.num_rows == rows, (
        f"num_rows are {state.loads.num_rows}, the requests have {rows}"
    )


def check_commitments(state: ClusterState) -> None:
    """Check that counts follow from the requests, within the bounds. Raises AssertionError."""
    num, bounds, committed = len(state.frames), state.bounds, state.committed
    rows, attention_rows, partials = [0] * num, [0] * num, [0] * num
    links = [[0] * num for _ in range(num)]
    far_from, far_to, node_of = [0] * num, [0] * num, state.cluster.node_of
    for request in state.requests.values():
        rows[request.moe_binding] += 1
        attention_rows[request.moe_binding] += 1
        for instance in {*request.span} - {request.moe_binding}:
            links[request.moe_binding][instance] += 1
            attention_rows[instance] += 1
            partials[request.moe_binding] += 1
            is_far = node_of(instance) != node_of(request.moe_binding)
            far_from[request.moe_binding] += is_far
            far_to[instance] += is_far
    assert (committed.rows, committed.attention_rows) == (rows, attention_rows)
    assert (committed.partials, committed.links) == (partials, links)
    assert (committed.far_from, committed.far_to) == (far_from, far_to)
    assert max(rows) <= bounds.max_rows and max(attention_rows) <= bounds.max_attention_rows
    assert max(partials) <= bounds.max_partials and max(map(max, links)) <= bounds.max_links


def _check_routes(scheduler: Scheduler) -> None:
    state, num = scheduler._state, len(scheduler._state.frames)
    running = [request for request in state.requests.values() if request.state is State.RUNNING]
    q_route, res_route = build_routes(
        [(r.request_id, r.moe_binding, r.pages_on) for r in running], num
    )
    routes = scheduler._lowering.routes
    for i in range(num):
        rows = sorted(routes.rows(i))
        assert rows == sorted(r.request_id for r in running if r.moe_binding == i), (
            f"rows of instance {i}: {rows}"
        )
        for j in range(num):
            slots = sorted(routes.slots(i, j))
            assert slots == q_route[i][j] == res_route[j][i], (
                f"slots from {i} to {j} are {slots}, not {q_route[i][j]}"
            )


def _check_tables(scheduler: Scheduler, tables: Sequence[InstanceTable]) -> None:
    state, lowering = scheduler._state, scheduler._lowering
    for i, table in enumerate(tables):
        rebuilt = InstanceTable(i, len(tables))
        rebuilt.apply(table.full_changes())
        assert rebuilt.digest == table.digest == lowering.digests[i], (
            "a digest is not that of its table"
        )
        for j, other in enumerate(tables):
            assert table.q_route[j] == other.res_route[i], (
                f"Q-route {i} to {j} is not the transpose of Res-route"
            )
    if lowering.has_pending:
        return
    pages: list[dict[int, dict[int, int]]] = [{} for _ in tables]
    for request in state.requests.values():
        if not request.is_started:
            continue
        carry = request.carry_source or request.carry
        for page, instance, frame in _pages([*request.runs, *([carry] if carry else [])]):
            pages[instance].setdefault(request.request_id, {})[page] = frame
        if request.state is State.RUNNING:
            _check_holders(
                request, tables, min(request.position_at(state.step), request.kv_len_max)
            )
    for instance, table in enumerate(tables):
        told = {request_id: table.frames(request_id) for request_id in table.pages}
        assert told == pages[instance], (
            f"pages of instance {instance}: {told}, not {pages[instance]}"
        )
        assert table.rows == lowering.routes.rows(instance)
        assert table.q_route == [
            lowering.routes.slots(instance, peer) for peer in range(len(tables))
        ]


def _check_holders(request: Request, tables: Sequence[InstanceTable], end: int) -> None:
    """The MoE binding knows every page's holder from the last written page on, others none."""
    for instance, table in enumerate(tables):
        if instance != request.moe_binding:
            told = table.holders.get(request.request_id)
            assert told is None, (
                f"instance {instance} still has holders of request {request.request_id}"
            )
            continue
        for page, holder, _ in _pages(request.runs):
            told_holder = table.holder(request.request_id, page)
            assert page < (end - 1) // PAGE_SIZE or told_holder == holder, (
                f"page {page} of request {request.request_id} is on {holder}, its MoE binding was "
                f"told {told_holder}"
            )
