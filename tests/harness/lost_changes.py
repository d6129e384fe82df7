"""Plans as they might arrive that lost a change or came to the wrong table, and what mends them."""

from random import Random

from nanocp.values.plan import InstancePlan
from nanocp.values.table import InstanceTable


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
