"""Two lanes: generators that take turns, and their regions. Their tokens: test_matrix.py."""

import time

import pytest

from data_plane.instance.lanes import LaneOps, in_turns
from data_plane.transport.exchange import Awaited, Channel, in_two_lanes
from nanocp.config.scheduler import LANE_ORDERS, SchedulerConfig
from nanocp.overlap.policies.orders import BehindFirst
from nanocp.overlap.policies.registry import lane_policy


def put(number):
    return Awaited(Channel.Q, 0, number)


def test_a_lane_computes_while_the_other_waits_and_who_is_behind_goes_first():
    here, order = set(), []

    def step(name, puts):
        for number in puts:
            order.append((name, number))
            yield put(number)
            time.sleep(0.002)
        order.append((name, "end"))

    turns = in_turns([step("a", [1, 2]), step("b", [3])], lambda awaited: awaited.epoch in here)
    assert next(turns) == (put(1), put(3)) and order == [("a", 1), ("b", 3)]
    here.add(3)
    assert next(turns) == (put(1),) and order[2:] == [("b", "end")]
    here.update((1, 2))
    with pytest.raises(StopIteration) as stop:
        next(turns)
    assert order[3:] == [("a", 2), ("a", "end")]
    assert stop.value.value >= 2_000_000, "b computed while a waited"


@pytest.mark.parametrize("ahead", [0, 1])
def test_of_lanes_that_can_go_on_the_one_that_is_behind_does(ahead):
    here, order = set(), []

    def step(lane):
        for number in range(4):
            order.append(lane)
            yield Awaited(Channel.Q, lane, number)

    turns = in_turns([step(0), step(1)], lambda awaited: tuple(awaited)[1:] in here)
    next(turns)
    here.update((ahead, number) for number in range(2))
    next(turns)
    assert order == [0, 1, ahead, ahead]
    here.update((lane, number) for lane in (0, 1) for number in range(3))
    next(turns)
    behind = 1 - ahead
    assert order[4:] == [behind, behind, *sorted((behind, ahead))]


CHANNELS = [Channel.Q, Channel.RES, Channel.DISPATCH, Channel.COMBINE]


def layers(lane, num_layers, peers=(0,)):
    """The puts that a lane's step awaits."""
    for layer in range(num_layers):
        for channel in CHANNELS:
            for peer in peers:
                yield Awaited(channel.in_lane(lane), peer, layer)


def test_operators_of_lanes_have_the_tags_of_what_was_awaited():
    """What awaits several peers is one operator."""
    seen = []

    class Noting(BehindFirst):
        def next_round(self, ops):
            seen.extend(op.tag for op in ops.get_ready_ops(0))
            super().next_round(ops)

    with pytest.raises(StopIteration):
        next(in_turns([layers(0, 2, peers=(0, 2))], lambda awaited: True, Noting()))
    layer = ["attention", "", "exchange", "", "experts", "", "combine", ""]
    assert seen == ["combine", *layer, *layer]
    ops = LaneOps([layers(0, 1), layers(1, 1)], lambda awaited: True)
    with pytest.raises(ValueError, match="the scheduler has cut 2 lanes, not 3"):
        ops.split((1, 1, 1))


AHEAD = "combine 0/1010, attention 250/1260, exchange 500/1510, experts 750/1760"
"""Lane 0 is a layer ahead."""


@pytest.mark.parametrize("peers", [(0,), (0, 2)])
def test_a_searched_order_is_a_priority_among_what_is_ready(peers):
    order, late = [], set()

    def step(lane):
        for put in layers(lane, 3, peers):
            order.append((lane, put.epoch))
            yield put

    turns = in_turns([step(0), step(1)], lambda put: put not in late, lane_policy(AHEAD))
    with pytest.raises(StopIteration):
        next(turns)
    num = len(peers)
    turn = [0] * num + [1] * num
    ahead, behind = [0] * (4 * num + 1) + [1], [0] * (num - 1) + [1] * (5 * num - 1)
    assert [lane for lane, _ in order] == [*ahead, *turn * 7, *behind]
    order.clear()
    late.add(Awaited(Channel.Q, peers[0], 0))
    assert next(in_turns([step(0), step(1)], lambda put: put not in late, lane_policy(AHEAD)))
    assert order[0] == (0, 0) and {lane for lane, _ in order[1:]} == {1}, "nothing waits"


@pytest.mark.parametrize("order", ["nanoflow2", "sequential", "", AHEAD[:-1] + "x", f" {AHEAD}"])
def test_an_order_that_there_is_not_is_refused_with_those_that_there_are(order):
    with pytest.raises(ValueError, match=r"lane_table is .* order one of behind_first\|dual"):
        SchedulerConfig(lane_table=((1, 0, 90, order),))
    for known in (*LANE_ORDERS, AHEAD):
        SchedulerConfig(lane_table=((1, 0, 90, known),))


def test_each_lane_has_regions_of_its_own_and_the_mailbox_none():
    layout = in_two_lanes(dict.fromkeys(list(Channel)[:5], ()))
    assert set(layout) == set(Channel)
    step_channels = [channel for channel in list(Channel)[:5] if channel is not Channel.MAILBOX]
    seconds = [channel.in_lane(1) for channel in step_channels]
    assert len({*step_channels, *seconds}) == 8 and Channel.MAILBOX not in seconds
    assert [channel.name for channel in seconds] == [f"{c.name}_OF_LANE_1" for c in step_channels]
    assert [channel.in_lane(0) for channel in step_channels] == step_channels
