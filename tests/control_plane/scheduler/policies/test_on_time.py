"""A TTFT target: late prompts go where their KV is there early; all others go as without one."""

from dataclasses import replace
from random import Random

import pytest

from control_plane.scheduler.explanation import Explainer
from harness.hash_clusters.followed_tables import FollowedScheduler
from nanocp.config.cluster import ClusterConfig
from nanocp.config.cost import CostConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import AbortRequested, Arrival, TransferDone

TWO_NODES = ClusterConfig(
    num_instances=8, instances_per_node=4, num_frames=512, max_model_len=131_072
)
ONE_NODE = replace(TWO_NODES, num_instances=4)
COSTS = CostConfig(
    exchange_tokens=2_000,
    exchange_tokens_between_nodes=0,
    link_tokens=0,
    link_tokens_between_nodes=0,
    dispatch_tokens_per_row=20_000,
    ingest_ns_per_token=1_000_000,
)
"""A token takes a millisecond to arrive, links cost something, and rows by far the most."""


class Cluster(FollowedScheduler):
    """A scheduler, and what its instances confirm."""

    def __init__(self, targets, cluster=ONE_NODE, costs=COSTS, explainer=None):
        super().__init__(
            cluster, explainer, policy="cost_aware", costs=costs, cp_degree_buckets=((5000, 1),),
            ttft_targets=targets,
        )  # fmt: skip
        self.under_way = {}
        """Ticket -> receivers that have not confirmed."""

    def plan(self, *events):
        plan = super().plan(*events)
        self.under_way |= {ticket.ticket: list(ticket.receivers) for ticket in plan.transfers}
        return plan

    def place(self, prompt_len, max_tokens=8, needs_prefill=True, **fields):
        self.arrive(prompt_len, max_tokens, needs_prefill=needs_prefill, **fields)
        return self.placement(self.num_requests)

    def arriving(self):
        """Tokens that are under way to each instance."""
        return self.scheduler._state.loads.arriving_tokens

    def confirm(self, ticket):
        for instance in self.under_way.pop(ticket):
            self.plan(TransferDone(ticket, instance))


def test_a_prompt_is_spread_over_as_few_nics_as_are_there_in_time():
    assert Cluster(()).place(1000).cp_degree == 1
    # 16 pages are 1,024 tokens: 512 ms through two NICs, 384 through three, 256 through four.
    for target_ms, degree in ((1100, 1), (600, 2), (400, 3), (300, 4), (1, 4)):
        assert Cluster(((0, target_ms),)).place(1000).cp_degree == degree, target_ms


def test_a_short_prompt_goes_past_a_nic_that_is_busy_and_comes_back_once_it_is_not():
    cluster = Cluster(((0, 500),))
    for _ in range(8):
        cluster.place(100, needs_prefill=False)
    # All have two rows. This one waits for its KV, and counts as a row.
    first = cluster.place(440).moe_binding
    assert cluster.arriving()[first] == 439
    others = [cluster.place(400).moe_binding for _ in range(3)]
    assert sorted([first, *others]) == [0, 1, 2, 3], "rows decide while all are in time"
    for ticket in list(cluster.under_way)[:1]:
        cluster.confirm(ticket)
    assert cluster.arriving()[first] == 0
    cluster.place(100, needs_prefill=False)  # it counts as one row more where KV is least
    assert cluster.place(440).moe_binding == first, "the others' NICs have 400 ms to go"


def test_a_target_costs_little_however_small_it_is():
    """Links so dear that one would raise the cost by more than a quarter."""
    dear = replace(COSTS, exchange_tokens=30_000)
    assert Cluster(((0, 1),), costs=dear).place(1000).cp_degree == 1


def test_only_the_classes_that_have_a_target_are_spread():
    cluster = Cluster(((1, 300),))
    assert cluster.place(1000).cp_degree == 1
    assert cluster.place(1000, priority=1).cp_degree == 3, "the fourth NIC is busy"
    assert cluster.place(1000, priority=2).cp_degree == 1


def test_a_request_that_has_its_kv_or_its_first_token_has_no_target():
    cluster = Cluster(((0, 1),))
    assert cluster.place(1000, needs_prefill=False).cp_degree == 1
    assert cluster.place(1000, attempt=1).cp_degree == 1


def test_a_late_prompt_stays_within_a_node():
    costs = replace(COSTS, exchange_tokens=0, exchange_tokens_between_nodes=30_000)
    cluster = Cluster(((0, 1),), cluster=TWO_NODES, costs=costs)
    random = Random(5)
    for _ in range(12):
        placed = cluster.place(random.randrange(500, 20_000))
        assert len({instance // 4 for instance in dict(placed.kv_split())}) == 1


def test_a_prompt_that_no_node_holds_is_placed_all_the_same():
    cluster = Cluster(((0, 1),), cluster=replace(TWO_NODES, num_frames=256))
    assert cluster.place(64 * 1500).cp_degree > 4


def test_a_ticket_that_ends_is_under_way_no_more():
    cluster = Cluster(((0, 300),))
    cluster.place(1000)
    assert sum(cluster.arriving()) == 999
    cluster.plan(AbortRequested(1))
    assert sum(cluster.arriving()) == 0


def played(targets, seed):
    """Every plan of a busy cluster: what arrives is confirmed and ends at random."""
    cluster = Cluster(targets, cluster=TWO_NODES, costs=CostConfig())
    cluster.check_every, random, plans = 20, Random(seed), []
    for _ in range(150):
        match random.randrange(4):
            case 0 | 1:
                length = random.choice([200, 3000, 20_000])
                plans.append(cluster.place(random.randrange(100, length), max_tokens=40))
            case 2 if cluster.under_way:
                cluster.confirm(random.choice(list(cluster.under_way)))
        if cluster.window < cluster.scheduler._rows.next_window and random.randrange(2):
            plans.append(repr(cluster.step()))
    return plans


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.system)])
def test_plans_are_the_same_without_a_target_and_with_one_that_concerns_nobody(seed):
    plain = played((), seed)
    assert played(((7, 1),), seed) == plain, "no request is of class 7"
    assert played(((0, 10**9),), seed) == plain, "nobody is ever that late"
    assert played(((0, 1),), seed) != plain


def test_an_explanation_says_how_late_the_cheapest_would_be():
    explainer = Explainer(["2"])
    cluster = Cluster(((0, 300),), explainer=explainer)
    explained = explainer.around(cluster.scheduler.plan_window)
    explained([Arrival(1, 1000, 8), Arrival(2, 1000, 8)], 0)
    decision = next(note.decision for note in explainer.stories[2].notes if note.decision)
    assert "ms after the target of 300 ms" in decision.explanation.sentences[0]
    assert decision.explanation.candidates[0].proposal == decision.proposal


@pytest.mark.parametrize("knobs, named", [
    ({"ttft_targets": ((0, 0),)}, "ttft_targets is .* with ms from 1"),
    ({"ttft_targets": ((0, 5), (0, 6))}, "one for a priority"),
    ({"ttft_targets": ((0, 5),), "policy": "dual_balanced"}, "only cost_aware goes by targets"),
])  # fmt: skip
def test_targets_without_a_meaning_are_refused(knobs, named):
    with pytest.raises(ValueError, match=named):
        SchedulerConfig(**{"policy": "cost_aware", **knobs})
