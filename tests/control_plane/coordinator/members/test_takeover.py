"""A controller that takes over, and processes that show no sign of life."""

from array import array
from dataclasses import replace

import pytest

from control_plane.coordinator.members.start import StartError
from harness.members.member_cluster import FIRST, SECOND, Cluster, running
from nanocp.values.commands import Join
from nanocp.values.members import PREFILL, Beat, Left
from nanocp.values.plan import TargetRun, TookOver

TERM = 1_000_001
"""The first of the second controller."""
TICKETS = TERM * 1_000_000


def taking_over(**prefill):
    cluster = Cluster(**prefill)
    cluster.members.takes_over = True
    cluster.members.terms.number = TERM - 1
    return cluster


def test_an_instance_that_is_lost_before_it_has_dialled_the_next_controller_is_replaced():
    cluster = taking_over(synthetic_kv=True)
    cluster.attach(FIRST)
    cluster.exited(SECOND, 0, "its process was ended by SIGKILL")
    cluster.until_replaced(SECOND, 1, TERM)
    cluster.attach(SECOND)
    cluster.ready(FIRST, SECOND, term=TERM)
    assert set(cluster.members.start.wait()) == {FIRST, SECOND}
    # The scheduler knows of no term, and so of no loss.
    assert cluster.events == [TookOver(TICKETS, ())]


def test_the_first_term_begins_with_the_pages_that_all_instances_kept():
    cluster = taking_over()
    of_first = [(7, TargetRun(2, 1, 0, 3)), (7, TargetRun(0, 1, 0, 4)), (8, TargetRun(0, 1, 0, 9))]
    cluster.attach(FIRST, kept=tuple(of_first))
    assert cluster.events == []
    cluster.attach(SECOND, kept=((7, TargetRun(1, 1, 1, 5)),))
    pages = {
        7: (TargetRun(0, 1, 0, 4), TargetRun(1, 1, 1, 5), TargetRun(2, 1, 0, 3)),
        8: (TargetRun(0, 1, 0, 9),),
    }
    assert cluster.events == [TookOver(TICKETS, tuple(pages.items()))]
    assert cluster.kinds(FIRST) == [Join]


def test_no_page_goes_on_if_an_instance_is_gone():
    cluster = taking_over()
    cluster.attach(FIRST, kept=((7, TargetRun(0, 1, 0, 5)),))
    cluster.attach(SECOND, kept=())
    assert len(cluster.events.pop().kept) == 1
    cluster.exited(SECOND, 0, "its process was ended by SIGKILL")
    cluster.say(FIRST, TERM, Left())
    cluster.until_replaced(SECOND, 1, TERM + 1)
    cluster.attach(SECOND)
    assert cluster.events == [TookOver(TICKETS + 1_000_000, ())], "what went before is void"


def test_an_instance_that_is_lost_while_it_joins_is_waited_for_with_all_others():
    cluster = taking_over()
    cluster.attach(FIRST, SECOND, PREFILL)
    cluster.ready(FIRST, PREFILL, term=TERM)
    cluster.exited(SECOND, 0, "its process was ended by SIGKILL")
    # What was under way is of a term that is over.
    cluster.ready(FIRST, term=TERM)
    cluster.say(FIRST, TERM, Left())
    cluster.until_replaced(SECOND, 1, TERM + 1)
    cluster.attach(SECOND)
    cluster.ready(SECOND, term=TERM + 1)
    assert not cluster.members.start.is_over, "the first has not joined the next term"
    cluster.ready(FIRST, term=TERM + 1)
    assert cluster.members.start.has_succeeded and not cluster.members.end.failure.done()


def test_a_prefill_that_is_lost_while_the_next_controller_starts_is_replaced():
    cluster = taking_over()
    cluster.attach(FIRST, SECOND, PREFILL)
    cluster.ready(PREFILL, FIRST, term=TERM)
    cluster.exited(PREFILL, 0, "its process was ended by SIGKILL")
    cluster.ready(SECOND, term=TERM)
    assert not cluster.members.start.is_over
    cluster.until_replaced(PREFILL, 1, TERM + 1)
    cluster.attach(PREFILL)
    cluster.ready(PREFILL, term=TERM)
    assert cluster.members.start.has_succeeded


def test_the_first_controller_does_not_begin_without_a_member():
    cluster = Cluster(synthetic_kv=True)
    cluster.attach(FIRST)
    cluster.exited(SECOND, 0, "its process ended")
    with pytest.raises(StartError, match="instance 1: its process ended"):
        cluster.members.start.wait()


def test_a_process_without_a_sign_of_life_is_followed_by_another():
    cluster = running(synthetic_kv=True)
    cluster.exited(SECOND, 0, "its process ended")
    cluster.say(FIRST, 1, Left())
    cluster.until_replaced(SECOND, 1, 2)
    cluster.wait(60_000)
    cluster.until_replaced(SECOND, 2, 2)
    assert cluster.members.end.last_loss == "instance 1: its process has not dialled in 60 s"


def test_a_process_that_loads_its_weights_lives_and_so_does_one_that_has_dialled():
    cluster = running(synthetic_kv=True)
    timers = cluster.members.deadlines._timers
    cluster.exited(SECOND, 0, "its process ended")
    cluster.until_replaced(SECOND, 1, 2)
    first_us = timers["instance 1 dials"].due_us
    cluster.wait(10)
    cluster.loading(SECOND)
    assert timers["instance 1 dials"].due_us > first_us
    cluster.attach(SECOND)
    assert "instance 1 dials" not in timers


def test_a_member_that_does_not_dial_the_next_controller_is_replaced():
    cluster = taking_over(synthetic_kv=True)
    cluster.begin()
    cluster.attach(FIRST)
    for _ in range(121):
        cluster.say(FIRST, 0, Beat())
        cluster.wait(1000)
    cluster.until_replaced(SECOND, 1, TERM)
    assert not any(command.member == FIRST for command in cluster.commands)


def test_the_next_controller_learns_from_the_instances_where_experts_are():
    """What one of them has lost is loaded; all else stays where it is."""
    cluster = taking_over(synthetic_kv=True)
    seats = cluster.members.changes.seats
    seats.num_experts, seats._cluster = 6, replace(seats._cluster, redundant_experts=1)
    layers = ([0, 5, 2, -1], [1, 1, 4, 0]), ([3, 4, -1, 1], [3, 2, 4, 4])
    for member, held in zip((FIRST, SECOND), layers, strict=True):
        experts = tuple(array("h", layer).tobytes() for layer in held)
        cluster.attach(member, kept=(), experts=experts)
    join = cluster.sent[FIRST][-1].message
    assert list(join.experts.experts(0)) == [0, 5, 2, -1, 3, 4, -1, 1]
    in_layer_1 = list(join.experts.experts(1))
    assert set(in_layer_1) == {*range(6)}
    held = [1, 1, 4, 0, 3, 2, 4, 4]
    assert sum(a != b for a, b in zip(in_layer_1, held, strict=True)) == 1, "expert 5 was nowhere"
