"""The simulation: the service's scheduler unchanged; its plans are mirrored exactly."""

from dataclasses import replace
from itertools import islice

import pytest

from control_plane.scheduler.invariants import check
from control_plane.scheduler.state.request import State
from harness.hash_clusters.followed_tables import follow
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.costs.cost import CostModel
from nanocp.simulator.loads.workload import Workload
from nanocp.simulator.loads.workload_request import WorkloadRequest
from nanocp.simulator.outcome import Recorder, Run, Slo, percentile
from nanocp.simulator.simulation import Mechanisms, Simulation, make_simulation
from nanocp.simulator.trial import Trial
from nanocp.values.plan import Placement, Plan
from nanocp.values.table import NUM_LANES, InstanceTable

H200 = load_cluster_file("h200x32-deepseek-v3")
FEW_EXPERTS = replace(H200.model, num_experts=32)
SMALL = replace(
    H200,
    model=FEW_EXPERTS,
    cluster=ClusterConfig(
        num_instances=8,
        instances_per_node=4,
        num_frames=400,
        max_model_len=50_000,
        bounds=BoundsConfig(
            max_rows=64, max_links=64, max_attention_rows=512, max_partials=512, max_hand_offs=8
        ),
    ),
)
POLICIES = [
    "dual_balanced", "dual_balanced_any_node", "least_batch", "least_cache", "uniform_cp:2",
    "uniform_cp:4", "fixed_degree:3", "chaos", "fluid",
]  # fmt: skip


LENS = [512 * turn + 100 for turn in range(1, 6)]
TURNS = [
    WorkloadRequest(turn * 2_000_000, length, 20, 20, tuple(range(talk, talk + turn + 2)))
    for turn, length in enumerate(LENS)
    for talk in range(0, 600, 100)
]
"""Turns of six conversations, which grow by a block each."""
ALL_HITS = sum((length // 64 - 8) * 64 for length in LENS[1:]) / sum(LENS)
"""Share of the prompts' tokens that an earlier turn has written in full pages."""


def test_requests_that_begin_alike_share_as_much_as_their_hash_ids_say():
    """All that was there could be hit, and is."""
    rates = {}
    for prefix_sharing in (True, False):
        simulation = make_simulation(
            SMALL, "fitted", "cost_aware", Run(0, 60_000_000),
            Mechanisms(prefix_sharing=prefix_sharing),
        )  # fmt: skip
        outcome = simulation.run(iter(TURNS))
        assert outcome.num_judged == 30 and outcome.host_hit_rate == 0
        rates[prefix_sharing] = outcome.prefix_hit_rate
        check(simulation.scheduler)
    assert rates == {True: ALL_HITS, False: 0.0}


def test_conversations_find_in_memory_what_has_left_the_frames():
    """With frames for a part of them the next turn finds less; with slots, all of it."""
    few = replace(SMALL, cluster=replace(SMALL.cluster, num_frames=20))
    found = []
    for host_pages in (0, 1000):
        simulation = make_simulation(
            few, "fitted", "cost_aware", Run(0, 60_000_000), Mechanisms(host_pages=host_pages)
        )
        outcome = simulation.run(iter(TURNS))
        assert outcome.num_judged == 30
        found.append((outcome.prefix_hit_rate, outcome.host_hit_rate))
        check(simulation.scheduler)
    assert found[0][0] < ALL_HITS and found[0][1] == 0
    assert sum(found[1]) == pytest.approx(ALL_HITS) and found[1][1] > 0.1


def requests(num, rate=400.0, seed=1, over_run=0):
    """A finite workload of short requests, one in ten of them long for the small cluster."""
    drawn = islice(Workload("issue-0", rate, seed).requests(20_000), num)
    for index, request in enumerate(drawn):
        output_len = 1 + request.output_len // 8
        prompt_len = 10_000 if index % 10 == 9 else request.prompt_len
        yield WorkloadRequest(request.arrival_us, prompt_len, output_len, output_len + over_run)


class Checked(Simulation):
    """Compares what is kept incrementally with the scheduler's tables in one of twenty windows."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._tables = [InstanceTable(instance, 8) for instance in range(8)]

    def _send_window(self, window, plans, now_us):
        super()._send_window(window, plans, now_us)
        tables = self._tables
        follow(tables, plans)
        if window % 20:
            return
        check(self.scheduler, tables)
        assert self._decided._rows == [
            table.lanes[lane].rows for lane in range(NUM_LANES) for table in tables
        ]
        rows = {request: i for i, table in enumerate(tables) for request in table.rows}
        assert self._decided.instance_of == rows
        sent = [[len(slots) for slots in table.q_route] for table in tables]
        received = [[len(slots) for slots in table.res_route] for table in tables]
        between = [[i // 4 != j // 4 for j in range(8)] for i in range(8)]
        loads = self._decided.loads(self.scheduler.requests.loads())
        assert loads.links == [max(sum(a), sum(b)) for a, b in zip(sent, received, strict=True)]
        assert loads.links_between_nodes == [
            max(
                sum(n for n, far in zip(counts, between[i], strict=True) if far)
                for counts in (sent[i], received[i])
            )
            for i in range(8)
        ]
        assert loads.attention_rows == [
            len(table.rows) + sum(received[i]) for i, table in enumerate(tables)
        ]
        step = self.scheduler._state.step
        # The KV of a row that was parked on the way counts as if it were read.
        placed = self.scheduler._state.requests.values()
        resident = [
            r for r in placed if r.request_id in rows or (r.state is State.PARKED and r.is_started)
        ]
        assert sum(loads.kv_tokens) == sum(
            r.position_at(step) + (r.request_id in rows) for r in resident
        )


def play(policy, given, steps_per_window=1, file=SMALL, **knobs):
    config = SchedulerConfig(
        policy=policy, steps_per_window=steps_per_window, cp_degree_buckets=((5000, 1),), **knobs
    )
    simulation = Checked(file, config, CostModel(file, "peak"), Recorder(Run(0, 10**12)))
    outcome = simulation.run(iter(given))
    return simulation, outcome


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "fluid"])
def test_every_request_ends_once_and_no_frame_is_left(policy):
    simulation, outcome = play(policy, requests(60))
    assert outcome.num_judged == 60 and outcome.num_refused == 0
    assert all(
        load.frames_free == SMALL.cluster.num_frames
        for load in simulation.scheduler.requests.loads()
    )
    assert not simulation._requests and not simulation._num_tokens and not simulation._joined_step


@pytest.mark.parametrize("steps_per_window", [1, 4])
def test_rows_that_stop_before_max_tokens_end_too(steps_per_window):
    simulation, outcome = play("dual_balanced", requests(60, over_run=70), steps_per_window)
    assert outcome.num_judged == 60
    assert all(
        load.frames_free == SMALL.cluster.num_frames
        for load in simulation.scheduler.requests.loads()
    )


@pytest.mark.parametrize("over_run", [0, 70])
def test_rows_that_park_or_are_preempted_and_come_back_get_every_token(over_run, monkeypatch):
    parked, preempted = [], []
    simulation_carries_out = Checked._carry_out

    def carry_out(self, plan, now_us):
        preempted.extend(plan.preempted)
        simulation_carries_out(self, plan, now_us)

    monkeypatch.setattr(Checked, "_carry_out", carry_out)
    simulation_leaves = Checked._row_leaves

    def row_leaves(self, request_id, window):
        simulation_leaves(self, request_id, window)
        if request_id in self._requests and request_id not in self._joined_step:
            parked.append(request_id)

    monkeypatch.setattr(Checked, "_row_leaves", row_leaves)
    tight = replace(SMALL, cluster=replace(SMALL.cluster, num_frames=7))
    given = (WorkloadRequest(i, 128, 200 + i, 200 + i + over_run) for i in range(24))
    simulation, outcome = play(
        "dual_balanced", given, steps_per_window=4, file=tight, cp_degree_max=1,
        growth_promise="tokens:0",
    )  # fmt: skip
    assert parked and preempted, "the cluster was too large for this test"
    assert outcome.num_judged == 24 and outcome.num_refused == 0
    assert not simulation._requests and not simulation._joined_step and not simulation._num_tokens


def test_a_promise_of_what_others_needed_fills_memory_that_max_tokens_would_keep_empty():
    """Clients allow 2,000 tokens and need about 100; memory is short."""
    tight = replace(SMALL, cluster=replace(SMALL.cluster, num_frames=48))
    outcomes = {}
    for growth_promise in ("max_tokens", "percentile:90", "percentile:50"):
        given = (WorkloadRequest(10_000 * i, 256, 50 + 37 * i % 100, 2000) for i in range(300))
        _, outcomes[growth_promise] = play(
            "dual_balanced", given, file=tight, growth_promise=growth_promise
        )
        assert (
            outcomes[growth_promise].num_judged == 300 and outcomes[growth_promise].num_refused == 0
        )
    most, some = outcomes["max_tokens"], outcomes["percentile:90"]
    assert some.num_rows_mean > 2 * most.num_rows_mean
    assert some.queueing_ms_p99 < most.queueing_ms_p99 / 2
    assert outcomes["percentile:50"].num_rows_mean >= some.num_rows_mean / 1.1, (
        "rows that outgrow it park or go on"
    )


@pytest.mark.parametrize("steps_per_window", [1, 4])
def test_a_lone_request_takes_its_steps_its_transfer_and_nothing_else(steps_per_window):
    simulation = make_simulation(
        H200, "peak", "dual_balanced", Run(0, 10**12), Mechanisms(steps_per_window=steps_per_window)
    )
    outcome = simulation.run(iter([WorkloadRequest(1000, 641, 10, 10)]))
    transfer_us = 1 + round(640 * 70272 / 50e3)
    step_us = outcome.step_ms_mean * 1e3
    assert outcome.normalized_ms_p50 * 1e3 * 10 == pytest.approx(transfer_us + 10 * step_us, abs=10)
    assert outcome.ttft_ms_p50 * 1e3 == pytest.approx(transfer_us + step_us, abs=10)
    assert outcome.tpot_ms_p50 * 1e3 == pytest.approx(step_us, abs=10)
    assert outcome.queueing_ms_p99 == 0


def test_prefill_that_sends_as_it_computes_leaves_a_share_of_the_transfer():
    file = replace(H200, ingest_tail_share=0.25)
    simulation = make_simulation(file, "peak", "dual_balanced", Run(0, 10**12))
    outcome = simulation.run(iter([WorkloadRequest(1000, 6401, 10, 10)]))
    transfer_us = 1 + round(0.25 * 6400 * 70272 / 50e3)
    step_us = outcome.step_ms_mean * 1e3
    assert outcome.ttft_ms_p50 * 1e3 == pytest.approx(transfer_us + step_us, abs=10)


def test_transfers_to_one_instance_take_turns():
    one = replace(
        SMALL,
        model=replace(FEW_EXPERTS, num_experts=4),
        cluster=replace(SMALL.cluster, num_instances=1, instances_per_node=1),
        cp_degrees=(1,),
    )
    simulation = make_simulation(one, "peak", "dual_balanced", Run(0, 10**12))
    lengths = (10_001, 2_501)
    outcome = simulation.run(iter([WorkloadRequest(0, length, 1, 1) for length in lengths]))
    transfer_us = 10_000 * 70272 / 50e3
    # Both run for one token: the short one after twice its quarter, the long one after both.
    assert outcome.ttft_ms_p50 * 1e3 == pytest.approx(
        0.5 * transfer_us + outcome.step_ms_mean * 1e3, rel=0.05
    )
    assert outcome.ttft_ms_p99 * 1e3 == pytest.approx(
        1.25 * transfer_us + outcome.step_ms_mean * 1e3, rel=0.05
    )
    assert outcome.num_judged == 2 and outcome.tpot_ms_p99 == 0, "one token has no later one"


@pytest.mark.parametrize("policy", POLICIES)
def test_same_seed_same_outcome(policy):
    def outcome(seed):
        run = Run(200_000, 400_000)
        simulation = make_simulation(SMALL, "peak", policy, run)
        return replace(
            simulation.run(Workload("issue-0", 300, seed).requests(20_000)),
            plan_ms_mean=0,
            plan_share=0,
        )

    assert outcome(1) == outcome(1)
    assert outcome(1) != outcome(2)


def test_windows_run_in_two_lanes_where_the_cost_model_says_that_they_pay(monkeypatch):
    """The scheduler decides by the predicted table; the fluid bound has one lane."""
    table = ((4, 64, 110, "behind_first"), (64, 64, 90, "behind_first"))
    monkeypatch.setattr(CostModel, "lane_table", lambda *_: table)
    outcomes = {}
    for policy, lanes in (("dual_balanced", False), ("dual_balanced", True), ("fluid", True)):
        simulation = make_simulation(
            SMALL, "fitted", policy, Run(0, 800_000), Mechanisms(lanes=lanes, wire_form="latent")
        )
        outcomes[policy, lanes] = simulation.run(Workload("issue-0", 600, 1).requests(20_000))
    one, two, fluid = outcomes.values()
    assert one.two_lanes_share == fluid.two_lanes_share == 0
    assert 0 < two.two_lanes_share < 1, "windows with few rows run in one lane"
    assert two.layer_us.dispatch_combine_us < one.layer_us.dispatch_combine_us


def test_the_fluid_bound_is_faster_than_every_policy_under_the_same_load():
    steps = {}
    for policy in ("fluid", "dual_balanced", "least_batch", "uniform_cp:8"):
        simulation = make_simulation(H200, "peak", policy, Run(2_000_000, 2_000_000))
        steps[policy] = simulation.run(
            Workload("issue-5", 60, seed=1).requests(1 << 20)
        ).step_ms_mean
    assert min(steps.values()) == steps["fluid"]
    assert steps["dual_balanced"] < steps["least_batch"]


def test_a_run_stops_when_it_is_hopeless_and_counts_what_is_late_already():
    run = Run(0, 100_000_000, Slo(tpot_us=1), max_misses=3)
    outcome = make_simulation(SMALL, "peak", "dual_balanced", run).run(requests(1000))
    assert outcome.is_hopeless and outcome.attainment == 0 and outcome.num_missed < 1000
    late = make_simulation(SMALL, "peak", "dual_balanced", Run(0, 1_000_000)).run(iter([
        WorkloadRequest(0, 10, 10, 10),
        WorkloadRequest(0, 10, 40_000, 40_000),
        WorkloadRequest(1, 60_000, 1, 1),
    ]))  # fmt: skip
    assert (late.num_judged, late.num_refused) == (2, 1), (
        "ended, refused as larger than the model; the third goes on"
    )


def recorded(*requests, slo, ends, until=10**7):
    """An outcome of requests that get their first and last token when `ends` says."""
    recorder = Recorder(Run(0, 10**7, slo))
    for request, (first_us, last_us) in zip(requests, ends, strict=True):
        request_id = recorder.arrived(request)
        recorder.planned(0, Plan(None, placements=(Placement(request_id, 0, 1, ((0, 0),)),)))
        if first_us is not None:
            recorder.first_token(request_id, first_us)
        if last_us is not None:
            recorder.finished(request_id, last_us)
    recorder.at(until)
    return recorder.outcome()


SLO = Slo(tpot_us=100, ttft_us=1000)


@pytest.mark.parametrize(("output_len", "first_us", "last_us", "is_met"), [
    (11, 1000, 2000, True),
    (11, 1001, 2001, False),
    (11, 1000, 2001, False),
    (11, 10, 1010, True),
    (1, 1000, 1000, True),
    (1, 1001, 1001, False),
])  # fmt: skip
def test_a_request_must_meet_both_times(output_len, first_us, last_us, is_met):
    outcome = recorded(
        WorkloadRequest(0, 10, output_len, output_len), slo=SLO, ends=[(first_us, last_us)]
    )
    assert (outcome.num_judged, outcome.num_missed) == (1, 0 if is_met else 1)
    assert outcome.ttft_ms_p99 == first_us / 1e3
    assert outcome.normalized_ms_p99 == pytest.approx(last_us / output_len / 1e3)


@pytest.mark.parametrize(
    ("first_us", "until", "judged"),
    [(None, 1000, 0), (None, 1001, 1), (900, 1900, 0), (900, 1901, 1), (1001, 1002, 1)],
)
def test_a_request_that_is_still_there_is_judged_once_it_is_late(first_us, until, judged):
    request = WorkloadRequest(0, 10, 11, 11)
    outcome = recorded(request, slo=SLO, ends=[(first_us, None)], until=until)
    assert (outcome.num_judged, outcome.num_missed) == (judged, judged)
    assert outcome.num_not_judged == 1 - judged


def test_a_request_that_ran_before_the_run_is_counted_and_not_judged():
    running = WorkloadRequest(0, 10, 11, 11, is_running=True)
    outcome = recorded(running, running, slo=SLO, ends=[(10, 10_000), (10, None)])
    assert (outcome.num_judged, outcome.num_not_judged) == (0, 2)


def test_a_cluster_that_fills_up_is_said_to_drift_and_sustains_nothing():
    outcomes = {}
    for rate in (20.0, 400.0):
        trial = Trial(
            SMALL, "dual_balanced", Workload("issue-0", rate, 1), warm_up_us=0, begins_empty=True,
            measure_us=8_000_000, slo=Slo(tpot_us=10**8, ttft_us=10**9),
        )  # fmt: skip
        outcomes[rate] = trial.filled().play()
    assert outcomes[400.0].is_drifting and outcomes[400.0].drift > 0.5
    assert outcomes[400.0].attainment == 1 and not outcomes[400.0].is_sustained


def test_more_than_an_instance_holds_spans_instances_under_a_request_level_policy():
    outcome = make_simulation(SMALL, "peak", "least_batch", Run(0, 10**12)).run(
        iter([WorkloadRequest(0, 64 * 700, 5, 5)])
    )
    assert outcome.num_judged == 1 and outcome.cp_share_max == 1


def test_the_share_of_requests_with_cp_is_a_share():
    shares = {}
    for policy in ("least_batch", "dual_balanced", "fixed_degree:3"):
        simulation = make_simulation(SMALL, "peak", policy, Run(0, 10**12))
        outcome = simulation.run(WorkloadRequest(i, 64 * 10, 50, 50) for i in range(40))
        shares[policy] = outcome.cp_share, outcome.cp_share_max
    assert shares == {"least_batch": (0, 0), "dual_balanced": (0, 0), "fixed_degree:3": (1, 1)}


def test_a_run_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="must be positive"):
        Run(0, 0)
    with pytest.raises(ValueError, match="nearest: least_cache"):
        make_simulation(SMALL, "peak", "least_cash", Run(0, 1))


def test_percentiles_are_by_nearest_rank():
    assert percentile([], 99) == 0
    assert percentile([5.0], 99) == 5
    assert percentile(list(range(1, 101)), 99) == 99
    assert percentile(list(range(1, 101)), 50) == 50
