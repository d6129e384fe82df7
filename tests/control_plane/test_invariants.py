"""The proof proves something: each kind of broken state is seen."""

import pytest

from control_plane.invariants import check
from control_plane.scheduler import Scheduler
from nanocp.config import ClusterConfig, SchedulerConfig
from nanocp.plan import Arrival, TransferDone


def take_page_twice(s):
    s._state.requests[1].runs[0] = s._state.requests[2].runs[0]


def lose_a_frame(s):
    s._state.pools[0].take(1)


def miscount_committed(s):
    s._state.pools[1].num_committed += 1


def forget_tokens(s):
    s._state._fixed_tokens[0] -= 1


def forget_a_row(s):
    s._state.num_rows[s._state.requests[1].moe_binding] -= 1


def forget_a_commitment(s):
    s._state.partials[s._state.requests[2].moe_binding] -= 1


def send_to_nobody(s):
    moe_binding = s._state.requests[2].moe_binding
    peer = next(j for j, links in enumerate(s._lowering.routes.links[moe_binding]) if links.entries)
    s._lowering.routes.links[moe_binding][peer].remove(2)


def break_the_transpose(s):
    table = s._lowering.tables[s._state.requests[2].moe_binding]
    next(slots for slots in table.q_route if slots).append(99)


def age_a_digest(s):
    s._lowering.tables[0].digest ^= 1


def move_a_frame_in_a_table(s):
    request = s._state.requests[1]
    table = s._lowering.tables[request.runs[0].instance]
    run = table.pages[1][0]
    table.pages[1][0] = run._replace(frame=run.frame + 1)
    table.digest = 0


def mistake_a_holder(s):
    request = s._state.requests[2]
    s._lowering.tables[request.moe_binding].holders[2] = [(0, (request.moe_binding + 1) % 4)]


def drop_a_page(s):
    s._state.requests[1].runs.pop()


def run_without_a_row(s):
    s._num_live_rows += 1


def forget_a_ticket(s):
    s._ticket_owner.clear()


def miscount_the_queue(s):
    s._queue.num_tokens += 1


def unlist_a_multi_instance_row(s):
    s._state.multi.clear()


FAULTS = [fault for _, fault in sorted(globals().items()) if getattr(fault, "__module__", "") == __name__]


def rich_scheduler():
    """Running on one and on many instances, in transfer, waiting, quarantined."""
    scheduler = Scheduler(ClusterConfig(num_frames=40), SchedulerConfig())
    arrivals = [
        Arrival(1, 100, 50, needs_prefill=False),
        Arrival(2, 2500, 50),
        Arrival(3, 500, 50),
        Arrival(4, 8000, 50),
    ]
    transfers = scheduler.plan_window(arrivals, 0).transfers
    instances = transfers[0].receivers
    scheduler.plan_window([TransferDone(transfers[0].ticket, instance) for instance in instances], 0)
    assert (scheduler.num_waiting, scheduler.num_running) == (1, 3)
    return scheduler


def test_a_sound_state_passes():
    check(rich_scheduler())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_seen(fault):
    scheduler = rich_scheduler()
    fault(scheduler)
    with pytest.raises(AssertionError):
        check(scheduler)
