"""Tables that follow a scheduler's plans, as the instances' do.

Enters: plans. Leaves: tables, or an AssertionError. Does not know: requests, frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nanocp.values.plan import InstancePlan
from nanocp.values.table import InstanceTable


def follow(tables: Sequence[InstanceTable], plans: Iterable[InstancePlan]) -> None:
    """Apply a window's plans to the tables, as the instances do.

    Raises AssertionError if a digest is wrong.
    """
    for plan in plans:
        table = tables[plan.instance]
        assert table.digest == plan.base_digest, (
            f"the plan for instance {plan.instance} is not for its table"
        )
        table.apply(plan.changes)
        assert table.digest == plan.result_digest, (
            f"instance {plan.instance} would not get the table that was planned"
        )
