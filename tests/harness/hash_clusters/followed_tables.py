"""Tables that follow a scheduler's plans, as the instances' do; and plans that lost a change."""

from collections.abc import Iterable, Sequence
from random import Random

from control_plane.scheduler.invariants import check
from nanocp.values.plan import InstancePlan, WindowDone
from nanocp.values.table import InstanceTable


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
    """A scheduler of two instances whose tables follow its plans; every call is checked."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.tables = [InstanceTable(instance, 2) for instance in range(2)]
        self.window = 0

    def plan(self, events=()):
        plan = self.scheduler.plan_window(events, self.window)
        follow(self.tables, plan.instances)
        check(self.scheduler, self.tables)
        return plan

    def step(self, *events):
        """Both instances report the oldest window; then the scheduler plans."""
        done = [WindowDone(instance, self.window) for instance in range(2)]
        self.window += 1
        return self.plan([*events, *done])


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
