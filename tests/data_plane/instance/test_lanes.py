"""Two lanes: generators that take turns; the real step's tokens with lanes forced and random."""

import itertools
import time
from dataclasses import replace

import pytest

from data_plane.instance.lanes import in_turns
from data_plane.transport.exchange import Awaited, Channel, in_two_lanes
from harness.exact.decode_cluster import DecodeCluster
from harness.exact.exact_runs import CLUSTER, assert_exact, make_prompts
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config


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


def test_each_lane_has_regions_of_its_own_and_the_mailbox_none():
    layout = in_two_lanes(dict.fromkeys(list(Channel)[:5], ()))
    assert set(layout) == set(Channel)
    step_channels = [channel for channel in list(Channel)[:5] if channel is not Channel.MAILBOX]
    seconds = [channel.in_lane(1) for channel in step_channels]
    assert len({*step_channels, *seconds}) == 8 and Channel.MAILBOX not in seconds
    assert [channel.name for channel in seconds] == [f"{c.name}_OF_LANE_1" for c in step_channels]
    assert [channel.in_lane(0) for channel in step_channels] == step_channels


def cases(quick, *ways):
    """Every combination of the ways; all but one are system tests."""
    return [
        pytest.param(*case, marks=() if case == quick else pytest.mark.system)
        for case in itertools.product(*ways)
    ]


@pytest.mark.parametrize(
    ("degree", "lanes", "num_steps"),
    cases((2, "random", 1), (1, 2, 3, 4), ("off", "always", "random"), (1, 4)),
)
def test_tokens_are_exact_in_lanes(tiny_checkpoint, tiny_oracle, degree, lanes, num_steps):
    scheduler = SchedulerConfig(
        policy=f"fixed_degree:{degree}", steps_per_window=num_steps, lanes=lanes, chaos_seed=1
    )
    kernels = "auto" if num_steps == 1 else "torch"
    prompts = run(tiny_checkpoint, scheduler, kernels, max(degree, 2), (260, 300, 320, 400))
    assert {prompt.placements[0].cp_degree for prompt in prompts} == {degree}
    assert_exact(tiny_oracle, prompts)


@pytest.mark.parametrize(("num_steps", "lanes"), cases((4, "random"), (1, 4), ("always", "random")))
def test_tokens_are_exact_in_lanes_under_chaos(tiny_checkpoint, tiny_oracle, num_steps, lanes):
    scheduler = SchedulerConfig(
        policy="chaos",
        steps_per_window=num_steps,
        chaos_seed=num_steps,
        chaos_period_windows=1,
        growth_promise="tokens:0",
        lanes=lanes,
    )
    prompts = run(tiny_checkpoint, scheduler, "auto", 4, (1, 64, 130, 300))
    assert_exact(tiny_oracle, prompts)


def run(checkpoint, scheduler, cpu_kernels, num_instances, lengths):
    """Play prompts of these lengths; with lanes, rows must have been in both."""
    config = Config(
        cluster=replace(CLUSTER, num_instances=num_instances),
        scheduler=scheduler,
        data_plane=DataPlaneConfig(cpu_kernels=cpu_kernels),
    )
    # `always` gives rows that come one after the other the same lane: they are to overlap.
    num_tokens = 96 if scheduler.lanes == "always" else 24
    prompts = make_prompts(lengths, num_tokens=num_tokens)
    with DecodeCluster(config, checkpoint) as cluster:
        cluster.run(prompts)
        plans = [plan for each in cluster.plans for plan in each.instances]
    expected = {"off": {False}, "always": {True}, "random": {True, False}}[scheduler.lanes]
    assert {plan.two_lanes for plan in plans} == expected
    used = {change.lane for plan in plans for change in plan.changes.rows}
    assert used == ({0} if scheduler.lanes == "off" else {0, 1})
    return prompts
