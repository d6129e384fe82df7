"""Tables that follow a scheduler's plans, as the instances' do; and plans that lost a change."""

from collections.abc import Iterable, Sequence
from random import Random

from control_plane.scheduler.invariants import check
from control_plane.scheduler.scheduler import Scheduler
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import Arrival, InstancePlan, Regrouped, TookOver, TransferDone, WindowDone
from nanocp.values.table import InstanceTable

TWO_INSTANCES = ClusterConfig(num_instances=2, num_frames=20)


def follow(tables: Sequence[InstanceTable], plans: Iterable[InstancePlan]) -> None:
    """Apply a window's plans to the tables, as the instances do."""
    for plan in plans:
        table = tables[plan.instance]
        assert table.digest == plan.base_digest, (
            f"the plan for instance {plan.instance} is not for its table"
        )
        table.apply(plan.changes)
        assert table.digest == plan.result_digest, (
            f"instance {plan.instance} would not get the table that was planned"
        )


class FollowedScheduler:
    """A scheduler whose tables follow its plans, and what its instances say; calls are checked."""

    def __init__(self, cluster=TWO_INSTANCES, explainer=None, **config):
        """config: fields of SchedulerConfig."""
        self.scheduler = Scheduler(cluster, SchedulerConfig(**config), explainer)
        self.num_instances = cluster.num_instances
        self.num_requests = self.now_us = self.num_calls = 0
        self.check_every = 1
        """How many calls there are for one that is checked."""
        self._begin_term()

    def _begin_term(self):
        self.tables = [
            InstanceTable(each, self.num_instances) for each in range(self.num_instances)
        ]
        self.window = self.scheduler._rows.next_window
        """The oldest window that they have not reported."""

    def plan(self, *events):
        plan = self.scheduler.plan_window(events, self.now_us)
        if any(isinstance(event, Regrouped | TookOver) for event in events):
            self._begin_term()
        follow(self.tables, plan.instances)
        self.num_calls += 1
        if self.num_calls % self.check_every == 0:
            check(self.scheduler, self.tables)
        return plan

    def arrive(self, prompt_len, max_tokens=8, **fields):
        """The next request arrives, by default with its KV."""
        self.num_requests += 1
        fields = {"needs_prefill": False} | fields
        return self.plan(Arrival(self.num_requests, prompt_len, max_tokens, **fields))

    def arrive_all(self, *prompt_lens, max_tokens=8):
        """Requests of these lengths arrive together, with their KV."""
        first = self.num_requests + 1
        self.num_requests += len(prompt_lens)
        return self.plan(*(
            Arrival(number, length, max_tokens, needs_prefill=False)
            for number, length in enumerate(prompt_lens, first)
        ))  # fmt: skip

    def arrived(self, plan):
        """All pages of the plan's tickets are where they should be."""
        done = [(each.ticket, i) for each in plan.transfers for i in each.receivers]
        done += [(stow.ticket, stow.instance) for stow in plan.stows]
        return self.plan(*(TransferDone(*each) for each in done))

    def step(self, *events, **report):
        """All instances report the oldest window in flight; then the scheduler plans."""
        done = []
        if self.window < self.scheduler._rows.next_window:
            done = [WindowDone(each, self.window, **report) for each in range(self.num_instances)]
            self.window += 1
        return self.plan(*events, *done)

    def run_out(self):
        """Every window that was sent is reported."""
        while self.window < self.scheduler._rows.next_window:
            self.step()

    def request(self, request_id=1):
        return self.scheduler._state.requests[request_id]

    def placement(self, request_id=1):
        return self.scheduler.requests.placement(request_id)

    def loads(self, name):
        """A field of each instance's load."""
        return [getattr(load, name) for load in self.scheduler.requests.loads()]

    def free(self):
        return self.loads("frames_free")

    def quarantined(self):
        return self.loads("frames_quarantined")


def corrupted(plan: InstancePlan, random: Random) -> InstancePlan:
    """The plan without its row changes, for another table, or with another result."""
    if plan.changes.rows and random.random() < 0.5:
        return plan._replace(changes=plan.changes._replace(rows=()))
    if random.random() < 0.5:
        return plan._replace(base_digest=plan.base_digest ^ 1)
    return plan._replace(result_digest=plan.result_digest ^ 1)


def full(plan: InstancePlan, table: InstanceTable) -> InstancePlan:
    """The plan with its whole table, which `table` is after the plan."""
    return plan._replace(is_full=True, changes=table.full_changes())
