"""Pages go to one instance of the lightest node, and home if their row's node has no more load."""

from itertools import groupby
from types import SimpleNamespace

from control_plane.scheduler.policies.cost_aware import CostAware
from control_plane.scheduler.policies.dual_balanced import DualBalanced
from control_plane.scheduler.policies.relevel import relevel
from control_plane.scheduler.policies.relevel_nodes import LEAST_PAGES, relevel_nodes
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import PAGE_SIZE, TargetRun

NODES = (range(2), range(2, 4))
PAGES = 200 * PAGE_SIZE
"""Tokens."""


def request_on(moe_binding, *runs):
    pages_on = {run.instance: run.num_pages for run in runs}
    return SimpleNamespace(
        move=None,
        moe_binding=moe_binding,
        pages_on=pages_on,
        runs=runs,
        movable_pages=lambda run, _: range(run.first_page, run.first_page + run.num_pages),
    )


def state_of(loads, requests, full=()):
    """Two nodes of two; requests: id -> request, all of whose pages may move, but to none of full.

    full: instances.
    """

    def is_far(request, run):
        return request.moe_binding // 2 != run.instance // 2

    runs = [[] for _ in loads]
    far_to, far_from = [0] * len(loads), [0] * len(loads)
    for request_id, request in requests.items():
        for run in request.runs:
            runs[run.instance].append((-run.num_pages, request_id, run))
            far_to[run.instance] += is_far(request, run)
            far_from[request.moe_binding] += is_far(request, run)
    return SimpleNamespace(
        nodes=NODES,
        cluster=SimpleNamespace(
            node_of=lambda instance: instance // 2, num_instances=4, carry_pages=0
        ),
        requests=requests,
        linked=SimpleNamespace(runs=[sorted(each) for each in runs]),
        committed=SimpleNamespace(
            far_to=far_to, num_far_links=lambda i: max(far_to[i], far_from[i])
        ),
        loads=SimpleNamespace(kv_tokens_on=lambda node: sum(loads[i] for i in node)),
        first_unknown_step=0,
        can_move=lambda request, pages, destination: destination not in full,
    )


def moves(loads, requests, first_link_tokens=0, full=(), exchange_tokens=0):
    state = state_of(loads, requests, full)
    named = {id(request): request_id for request_id, request in requests.items()}
    found = relevel_nodes(state, lambda i: loads[i] + exchange_tokens, first_link_tokens)
    return [(named[id(request)], pages, to) for request, pages, to in found]


LOCAL = request_on(0, TargetRun(0, 300, 0, 0), TargetRun(300, 300, 1, 0))
"""A request with its row and all pages on node 0."""


def test_pages_go_to_the_least_loaded_instance_of_the_lightest_node():
    loads = [8 * PAGES, 8 * PAGES, 7 * PAGES, 6 * PAGES]
    # Half of the gap of 3 x 200 pages, from the end of the longest run.
    assert moves(loads, {7: LOCAL}) == [(7, range(300), 3)]


def test_a_small_gap_and_a_full_gateway_are_left():
    assert moves([8 * PAGES, 8 * PAGES, 8 * PAGES, 8 * PAGES - PAGES // 4], {7: LOCAL}) == []
    far = request_on(0, TargetRun(0, 300, 0, 0), TargetRun(300, 300, 3, 0))
    full = 8 * PAGES - (LEAST_PAGES - 1) * PAGE_SIZE
    assert moves([8 * PAGES, 8 * PAGES, 5 * PAGES, full], {7: far}) == []


def test_a_smaller_node_is_not_taken_for_a_lighter_one():
    state = state_of([8 * PAGES, 8 * PAGES, 8 * PAGES, 0], {7: LOCAL})
    state.nodes = (range(2), range(2, 3))
    assert list(relevel_nodes(state, [8 * PAGES, 8 * PAGES, 7 * PAGES].__getitem__, 0)) == []


def test_who_has_links_to_the_gateway_or_to_other_nodes_goes_first():
    loads = [8 * PAGES, 8 * PAGES, 6 * PAGES, 7 * PAGES]
    far = request_on(1, TargetRun(0, 100, 1, 0), TargetRun(100, 20, 3, 0))
    # Instance 3 is the gateway: it has links to another node already.
    assert moves(loads, {7: LOCAL, 8: far}) == [(8, range(100), 3)]
    at_its_row = request_on(1, TargetRun(0, 250, 1, 0), TargetRun(250, 50, 0, 0))
    moving = request_on(1, *far.runs)
    moving.move = True
    assert moves(loads, {7: LOCAL, 8: moving, 9: at_its_row})[0][0] == 9


def test_a_new_link_comes_with_more_tokens_than_it_costs():
    loads = [8 * PAGES, 8 * PAGES, 7 * PAGES, 6 * PAGES]
    assert moves(loads, {7: LOCAL}, 150 * PAGE_SIZE) == [(7, range(300), 3)]
    assert moves(loads, {7: LOCAL}, 151 * PAGE_SIZE) == []
    linked = request_on(0, *LOCAL.runs, TargetRun(600, 5, 3, 0))
    assert moves(loads, {7: linked}, 151 * PAGE_SIZE) == [(7, range(300), 3)]


def test_what_may_follow_pays_for_a_new_link_even_if_one_move_does_not():
    loads = [40 * PAGES, 40 * PAGES, 32 * PAGES, 32 * PAGES]
    # Half of the gap is 1,600 pages; two moves have 1,024.
    assert moves(loads, {7: LOCAL}, 512 * PAGE_SIZE) == [(7, range(300), 2)]
    assert moves(loads, {7: LOCAL}, 513 * PAGE_SIZE) == []


def test_what_all_instances_have_for_links_leaves_a_gateway_its_room():
    loads = [8 * PAGES, 8 * PAGES, 7 * PAGES, 6 * PAGES]
    assert moves(loads, {7: LOCAL}, exchange_tokens=5 * PAGES) == [(7, range(300), 3)]


def test_where_an_instance_has_far_links_no_other_row_gets_one():
    loads = [8 * PAGES, 8 * PAGES, 6 * PAGES, 7 * PAGES]
    far = request_on(1, TargetRun(0, 100, 1, 0), TargetRun(100, 20, 3, 0))
    far.move = True  # It has no pages to give now.
    assert moves(loads, {7: LOCAL, 8: far}) == []
    same_row = request_on(1, TargetRun(0, 150, 0, 0))
    assert moves(loads, {7: LOCAL, 8: far, 9: same_row}) == [(9, range(150), 3)]


def test_pages_go_home_once_their_node_has_no_more_load():
    far = request_on(2, TargetRun(0, 100, 2, 0), TargetRun(100, 50, 0, 0))
    heavier_home = [6 * PAGES, 6 * PAGES, 7 * PAGES, 6 * PAGES]
    assert (8, range(100, 150), 2) not in moves(heavier_home, {8: far})
    assert moves([7 * PAGES, 6 * PAGES, 6 * PAGES, 6 * PAGES], {8: far}) == [
        (8, range(100, 150), 2)
    ]


def test_pages_do_not_go_away_and_home_without_end():
    loads, num_moved = [102_400, 102_400, 81_920, 81_920], 0
    pages_on = [0] * 600
    for _ in range(1000):
        runs, first = [], 0
        for instance, group in groupby(pages_on):
            runs.append(TargetRun(first, num := len(list(group)), instance, 0))
            first += num
        for _, pages, to in moves(loads, {7: request_on(0, *runs)}):
            loads[pages_on[pages.start]] -= len(pages) * PAGE_SIZE
            loads[to] += len(pages) * PAGE_SIZE
            pages_on[pages.start : pages.stop] = [to] * len(pages)
            num_moved += len(pages)
    assert 0 < num_moved < len(pages_on)
    assert sum(loads[:2]) - sum(loads[2:]) < 20_000


def test_a_move_that_cannot_start_is_in_the_way_of_no_other():
    home = request_on(2, TargetRun(0, 100, 2, 0), TargetRun(100, 90, 0, 0))
    other = request_on(3, TargetRun(0, 100, 3, 0), TargetRun(100, 50, 0, 0))
    loads = [7 * PAGES, 6 * PAGES, 6 * PAGES, 6 * PAGES]
    assert moves(loads, {8: home, 9: other}, full=[2]) == [(9, range(100, 150), 3)]
    short = request_on(3, TargetRun(0, 100, 3, 0), TargetRun(100, 4, 0, 0))
    loads[3] -= PAGES  # It is the gateway.
    assert [move[::2] for move in moves(loads, {7: LOCAL, 8: home, 9: short}, full=[2])] == [(7, 3)]
    assert moves(loads, {7: LOCAL}, full=[2, 3]) == []


def test_within_a_node_no_row_of_another_gets_a_new_link():
    far = request_on(2, TargetRun(0, 100, 2, 0), TargetRun(100, 300, 0, 0))
    loads = {0: 8 * PAGES, 1: 2 * PAGES}
    assert list(relevel(state_of([*loads.values(), 0, 0], {8: far}), loads)) == []
    both = request_on(2, *far.runs, TargetRun(400, 8, 1, 0))
    assert list(relevel(state_of([*loads.values(), 0, 0], {8: both}), loads))


def test_a_row_is_bound_to_no_other_node_again():
    far = request_on(0, TargetRun(0, 100, 0, 0), TargetRun(100, 50, 2, 0))
    state = state_of([0] * 4, {8: far})
    state.loads.num_rows, state.linked.by_degree = [5, 5, 1, 5], [(2, 8)]
    assert list(CostAware(SchedulerConfig(policy="cost_aware")).rebindings(state, 0)) == []
    # Nor does a holder of another node with fewer rows keep it from one of its own node.
    far.pages_on = {0: 100, 1: 50, 2: 50}
    state.loads.num_rows = [5, 2, 1, 5]
    for policy, new in ((CostAware, 1), (DualBalanced, 2)):
        assert [to for _, to in policy(SchedulerConfig()).rebindings(state, 0)] == [new]
