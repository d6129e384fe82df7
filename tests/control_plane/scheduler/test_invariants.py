"""The proof proves something: each kind of broken state is seen."""

import pytest

from control_plane.scheduler.invariants import check
from control_plane.scheduler.scheduler import Scheduler
from harness.hash_clusters.followed_tables import FollowedScheduler, follow
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import Arrival, TransferDone
from nanocp.values.table import InstanceTable


def take_page_twice(s, tables):
    s._state.requests[1].runs[0] = s._state.requests[2].runs[0]


def lose_a_frame(s, tables):
    s._state.frames[0].take(1)


def miscount_committed(s, tables):
    s._state.frames[1].num_committed += 1


def forget_tokens(s, tables):
    s._state.loads._fixed_tokens[0] -= 1


def forget_a_row(s, tables):
    s._state.loads.num_rows[s._state.requests[1].moe_binding] -= 1


def forget_a_commitment(s, tables):
    s._state.committed.partials[s._state.requests[2].moe_binding] -= 1


def send_to_nobody(s, tables):
    moe_binding = s._state.requests[2].moe_binding
    peer = next(instance for instance in s._state.requests[2].pages_on if instance != moe_binding)
    s._lowering.routes.remove_links(2, moe_binding, (peer,))


def break_the_transpose(s, tables):
    table = tables[s._state.requests[2].moe_binding]
    next(slots for lane in table.lanes for slots in lane.q_route if slots).append(99)


def age_a_digest(s, tables):
    s._lowering.digests[0] ^= 1


def move_a_frame_in_a_table(s, tables):
    request = s._state.requests[1]
    table = tables[request.runs[0].instance]
    run = table.pages[1][0]
    table.pages[1][0] = run._replace(frame=run.frame + 1)
    table.digest = 0


def mistake_a_holder(s, tables):
    request = s._state.requests[2]
    tables[request.moe_binding].holders[2] = [(0, (request.moe_binding + 1) % 4)]


def drop_a_page(s, tables):
    s._state.requests[1].runs.pop()


def run_without_a_row(s, tables):
    s._rows.num_running += 1


def forget_a_ticket(s, tables):
    s.tickets._owners.clear()


def miscount_the_queue(s, tables):
    s._admission.queue.num_tokens += 1


def unlist_a_linked_row(s, tables):
    s._state.linked.by_degree.clear()


def mislay_a_run(s, tables):
    s._state.linked.runs[s._state.requests[2].moe_binding].clear()


def forget_a_holder(s, tables):
    s._state.requests[2].holders = ()


FAULTS = [
    fault for _, fault in sorted(globals().items()) if getattr(fault, "__module__", "") == __name__
]


def rich_scheduler():
    """Make a scheduler with requests of every kind: (it, the instances' tables)."""
    story = FollowedScheduler(ClusterConfig(num_frames=40), policy="dual_balanced")
    prompts = [Arrival(2, 2500, 50), Arrival(3, 500, 50), Arrival(4, 8000, 50)]
    first = story.plan(Arrival(1, 100, 50, needs_prefill=False), *prompts)
    transfer = first.transfers[0]
    story.plan(*(TransferDone(transfer.ticket, instance) for instance in transfer.receivers))
    requests = story.scheduler.requests
    assert (requests.num_waiting, requests.num_running) == (1, 3)
    return story.scheduler, story.tables


def test_a_sound_state_passes():
    check(*rich_scheduler())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_seen(fault):
    scheduler, tables = rich_scheduler()
    fault(scheduler, tables)
    with pytest.raises(AssertionError):
        check(scheduler, tables)


@pytest.mark.parametrize("digest", ["base_digest", "result_digest"])
def test_a_plan_with_a_wrong_digest_is_not_followed(digest):
    plan = (
        Scheduler(ClusterConfig(), SchedulerConfig())
        .plan_window([Arrival(1, 1, 5)], 0)
        .instances[0]
    )
    with pytest.raises(AssertionError):
        follow([InstanceTable(0, 4)], [plan._replace(**{digest: getattr(plan, digest) ^ 1})])
