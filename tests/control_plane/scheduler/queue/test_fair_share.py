"""Fairness: the order is that of plain virtual token counters, and a flood delays nobody else."""

from hypothesis import given
from hypothesis import strategies as st

from control_plane.scheduler.queue.fair_share import OUTPUT_WEIGHT, FairShare
from control_plane.scheduler.queue.waiting_queue import WaitingQueue
from control_plane.scheduler.scheduler import Scheduler
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import Arrival, WindowDone

steps = st.lists(
    st.one_of(st.tuples(st.just("arrive"), st.sampled_from("abc"), st.integers(1, 300)),
              st.tuples(st.just("place"), st.integers(0, 2), st.just(0)),
              st.tuples(st.just("window"), st.integers(1, 4), st.just(0))),
    max_size=60,
)  # fmt: skip


class PlainCounters:
    """The paper's algorithm over plain lists: the slow reference of FairShare and WaitingQueue."""

    def __init__(self):
        self.served = {}
        self.waiting = []
        self.running = []
        self.last = 0

    def arrive(self, arrival):
        tenants = {each.tenant for each in self.waiting}
        if arrival.tenant not in tenants:
            least = min((self.served[tenant] for tenant in tenants), default=self.last)
            self.served[arrival.tenant] = max(self.served.get(arrival.tenant, 0), least)
        self.waiting.append(arrival)

    def order(self):
        """Requests in the order in which they would be placed if every one were charged."""
        served, left, order = dict(self.served), list(self.waiting), []
        while left:
            first = min(left, key=lambda a: (a.priority, served[a.tenant], a.request_id))
            heads = [a for a in left if (a.priority, a.tenant) == (first.priority, first.tenant)]
            order.append(min(heads, key=lambda a: a.request_id))
            left.remove(order[-1])
            served[first.tenant] += order[-1].prompt_len
        return order

    def place(self, arrival):
        self.waiting.remove(arrival)
        self.served[arrival.tenant] += arrival.prompt_len
        if all(each.tenant != arrival.tenant for each in self.waiting):
            self.last = self.served[arrival.tenant]
        self.running.append(arrival.tenant)

    def window(self, num_steps):
        for tenant in self.running:
            self.served[tenant] += OUTPUT_WEIGHT * num_steps


@given(steps, st.booleans())
def test_the_order_is_that_of_plain_counters_and_one_tenants_is_by_arrival(drawn, is_alone):
    share, plain = FairShare(), PlainCounters()
    queue = WaitingQueue(SchedulerConfig(), share)
    for number, (what, who, size) in enumerate(drawn, start=1):
        if what == "arrive":
            arrival = Arrival(number, size, 9, priority=size % 2, tenant="a" if is_alone else who)
            queue.append(arrival, 0)
            plain.arrive(arrival)
        elif what == "window":
            share.window(who)
            plain.window(who)
        elif order := plain.order():
            walked = []
            for (placed, _), _ in zip(queue, range(who + 1), strict=False):
                share.placed(placed)
                walked.append(placed)
            for placed in walked:
                queue.remove(placed.request_id)
                share.row_starts(placed)
            assert walked == order[: who + 1]
            for placed in walked:
                plain.place(placed)
        assert {tenant: share.counters[tenant] for tenant in plain.served} == plain.served
        if is_alone:
            waiting = [(each.arrival.priority, each.arrival.request_id) for each in queue]
            assert waiting == sorted(waiting)


def test_a_tenant_is_placed_soon_however_many_requests_another_has():
    """Eight fit at a time. A flood of 400 waits; each request of the other waits for one to end."""
    scheduler = Scheduler(ClusterConfig(num_instances=1, num_frames=16), SchedulerConfig())
    flood = {"needs_prefill": False, "tenant": "flood"}
    events = [Arrival(number, 100, 9, **flood) for number in range(1, 401)]
    waited, arrived, next_id = [], {}, 1000
    for call in range(200):
        if call % 10 == 5:
            events.append(Arrival(next_id, 100, 9, needs_prefill=False, tenant="other"))
            arrived[next_id] = call
            next_id += 1
        plan = scheduler.plan_window(events, call)
        placed = [placement.request_id for placement in plan.placements]
        waited += [call - arrived[number] for number in placed if number in arrived]
        events = [] if plan.window is None else [WindowDone(0, plan.window)]
    # A row runs for nine windows, and its frames come back two windows later.
    assert len(waited) >= 18 and max(waited) <= 12


def test_tenants_that_are_idle_are_forgotten_one_by_one():
    share = FairShare()
    for number in range(5000):
        arrival = Arrival(number + 1, 1, 1, tenant=str(number))
        share.waits(arrival)
        share.placed(arrival)
        share.leaves(arrival)
    assert len(share.counters) == 4096 and "4999" in share.counters and share.spread == 0
