"""The scheduler as a pure function: equal inputs give equal bytes, deltas sum to the table."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.scheduler.invariants import check
from control_plane.scheduler.scheduler import Scheduler
from harness.hash_clusters.followed_tables import FollowedScheduler, follow
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import (
    AbortRequested,
    Arrival,
    Finished,
    FinishReason,
    Plan,
    TransferDone,
    TransferFailed,
    TransferFenced,
    WindowDone,
)
from nanocp.values.table import InstanceTable
from nanocp.wire.members import TO_INSTANCE

BOUNDS = BoundsConfig(
    max_rows=4, max_links=2, max_attention_rows=6, max_partials=4, max_hand_offs=2
)
CLUSTER = ClusterConfig(
    num_instances=3, instances_per_node=2, num_frames=8, max_model_len=1024, bounds=BOUNDS
)

steps = st.lists(
    st.one_of(st.tuples(st.just("arrive"), st.integers(1, 500), st.integers(1, 150)),
              st.tuples(st.just("window"), st.integers(0, 4), st.just(0)),
              st.tuples(st.just("answer"), st.integers(0, 99), st.integers(0, 9)),
              st.tuples(st.just("abort"), st.integers(0, 99), st.just(0))),
    min_size=10, max_size=80,
)  # fmt: skip
configs = st.builds(
    lambda policy, **knobs: SchedulerConfig(
        policy=policy, ttft_targets=((0, 1),) if policy == "cost_aware" else (), **knobs
    ),
    policy=st.sampled_from(["chaos", "cost_aware", "dual_balanced", "fixed_degree:2"]),
    steps_per_window=st.sampled_from([1, 4, 70]),
    growth_promise=st.sampled_from(["max_tokens", "tokens:0", "tokens:40"]),
    cp_degree_buckets=st.just(((100, 1), (200, 2))),
    chaos_seed=st.integers(0, 9),
    chaos_period_windows=st.just(1),
)


class World:
    """Answers a scheduler's plans as drawn."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.scheduler = Scheduler(CLUSTER, config)
        self.tables = [
            InstanceTable(instance, CLUSTER.num_instances)
            for instance in range(CLUSTER.num_instances)
        ]
        self.plans: list[Plan] = []
        self.num_arrived = 0
        self.num_reported = 0
        self.transfers: list[tuple[int, int]] = []
        self.fenced: list[tuple[int, int]] = []
        self.arrivals: dict[int, Arrival] = {}
        self.away: list[Arrival] = []
        self.was_preempted: set[int] = set()

    def step(self, name: str, a: int, b: int) -> None:
        """One call of the scheduler."""
        events: list = []
        if name == "arrive":
            self.num_arrived += 1
            arrival = Arrival(self.num_arrived, a, b, needs_prefill=a % 3 > 0, priority=b % 2)
            self.arrivals[self.num_arrived] = arrival
            events = [arrival]
        elif name == "abort":
            events = [AbortRequested(a)]
        elif name == "answer":
            events = self._answers(a, b)
        elif self.num_reported < self._num_issued():
            rows = [table.rows for table in self.tables]
            finished = [
                tuple(Finished(r, 1, FinishReason.STOP) for r in ids if r % 5 == a) for ids in rows
            ]
            events = [WindowDone(i, self.num_reported, ended) for i, ended in enumerate(finished)]
            self.num_reported += 1
        self._take(self.scheduler.plan_window(events, len(self.plans)))

    def _answers(self, a: int, b: int) -> list:
        if self.away:
            return [self.away.pop(a % len(self.away))]
        if self.fenced:
            return [TransferFenced(*self.fenced.pop(a % len(self.fenced)))]
        if not self.transfers:
            return []
        ticket, instance = self.transfers.pop(a % len(self.transfers))
        return [TransferFailed(ticket, "gave up")] if b == 0 else [TransferDone(ticket, instance)]

    def _num_issued(self) -> int:
        return sum(plan.window is not None for plan in self.plans)

    def _take(self, plan: Plan) -> None:
        follow(self.tables, plan.instances)
        check(self.scheduler, self.tables)
        self.plans.append(plan)
        for transfer in plan.transfers:
            self.transfers += [(transfer.ticket, i) for i in transfer.receivers]
            pages = list(transfer.instances())
            assert pages == list(range(pages[0], -(-transfer.num_tokens // 64))), (
                "a page for each 64 tokens"
            )
            assert pages[0] == 0 or transfer.source is not None
            assert transfer.source not in transfer.receivers
        for request_id, num_tokens in plan.preempted:
            assert request_id not in self.was_preempted, (
                "once is enough: then it is promised all frames"
            )
            self.was_preempted.add(request_id)
            first = self.arrivals[request_id]
            max_tokens = first.max_tokens - (num_tokens - first.prompt_len)
            self.away.append(
                replace(first, prompt_len=num_tokens, max_tokens=max_tokens, resumes=True)
            )
        for fence in plan.fences:
            self.fenced += [(fence.ticket, i) for i in fence.instances]
            self.transfers = [pair for pair in self.transfers if pair[0] != fence.ticket]


def as_bytes(plan: Plan) -> bytes:
    wire = b"".join(map(TO_INSTANCE.encode, plan.instances))
    rest = (plan.window, plan.transfers, plan.fences, plan.placements, plan.ended, plan.preempted)
    return wire + repr(rest).encode()


@given(configs, steps)
@settings(max_examples=100)
def test_equal_inputs_give_equal_bytes_and_deltas_sum_to_the_full_table(config, steps):
    first, second = World(config), World(config)
    for step in steps:
        first.step(*step)
        second.step(*step)
        assert as_bytes(first.plans[-1]) == as_bytes(second.plans[-1])
    for table in first.tables:
        rebuilt = InstanceTable(table.instance, CLUSTER.num_instances)
        rebuilt.apply(table.full_changes())
        for name in ("digest", "rows", "q_route", "res_route", "pages", "holders"):
            assert getattr(rebuilt, name) == getattr(table, name)


@given(configs, steps)
@settings(max_examples=50)
def test_everything_ends_and_every_frame_comes_back(config, steps):
    world = World(config)
    for step in steps:
        world.step(*step)
    for _ in range(4000):
        state = (world.num_reported, len(world.transfers), len(world.fenced), len(world.away))
        for step in (("answer", 0, 1), ("window", 9, 0)):
            world.step(*step)
        if state == (world.num_reported, len(world.transfers), len(world.fenced), len(world.away)):
            break
    assert (world.scheduler.requests.num_waiting, world.scheduler.requests.num_running) == (0, 0)
    loads = world.scheduler.requests.loads()
    assert all(load.frames_free == CLUSTER.num_frames for load in loads)


def test_two_windows_are_in_flight_and_never_more():
    scheduler = FollowedScheduler(CLUSTER)
    assert scheduler.arrive(10, 50).window == 0
    assert [scheduler.plan().window for _ in range(2)] == [1, None]
    plan = scheduler.plan(WindowDone(0, 0), WindowDone(1, 0))
    assert plan.window is None, "instance 2 has not reported window 0"
    plan = scheduler.plan(WindowDone(2, 0))
    assert (plan.window, len(plan.instances)) == (2, CLUSTER.num_instances)


def test_a_stopped_row_is_in_the_window_that_was_already_sent_and_in_no_later_one():
    scheduler = FollowedScheduler(CLUSTER)
    scheduler.arrive(10, 50)
    scheduler.plan()
    stopped = WindowDone(0, 0, (Finished(1, 1, FinishReason.STOP),))
    plan = scheduler.plan(stopped, WindowDone(1, 0), WindowDone(2, 0))
    assert plan.window is None and plan.ended == (), (
        "its last token tells; an idle cluster has no windows"
    )
    assert scheduler.quarantined()[0] == 1, "window 1 still contains it"
    scheduler.plan(WindowDone(0, 1))
    assert scheduler.quarantined()[0] == 0


def test_a_row_is_in_exactly_as_many_steps_as_it_may_generate_tokens():
    scheduler = FollowedScheduler(CLUSTER)
    plans = [scheduler.arrive(10, 3), scheduler.plan(), *(scheduler.step() for _ in range(3))]
    assert [plan.window for plan in plans] == [0, 1, 2, None, None]


def test_a_late_word_about_an_ended_request_changes_nothing():
    scheduler = FollowedScheduler(CLUSTER)
    (transfer,) = scheduler.arrive(100, 5, needs_prefill=True).transfers
    scheduler.arrive(20, 50)
    scheduler.plan(AbortRequested(1), AbortRequested(2))
    assert scheduler.scheduler.requests.num_running == 0
    late = [
        TransferDone(transfer.ticket, 0),
        TransferFailed(transfer.ticket, "late"),
        TransferFenced(77, 0),
    ]
    plan = scheduler.plan(*late, WindowDone(1, 0, (Finished(2, 1, FinishReason.STOP),)))
    assert plan.ended == () and plan.fences == ()


def test_a_fence_is_answered_before_a_frame_is_free():
    """A receiver that has not answered might still copy a page of the old ticket over a new one.

    (protocol.md, quarantine.)
    """
    cluster = ClusterConfig(num_instances=2, num_frames=4)
    scheduler = FollowedScheduler(cluster, policy="fixed_degree:2")
    plan = scheduler.plan(Arrival(1, 500, 10), Arrival(2, 500, 10))
    assert len(plan.transfers) == 1 and scheduler.scheduler.requests.num_waiting == 1
    ticket = plan.transfers[0].ticket
    plan = scheduler.plan(TransferDone(ticket, 0), AbortRequested(1))
    assert plan.fences[0].instances == (1,), "instance 0 has all its pages and needs no fence"
    assert plan.transfers == () and scheduler.quarantined() == [4, 4]
    plan = scheduler.plan(TransferFenced(ticket, 1))
    assert [transfer.request_id for transfer in plan.transfers] == [2]
