"""Changes of the expert table: which windows name which table, and what ends a change."""

from array import array
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from control_plane.coordinator.flights.expert_changes import MAX_LOAD_MS, expert_changes
from control_plane.coordinator.members.deadlines import Deadlines
from control_plane.coordinator.members.output import MembersOutput
from control_plane.coordinator.members.seats import Seats
from control_plane.observe.metrics.experts import ExpertMetrics
from nanocp.config.cluster import ClusterConfig
from nanocp.values.commands import ChangeExperts
from nanocp.values.experts import ExpertTable
from nanocp.values.members import ExpertLoad, ExpertsHere

CLUSTER = ClusterConfig(num_instances=2, redundant_experts=1, expert_load_mb_per_s=100)
HOT = [0, 900, 900, 0], [50, 50, 0, 0]
"""Pairs by instance and slot of one layer: experts 1 and 2 are hot."""


class FakeMembers:
    """Two seats that serve; what they are sent is kept."""

    def __init__(self):
        self.seats, self.sent, self.deadlines = [0, 1], [], Deadlines()
        self.output = MembersOutput()
        self.changes = SimpleNamespace(seats=Seats(CLUSTER, 6))
        self.changes.seats.experts = ExpertTable.of(4, [0, 1, 2, 3, 3, 4, 5, 0])

    def send(self, member, message):
        """Keep what is sent to the first instance."""
        if member.instance == 0:
            self.sent.append(message)


@pytest.fixture
def cluster():
    members = FakeMembers()
    registry = CollectorRegistry()
    changes = expert_changes(CLUSTER, members, ExpertMetrics(registry))
    return SimpleNamespace(changes=changes, members=members, registry=registry, window=-1)


def imbalance(cluster):
    return cluster.registry.get_sample_value("nanocp:expert_imbalance", {"layer": "0"})


def run_window(cluster, is_done=True):
    cluster.window += 1
    number = cluster.changes.sent(cluster.window)
    if is_done:
        cluster.changes.window_done(cluster.window)
    return number


def report(cluster, number=0, loads=HOT):
    for instance, pairs in enumerate(loads):
        counts = (array("q", pairs).tobytes(),)
        cluster.changes.reported(ExpertLoad(instance, number, cluster.window, counts))
    cluster.changes.advance(lambda: True)


def answer(cluster, number, problem=""):
    for instance in (0, 1):
        cluster.changes.reported(ExpertsHere(instance, number, problem))


def counted(cluster, outcome):
    labels = {"outcome": outcome}
    return cluster.registry.get_sample_value("nanocp:expert_changes_total", labels)


def test_rows_leave_a_slot_first_and_come_once_every_instance_has_its_experts(cluster):
    run_window(cluster, is_done=False)
    report(cluster)
    first, second = cluster.members.sent.pop(), None
    assert isinstance(first, ChangeExperts) and first.number == 1
    before = cluster.members.changes.seats.experts.experts()
    left = [n for n, expert in enumerate(first.table.experts()) if expert != before[n]]
    assert left and all(first.table.experts()[number] == -1 for number in left)
    assert run_window(cluster, is_done=False) == 1
    assert not cluster.members.sent, "window 0 may name the slots"
    cluster.changes.window_done(0)
    second = cluster.members.sent.pop()
    assert second.number == 2 and set(second.table.experts()) >= {*range(6)}
    assert all(second.table.experts()[number] >= 0 for number in left)
    assert run_window(cluster) == 1, "no instance has said that its experts are here"
    cluster.changes.reported(ExpertsHere(0, 2))
    assert run_window(cluster) == 1, "one has not"
    cluster.changes.reported(ExpertsHere(1, 2))
    assert run_window(cluster) == 2 and counted(cluster, "done") == 1
    assert cluster.members.changes.seats.experts == second.table


def test_what_is_even_stays_where_it_is(cluster):
    run_window(cluster)
    report(cluster, loads=([300, 300, 300, 0], [300, 300, 300, 0]))
    assert not cluster.members.sent and run_window(cluster) == 0
    assert imbalance(cluster) == 1


def test_without_a_rate_loads_are_reported_and_nothing_moves(cluster):
    cluster.changes.is_on = False
    run_window(cluster)
    report(cluster)
    assert not cluster.members.sent
    assert imbalance(cluster) > 1.5


def begin_a_load(cluster):
    run_window(cluster)
    report(cluster)
    while len(cluster.members.sent) < 2:
        run_window(cluster)
        assert cluster.window < 9, "slots must be free by now"


@pytest.mark.parametrize("how", ["failed", "overdue"])
def test_a_load_that_does_not_end_drops_the_change(cluster, how):
    begin_a_load(cluster)
    if how == "failed":
        answer(cluster, 2, "OSError: the file is gone; expert 1 of layer 3 of /tale")
    else:
        cluster.members.deadlines.tick(0)
        cluster.members.deadlines.tick(MAX_LOAD_MS * 1000)
    (line,) = cluster.members.output.says
    assert "stay where they are" in line.text
    assert ("expert 1 of layer 3" if how == "failed" else "instances 0, 1 did not") in line.text
    assert run_window(cluster) == 1 and counted(cluster, "failed") == 1
    sent = len(cluster.members.sent)
    answer(cluster, 2)
    report(cluster, number=1)
    assert run_window(cluster) == 1 and len(cluster.members.sent) == sent, "it is not tried at once"
    for _ in range(cluster.changes.rest):
        run_window(cluster)
    report(cluster, number=1)
    assert cluster.members.sent[-1].number == 3, "no number is used twice"


def test_a_loss_drops_the_change_and_the_next_term_knows_what_slots_hold(cluster):
    begin_a_load(cluster)
    known = cluster.members.changes.seats.experts
    assert -1 in known.experts()[:3] or known.experts().count(-1) == 2
    cluster.changes.end_term()
    assert counted(cluster, "lost") == 1
    cluster.changes.begin_term()
    answer(cluster, 2)
    assert run_window(cluster) == 0 and cluster.members.changes.seats.experts == known


def test_reports_of_a_table_that_is_over_do_not_count(cluster):
    begin_a_load(cluster)
    answer(cluster, 2)
    run_window(cluster)
    sent, before = len(cluster.members.sent), imbalance(cluster)
    for number in (0, 1):
        report(cluster, number)
    assert len(cluster.members.sent) == sent and run_window(cluster) == 2
    assert imbalance(cluster) == before > 1.5, "nothing was planned"
    report(cluster, 2)
    assert imbalance(cluster) < 1.5


def test_neither_one_instance_nor_a_dense_model_has_a_table(cluster):
    members = FakeMembers()
    metrics = ExpertMetrics(CollectorRegistry())
    alone = ClusterConfig(num_instances=1)
    assert expert_changes(alone, members, metrics) is None
    members.changes.seats = Seats(CLUSTER, 0)
    assert expert_changes(CLUSTER, members, metrics) is None


def test_an_operator_sees_the_table_its_loads_and_what_is_under_way(cluster):
    def now():
        seen = cluster.changes.now()
        return bool(seen.table), seen.is_changing, seen.num_loading

    assert now() == (False, False, 0)
    run_window(cluster, is_done=False)
    report(cluster)
    assert now() == (True, True, 0)
    assert cluster.changes.now().loads == [[0, 900, 900, 50, 50, 0]]
    cluster.changes.window_done(0)
    seen = cluster.changes.now()
    assert seen.num_loading and seen.table[0].count(-1) < 2 and seen.seats == (0, 1)
    answer(cluster, 2, "no space left")
    seen = cluster.changes.now()
    assert now() == (True, False, 0) and seen.failure == "instance 0: no space left"
    assert seen.changes == {"done": 0, "failed": 1, "lost": 0}
