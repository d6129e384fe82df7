"""The event log: what was recorded plays again to the same plans; what was changed does not."""

import json
import logging
import resource
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.scheduler.scheduler import Scheduler
from control_plane.shell.event_log import EventLog, LogReader, digest
from harness.hash_clusters import hash_cluster
from harness.services.service_recovery import played_again
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config
from nanocp.values.plan import (
    AbortRequested,
    Arrival,
    ClusterLost,
    Ended,
    Event,
    Fence,
    Finished,
    FinishReason,
    InstanceLost,
    InstancePlan,
    Placement,
    Plan,
    Regrouped,
    Resubmitted,
    RowStart,
    SeatsWanted,
    TargetRun,
    TermEnded,
    TookOver,
    Transfer,
    TransferDone,
    TransferFailed,
    TransferFenced,
    TransferMissed,
    WindowDone,
)


def record(path, config, calls):
    """Play the calls, each (now_us, events), on a new scheduler; returns its plans."""
    scheduler = Scheduler(config.cluster, config.scheduler)
    log = EventLog(path, config.cluster, config.scheduler)
    plans = []
    for now_us, events in calls:
        plans.append(scheduler.plan_window(events, now_us))
        log.write(now_us, events, plans[-1])
    log.close()
    return plans


def new_log(path):
    return EventLog(path, ClusterConfig(), SchedulerConfig())


@pytest.fixture
def played_cluster(tmp_path, monkeypatch):
    """Play a seed of the hash cluster under a policy: (the log of it, the plans)."""

    def play(seed, policy):
        def draw(random, draw_any=hash_cluster.draw_config):
            config = draw_any(random)
            return replace(config, scheduler=replace(config.scheduler, policy=policy))

        monkeypatch.setattr(hash_cluster, "draw_config", draw)
        cluster = hash_cluster.HashCluster(seed)
        path, plans = tmp_path / f"{seed}.jsonl", []
        log = EventLog(path, cluster.config.cluster, cluster.config.scheduler)
        plan_window = cluster.scheduler.plan_window

        def recorded(events, now_us):
            plans.append(plan_window(events, now_us))
            log.write(now_us, events, plans[-1])
            return plans[-1]

        cluster.scheduler.plan_window = recorded
        cluster.play()
        log.close()
        return path, plans

    return play


@pytest.mark.parametrize("policy", ["chaos", "dual_balanced", "cost_aware", "uniform_cp:2"])
@pytest.mark.parametrize("seed", [0, 4, 5])
def test_a_recorded_cluster_plays_again_to_the_same_plans(played_cluster, policy, seed):
    path, plans = played_cluster(seed, policy)
    played = played_again(path)
    assert (played.num_calls, played.difference, played.failure, played.is_truncated) == (
        len(plans), None, "", False,
    )  # fmt: skip
    assert played.num_windows == sum(plan.window is not None for plan in plans) > 0
    assert (played.num_requests, played.policy) == (16, policy)


def test_one_changed_event_is_caught_at_its_call(played_cluster):
    path, _ = played_cluster(1, "chaos")
    lines = path.read_text().splitlines()
    number, call = next(
        (number, json.loads(line))
        for number, line in enumerate(lines)
        if '"Arrival"' in line and '"placements"' in line and '"prompt_len":6' in line
    )
    arrival = next(fields for name, fields in call["events"] if name == "Arrival")
    arrival["row_start"] = "AAAA" + arrival["row_start"][4:]
    arrival["prompt_len"] += 64
    lines[number] = json.dumps(call)
    path.write_text("\n".join(lines) + "\n")
    difference = played_again(path).difference
    assert difference.call == number and difference.now_us == call["now_us"]
    assert "placements" in difference.fields


EVENTS = [
    Arrival(1, 100, 8, b"\x00\xff any bytes"),
    Arrival(2, 1, 1, needs_prefill=False),
    AbortRequested(7),
    TransferDone(1, 0),
    TransferFenced(9, 1),
    TransferFailed(9, "it says \u201cno\u201d\n"),
    TransferMissed(10, 2),
    TookOver(11, ((1, (TargetRun(0, 2, 1, 3),)),)),
    WindowDone(0, 0, (Finished(2, 1, FinishReason.LENGTH),), 1234, 56),
    InstanceLost(1),
    TermEnded(),
    Regrouped(2),
    Regrouped(3, (0, 2), keeps_rows=True),
    SeatsWanted((0, 1)),
    Resubmitted(),
    ClusterLost("no spare is left"),
]


def test_every_event_comes_back_as_it_was(tmp_path):
    log = new_log(tmp_path / "log")
    log.write(1 << 62, EVENTS, Plan(None))
    log.close()
    with (tmp_path / "log").open("rb") as lines:
        reader = LogReader(lines, "log")
        (call,) = reader
    assert (reader.header.cluster, reader.header.scheduler) == (ClusterConfig(), SchedulerConfig())
    assert ([event for _, event in call.events], call.now_us, call.plan) == (EVENTS, 1 << 62, {})
    assert {type(event) for event in EVENTS} == set(get_args(Event))


PLAN = Plan(
    3,
    (InstancePlan(0, 3, 3, 1, 5, 6, starts=(RowStart(1, 0, 1, b"\x00"),)),),
    (Transfer(1, 1, 1, ()),),
    (Fence(1, (0,)),),
    (Placement(*range(len(Placement.__annotations__))),),
    (Ended(1, FinishReason.FAILED, "lost"),),
)
# The digest knows no field by name: of those that the story above does not need, any value will do.
PLAN = replace(
    PLAN,
    **{name: ((1, 2),) for name in Plan.__annotations__ if getattr(PLAN, name) == ()},
    is_settled=True,
)


@pytest.mark.parametrize("name", list(Plan.__annotations__))
def test_the_digest_sees_every_field_of_a_plan(name):
    assert set(digest(PLAN)) == set(Plan.__annotations__) and digest(Plan(None)) == {}
    nothing = getattr(Plan(None), name)
    assert digest(replace(PLAN, **{name: nothing})).keys() == digest(PLAN).keys() - {name}


@given(st.integers(0, 2**64 - 1), st.binary(max_size=4), st.text(max_size=4))
def test_the_digest_sees_values_inside(number, data, text):
    instance = InstancePlan(0, 3, 3, 1, number, 6, starts=(RowStart(1, 0, 1, data),))
    changed = replace(PLAN, instances=(instance,), ended=(replace(PLAN.ended[0], message=text),))
    same = [name for name, value in digest(changed).items() if digest(PLAN)[name] == value]
    assert ("instances" in same, "ended" in same) == (instance == PLAN.instances[0], text == "lost")


# --- damage


@pytest.fixture
def short_log(tmp_path):
    path = tmp_path / "short.jsonl"
    calls = [(10 * number, [Arrival(number, 100, 8)]) for number in range(1, 6)]
    record(path, Config(), calls)
    return path


def test_a_plan_without_drafts_has_the_digest_that_it_had_before_there_were_any():
    """So older logs play again."""
    scheduler = Scheduler(ClusterConfig(num_instances=2), SchedulerConfig())
    assert digest(scheduler.plan_window([Arrival(1, 100, 10, needs_prefill=False)], 0)) == {
        "window": 0,
        "instances": "81d34c023eba0e37de7ef91f9ade859f",
        "placements": "7c9baf750270799bdc8748f96d4893bb",
    }


@given(data=st.data())
def test_a_log_cut_off_anywhere_plays_up_to_there(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("logs") / "cut.jsonl"
    record(path, Config(), [(number, [Arrival(number, 100, 8)]) for number in range(1, 6)])
    whole = path.read_bytes()
    header = whole.index(b"\n") + 1
    length = data.draw(st.integers(header, len(whole)))
    path.write_bytes(whole[:length])
    played = played_again(path)
    assert (played.difference, played.num_calls) == (None, whole[header:length].count(b"\n"))
    assert played.is_truncated == (whole[length - 1 : length] != b"\n")


@pytest.mark.parametrize(("old", "new", "named"), [
    ("{", "", "record 3: Invalid JSON"),
    ("now_us", "now_ms", "record 3: now_us: Field required"),
    ('"Arrival"', '"Arival"', "record 3: events.0: "),
    ('"prompt_len":100', '"prompt_len":"1"',
     "record 3: events.0.Arrival.1.prompt_len: Input should be a valid int"),
    ('"max_tokens":8', '"max_tokens":8,"x":1',
     "record 3: events.0.Arrival.1.x: Unexpected keyword argument"),
    ('[["Arrival"', '[7,["Arrival"', "record 3: events.0: "),
])  # fmt: skip
def test_a_damaged_record_is_named(short_log, old, new, named):
    lines = short_log.read_text().splitlines(keepends=True)
    assert old in lines[2]
    lines[2] = lines[2].replace(old, new, 1)
    short_log.write_text("".join(lines))
    with pytest.raises(ValueError, match=r"^short\.jsonl, ") as caught:
        played_again(short_log)
    assert named in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("header", "named"), [
    ("", "is no event log"),
    ("[1]\n", "is no event log"),
    ('{"now_us":1}\n', "is no event log"),
    ('{"nanocp_event_log":2}\n', "of version 2; it must be of version 1"),
    ('{"nanocp_event_log":1,"cluster":{}}\n', "record 1: scheduler: Field required"),
    ('{"nanocp_event_log":1,"cluster":{"num_frame":1},"scheduler":{}}\n',
     "record 1: cluster.num_frame: "),
    ('{"nanocp_event_log":1,"cluster":{},"scheduler":{"policy":"dual"}}\n',
     "nearest: dual_balanced"),
])  # fmt: skip
def test_what_is_no_log_is_named(tmp_path, header, named):
    (tmp_path / "log").write_text(header)
    with pytest.raises(ValueError) as caught:
        played_again(tmp_path / "log")
    assert named in str(caught.value)


# --- when things go wrong


def test_a_scheduler_that_fails_leaves_its_last_call_in_the_log(tmp_path):
    config = Config()
    path = tmp_path / "log"
    log, scheduler = new_log(path), Scheduler(config.cluster, config.scheduler)
    log.write(5, [], scheduler.plan_window([], 5))
    with pytest.raises(AssertionError):
        scheduler.plan_window([], 4)
    log.write(4, [], None)
    # Not closed: what matters is on disk before the process dies.
    played = played_again(path)
    assert played.difference is None and played.num_calls == 2
    assert "time went back from 5 to 4 us" in played.failure
    path.write_text(path.read_text().replace('"plan":null', '"plan":{}'))
    assert "time went back" in played_again(path).difference.error


def test_a_lost_instance_is_on_disk_at_once(tmp_path):
    log = new_log(tmp_path / "log")
    log.write(1, [], Plan(None))
    assert len((tmp_path / "log").read_text().splitlines()) == 1
    log.write(2, [InstanceLost(0)], Plan(None))
    assert len((tmp_path / "log").read_text().splitlines()) == 3


def test_a_full_disk_ends_the_log_with_one_warning_and_nothing_else(tmp_path, caplog):
    scheduler = Scheduler(ClusterConfig(), SchedulerConfig())
    log = new_log(tmp_path / "log")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, limits[1]))
    try:
        with caplog.at_level(logging.WARNING):
            for number in range(4000):
                events = [AbortRequested(number)] * 3
                log.write(number, events, scheduler.plan_window(events, number))
            log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (warning,) = caplog.records
    assert f"the event log {tmp_path / 'log'} ends here: " in warning.getMessage()
    played = played_again(tmp_path / "log")
    assert played.difference is None and played.num_calls > 100 and played.is_truncated
    # What was in the buffer is not counted.
    assert 3000 < played.num_calls + log.num_missing <= 4000
