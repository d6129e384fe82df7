"""Which token came while its request was moved is what plans say; its cost is what gaps say."""

import pytest

from benchmarks.service.live_moves import (
    EXTENSION,
    MOVES,
    RE_BINDING,
    RE_LEVELLING,
    Gap,
    Turn,
    costs,
    gaps_of,
    turns_of,
    waits_ms,
)
from control_plane.scheduler.scheduler import Scheduler
from control_plane.shell.event_log import EventLog
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.offload import page_hashes
from nanocp.values.plan import Arrival, TransferDone, WindowDone

NUM_INSTANCES = 3
PROMPTS = {request_id: [request_id] * (200 + 100 * request_id) for request_id in (1, 2, 3)}
NUM_TOKENS = 40


def record(path, **knobs):
    """Record three requests under chaos; pages arrive after the third window from their order on.

    Returns the plans that issued windows, and (request, window) of each order.
    """
    cluster = ClusterConfig(num_instances=NUM_INSTANCES, num_frames=40)
    config = SchedulerConfig(policy="chaos", chaos_period_windows=1, max_moving_pages=2, **knobs)
    scheduler, log = Scheduler(cluster, config), EventLog(path, cluster, config)
    plans, orders, due = [], [], {}
    events = [
        Arrival(number, len(ids), NUM_TOKENS, needs_prefill=False, page_hashes=page_hashes(ids))
        for number, ids in PROMPTS.items()
    ]
    while events:
        plan = scheduler.plan_window(events, len(plans))
        log.write(len(plans), events, plan)
        events = []
        if plan.window is None:
            continue
        plans.append(plan)
        for move in plan.transfers:
            due.setdefault(plan.window + 3, []).append(TransferDone(move.ticket, *move.receivers))
            orders.append((move.request_id, plan.window))
        events = [WindowDone(instance, plan.window) for instance in range(NUM_INSTANCES)]
        events += due.pop(plan.window, [])
    log.close()
    return plans, orders


def test_the_moves_of_a_window_are_those_of_its_plan(tmp_path):
    plans, orders = record(tmp_path / "log")
    turns = turns_of(tmp_path / "log")
    kinds = {
        (number, turn.window): turn.kinds
        for number, ids in PROMPTS.items()
        for turn in turns[page_hashes(ids)[0]]
    }
    assert len(kinds) == NUM_TOKENS * len(PROMPTS)
    # A row is handed over at the edge before the window that is first at its new MoE binding.
    handed_over = {
        (hand.request_id, plan.window)
        for plan in plans
        for i in plan.instances
        for hand in i.hand_offs_in
    }
    assert {place for place, found in kinds.items() if RE_BINDING in found} == handed_over != set()
    # From the plan that tells of the move to the one that reads the pages at their new place.
    under_way = {(number, first + later) for number, first in orders for later in range(5)}
    assert {
        place for place, found in kinds.items() if found & {EXTENSION, RE_LEVELLING}
    } == under_way & kinds.keys()
    grown, bindings = set(), {}
    for plan in plans:
        for placement in plan.placements:
            binding = {instance for _, instance in placement.holders}
            if binding - bindings.setdefault(placement.request_id, binding):
                grown.add((placement.request_id, plan.window))
            bindings[placement.request_id] = binding
    assert (
        {place for place in grown if EXTENSION not in kinds.get(place, {EXTENSION})}
        == set()
        != grown
    )
    assert any(found == {RE_LEVELLING} for found in kinds.values())


def test_a_gap_is_that_of_the_token_of_its_window(tmp_path):
    record(tmp_path / "log")
    arrivals_s = [float(index * index) for index in range(NUM_TOKENS)]
    gaps = gaps_of(tmp_path / "log", [(PROMPTS[2], arrivals_s)])
    turns = turns_of(tmp_path / "log")[page_hashes(PROMPTS[2])[0]]
    assert [(gap.turn, gap.seconds) for gap in gaps] == [
        (turns[i], 2.0 * i - 1) for i in range(1, NUM_TOKENS)
    ]
    with pytest.raises(AssertionError, match="39 tokens came of 40 windows"):
        gaps_of(tmp_path / "log", [(PROMPTS[2], arrivals_s[1:])])


def test_a_log_of_another_scheduler_or_of_windows_of_several_steps_is_refused(tmp_path):
    path = tmp_path / "log"
    record(path)
    path.write_text(path.read_text().replace('"chaos_seed":0', '"chaos_seed":1', 1))
    with pytest.raises(ValueError, match="another scheduler"):
        turns_of(path)
    record(path, steps_per_window=2)
    with pytest.raises(ValueError, match="several steps"):
        turns_of(path)


def gap(request, window, seconds, *kinds, since=None):
    turn = Turn(window, frozenset(kinds), is_resumed=request == 2)
    return Gap(bytes([request]), window - 1 if since is None else since, turn, seconds)


def test_a_move_costs_beside_the_others_and_beside_its_own_gaps_before():
    gaps = []
    for window in range(64):
        # Request 0 is moved now and then and takes 1.5 s; the others take 1.2 s in that window, and
        # everybody 1 s else.
        is_moved = window % 8 == 7
        gaps += [gap(0, window, 1.5, RE_BINDING, EXTENSION) if is_moved else gap(0, window, 1.0)]
        gaps += [gap(request, window, 1.2 if is_moved else 1.0) for request in (1, 2)]
    # Whoever parks or was away waits by design: no cost, and nobody's reference.
    gaps += [
        gap(3, 8 * number + 3, 99.0 + number, "preemption" if number % 2 else "parking")
        for number in range(4)
    ]
    found = {cost.pop("kind"): cost for cost in costs(gaps)}
    moved = {"gaps": 8, "ms": 1500.0, "ms_others": 1200.0, "ms_before": 1000.0}
    moved |= {"ratio_others": 1.25, "ratio_before": 1.5}
    assert (
        found[RE_BINDING] == found[EXTENSION] == found["any move"] == moved
        and MOVES[2] not in found
    )
    assert (found["nothing"]["gaps"], found["nothing"]["ratio_others"]) == (2 * 59 + 51, 1.0)
    assert found["nothing, after a preemption"]["gaps"] == 59
    assert waits_ms(gaps) == [100_000.0, 102_000.0]


def test_others_tokens_while_a_state_travels_are_counted_apart():
    gaps = []
    for window in range(65):
        # Request 0 stands still in windows 5 to 7 of eight, and is elsewhere then.
        place = window % 8
        travels = place in (5, 6, 7)
        if not travels:
            kinds = (RE_BINDING, "parking") if place == 0 and window else ()
            gaps.append(gap(0, window, 1.0, *kinds, since=window - 4 if kinds else None))
        gaps += [gap(request, window, 1.5 if travels else 1.0) for request in (1, 3)]
    found = {cost["kind"]: cost for cost in costs(gaps)}
    beside = found["nothing, beside a state"]
    assert (beside["gaps"], beside["ratio_before"]) == (2 * 3 * 8, 1.5)
    assert found["nothing"]["ratio_before"] == 1.0 and RE_BINDING not in found
