"""Losses, terms, pauses and dropped messages as /metrics and the cluster page show them."""

from prometheus_client import CollectorRegistry

from control_plane.observe.metrics.families import PHASES
from control_plane.observe.metrics.recovery import RecoveryMetrics
from harness.members.member_cluster import FIRST, SECOND, Cluster
from nanocp.values.members import PREFILL, Left
from nanocp.values.plan import WindowDone


def test_a_pause_is_measured_from_the_end_of_a_term_to_the_next():
    now_s, registry = [10.0], CollectorRegistry()
    metrics = RecoveryMetrics(registry, lambda: now_s[0])
    sample = registry.get_sample_value
    seats = {"seats": (), "spares": 0}
    row = {"term": 1, "lost": 0, "recovers_for_s": None, "held": 0, **seats}
    assert metrics.row() == row
    metrics.lost("instance", "exit")
    metrics.term_ended()
    now_s[0] += 3
    metrics.term_ended()
    now_s[0] += 4
    metrics.waits(2, 3)
    assert metrics.row() == row | {"lost": 1, "recovers_for_s": 7.0, "held": 2}
    assert sample("nanocp:recovering") == 1
    metrics.term_began(2, "loss")
    metrics.num_unlogged = lambda: 5
    assert sample("nanocp:recovering") == 0 and sample("nanocp:term") == 2
    assert sample("nanocp:recovery_seconds_sum") == 7
    assert sample("nanocp:regroups_total", {"cause": "loss"}) == 1
    assert (sample("nanocp:requests_held"), sample("nanocp:tickets_open")) == (2, 3)
    assert sample("nanocp:event_log_dropped_total") == 5


def test_a_recovery_has_phases_that_sum_up_to_it():
    now_s, registry = [10.0], CollectorRegistry()
    metrics = RecoveryMetrics(registry, lambda: now_s[0])
    metrics.waits_for("join")  # the first term; nothing recovers
    for phases in ((("load", 1.0), ("join", 4.0), ("leave", 0.5), ("load", 2.0)), ()):
        now_s[0] += 100
        metrics.term_ended()
        now_s[0] += 0.25
        for phase, seconds in phases:
            metrics.waits_for(phase)
            now_s[0] += seconds
        metrics.term_began(2, "loss")

    def sample(name, phase):
        return registry.get_sample_value(f"nanocp:recovery_phase_seconds_{name}", {"phase": phase})

    assert [sample("sum", phase) for phase in PHASES] == [0.25 + 0.5 + 0.25, 3.0, 4.0]
    assert [sample("count", phase) for phase in PHASES] == [2, 2, 2]
    assert registry.get_sample_value("nanocp:recovery_seconds_sum") == 8.0


def test_what_later_attempts_compute_again_and_what_they_find_is_counted():
    registry = CollectorRegistry()
    metrics = RecoveryMetrics(registry)
    metrics.placed(0, 1000, 0)  # a new request
    metrics.placed(1, 200, 199)  # all of its KV was kept
    metrics.placed(2, 200, 64)  # its first page was
    names = ("nanocp:replayed_tokens_total", "nanocp:pages_kept_total")
    assert [registry.get_sample_value(name) for name in names] == [135, 4 + 1]


def test_seats_are_counted_by_state_and_spares_beside_them():
    registry = CollectorRegistry()
    metrics = RecoveryMetrics(registry)
    metrics.seats(("serving", "loading", "draining", "serving"))
    metrics.num_spares = lambda: 3
    states = ("empty", "loading", "serving", "draining", "spare")
    found = [registry.get_sample_value("nanocp:seats", {"state": state}) for state in states]
    assert found == [0, 1, 2, 1, 3]
    assert metrics.row()["seats"] == ("serving", "loading", "draining", "serving")


def test_members_say_what_was_lost_and_why_and_what_came_too_late():
    cluster = Cluster()
    members = (FIRST, SECOND, PREFILL)
    cluster.attach(*members)
    cluster.ready(*members)
    cluster.exited(SECOND, 0, "its process ended")
    cluster.failed(PREFILL, "prefill: its stream broke")
    cluster.until_replaced(SECOND, 1, 2)
    cluster.say(FIRST, 1, WindowDone(0, 0))
    cluster.say(FIRST, 1, Left())
    cluster.attach(SECOND)
    cluster.ready(FIRST, SECOND, term=2)
    cluster.regroup()
    cluster.say(FIRST, 2, Left())
    cluster.say(SECOND, 2, Left())
    cluster.ready(FIRST, SECOND, term=3)
    sample = cluster.registry.get_sample_value
    lost = [
        sample("nanocp:members_lost_total", {"kind": kind, "cause": cause})
        for kind, cause in (("instance", "exit"), ("prefill", "stream"))
    ]
    begun = [sample("nanocp:regroups_total", {"cause": cause}) for cause in ("loss", "request")]
    assert (lost, begun, sample("nanocp:term")) == ([1, 1], [1, 1], 3)
    assert sample("nanocp:stale_messages_total", {"kind": "window_done"}) == 1
