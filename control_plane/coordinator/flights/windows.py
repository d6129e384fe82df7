"""The windows in flight, and a shadow of every instance's table (protocol.md, table digests)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

from nanocp.values.plan import InstancePlan
from nanocp.values.table import InstanceTable


@dataclass(slots=True)
class _Window:
    window: int
    plans: tuple[InstancePlan, ...]
    unreported: set[int]


class WindowsInFlight:
    """At most two windows, oldest first, and the tables as of before them."""

    def __init__(self, num_instances: int) -> None:
        self._seats = list(range(num_instances))
        """Instances of the term, ascending."""
        self._windows: deque[_Window] = deque()
        self.tables = [InstanceTable(instance, num_instances) for instance in range(num_instances)]
        """What each instance's table was before the oldest window in flight."""

    def abandon(self) -> None:
        """The term is over: no window in flight will be reported."""
        self._windows.clear()

    def begin_term(self, seats: Sequence[int], keeps_tables: bool) -> None:
        """A term with these instances begins. keeps_tables: of those that were in the last one."""
        num, kept = len(self.tables), {*self._seats} & {*seats} if keeps_tables else set()
        self.tables = [
            self.tables[instance] if instance in kept else InstanceTable(instance, num)
            for instance in range(num)
        ]
        self._seats = list(seats)

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def oldest(self) -> int | None:
        """The window that the instances are running, or None."""
        return self._windows[0].window if self._windows else None

    def missing(self) -> list[int]:
        """Instances that have not reported the oldest window."""
        return sorted(self._windows[0].unreported) if self._windows else []

    def sent(self, plans: Sequence[InstancePlan]) -> None:
        """A window was sent: one plan for each instance, ascending."""
        assert [plan.instance for plan in plans] == self._seats, "a window has one plan for each"
        assert len(self._windows) < 2, "never more than two windows are in flight"
        self._windows.append(_Window(plans[0].window, tuple(plans), set(self._seats)))

    def reported(self, instance: int, window: int) -> bool:
        """Take note that an instance ran every step of a window; return whether all have.

        The window is then no longer in flight. Raises ValueError if it is not the oldest that the
        instance has yet to report.
        """
        flight = next((each for each in self._windows if instance in each.unreported), None)
        if flight is None or flight.window != window:
            raise ValueError(
                f"instance {instance} reported window {window}, which it was not running"
            )
        flight.unreported.remove(instance)
        if flight.unreported:
            return False
        # An instance reports in order, so the window that became complete is the oldest.
        complete = self._windows.popleft()
        assert complete is flight, f"window {window} is complete before window {complete.window}"
        for plan in complete.plans:
            self.tables[plan.instance].apply(plan.changes)
        return True

    def full_plan(self, instance: int, window: int) -> InstancePlan:
        """The plan of a window in flight with the changes that build its table from an empty one.

        Equal for every call with the same arguments. Raises ValueError if the window is not in
        flight.
        """
        table = deepcopy(self.tables[instance])
        for flight in self._windows:
            plan = flight.plans[self._seats.index(instance)]
            table.apply(plan.changes)
            if flight.window == window:
                return plan._replace(is_full=True, changes=table.full_changes())
        raise ValueError(f"instance {instance} asked for window {window}, which is not in flight")
