"""Windows in flight, and the full table of one of them."""

from random import Random

import pytest

from control_plane.coordinator.flights.windows import WindowsInFlight
from control_plane.scheduler.scheduler import Scheduler
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import Arrival, InstancePlan, TransferDone, WindowDone
from nanocp.values.table import InstanceTable
from nanocp.wire.members import TO_INSTANCE


def plans(window, num_instances=2):
    return tuple(InstancePlan(each, window, window, 1, 0, 0) for each in range(num_instances))


def test_a_window_leaves_the_flight_when_everybody_has_reported_it():
    windows = WindowsInFlight(2)
    windows.sent(plans(0))
    windows.sent(plans(1))
    assert not windows.reported(0, 0)
    assert not windows.reported(0, 1)
    assert (windows.oldest, windows.missing()) == (0, [1])
    assert windows.reported(1, 0)
    assert (windows.oldest, windows.missing(), len(windows)) == (1, [1], 1)
    assert windows.reported(1, 1)
    assert (windows.oldest, windows.missing(), len(windows)) == (None, [], 0)


@pytest.mark.parametrize(
    ("num_sent", "reported", "window"),
    [(1, [0], 0), (1, [0], 2), (2, [], 1)],
    ids=["again", "never sent", "out of order"],
)
def test_a_report_of_a_window_that_does_not_run_is_refused(num_sent, reported, window):
    windows = WindowsInFlight(2)
    for number in range(num_sent):
        windows.sent(plans(number))
    for number in reported:
        windows.reported(0, number)
    missing = windows.missing()
    with pytest.raises(
        ValueError, match=f"instance 0 reported window {window}, which it was not running"
    ):
        windows.reported(0, window)
    assert windows.missing() == missing, "nothing was taken"


def test_a_full_table_of_a_window_that_is_over_is_refused():
    with pytest.raises(ValueError, match="instance 1 asked for window 7"):
        WindowsInFlight(2).full_plan(1, 7)


@pytest.mark.parametrize("seed", range(8))
def test_the_full_table_equals_the_sum_of_the_deltas_and_is_the_same_each_time(seed):
    """Requests of every kind come and go; a window's full plan replaces all deltas before it."""
    random = Random(seed)
    cluster = ClusterConfig(num_instances=3, num_frames=64)
    config = SchedulerConfig(policy="chaos", chaos_seed=seed, cp_degree_buckets=((100, 1),))
    scheduler = Scheduler(cluster, config)
    windows = WindowsInFlight(3)
    events, unreported, num_checked = [], [], 0
    deltas = [InstanceTable(instance, 3) for instance in range(3)]
    for number in range(120):
        if number % 3 == 0:
            events.append(Arrival(number + 1, random.randrange(1, 300), random.randrange(1, 20)))
        plan = scheduler.plan_window(events, number)
        events = [
            TransferDone(transfer.ticket, instance)
            for transfer in plan.transfers
            for instance in transfer.receivers
        ]
        if plan.window is not None:
            windows.sent(plan.instances)
            unreported.append(plan.window)
            for table, instance_plan in zip(deltas, plan.instances, strict=True):
                table.apply(instance_plan.changes)
                full = windows.full_plan(instance_plan.instance, plan.window)
                fresh = InstanceTable(instance_plan.instance, 3)
                fresh.apply(full.changes)
                assert fresh.digest == table.digest == full.result_digest
                assert (full.is_full, full.base_digest) == (True, instance_plan.base_digest)
                again = windows.full_plan(instance_plan.instance, plan.window)
                assert TO_INSTANCE.encode(again) == TO_INSTANCE.encode(full)
                num_checked += len(full.changes.rows)
        if unreported and (len(unreported) == 2 or random.random() < 0.5):
            window = unreported.pop(0)
            ended = [windows.reported(instance, window) for instance in range(3)]
            assert ended == [False, False, True]
            events += [WindowDone(instance, window) for instance in range(3)]
    assert num_checked > 100
