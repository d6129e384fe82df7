"""The expert tables of a term at one instance (protocol.md, named slots)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from nanocp.values.experts import ExpertTable
from nanocp.values.members import ExpertLoad, ExpertsHere, Report

REPORT_S = 5.0
"""Time from one report of loads to the next, which a window's end brings."""


class ExpertSlots(Protocol):
    """The slots of one instance, and the table that its rows follow."""

    wake: Callable[[], None]
    """Called from any thread once `filled` has an answer."""

    def place(self, table: ExpertTable) -> None:
        """Load the instance's experts of a table, and let rows follow it."""

    def fill(self, number: int, table: ExpertTable) -> None:
        """Begin to load the instance's experts of a table, beside the steps.

        It ends what was begun before. No row may visit a slot that another expert gets.
        """

    def filled(self) -> tuple[int, str] | None:
        """Return once what ended: (number, "" or a sentence about what failed)."""

    def stop(self) -> None:
        """End what `fill` has begun, and forget its answer."""

    def follow(self, table: ExpertTable) -> None:
        """Let rows follow a table whose experts are here, between two steps."""

    def loads(self) -> tuple[bytes, ...]:
        """Return ExpertLoad.pairs since the last call; empty if nothing counts them."""

    def held(self) -> tuple[bytes, ...]:
        """Return Hello.experts, once stopped; empty before `place`."""


class ExpertTables:
    """The table that windows follow, and those that are coming. Used from the decode thread."""

    def __init__(self, instance: int, slots: ExpertSlots, events: list[Report]) -> None:
        """events: gets what the controller is told."""
        self._instance, self._events = instance, events
        self.slots = slots
        """Where the experts are."""
        self.report_s = REPORT_S
        self._reported_s = time.monotonic()
        self._number = 0
        self._coming: dict[int, ExpertTable] = {}

    def begin_term(self, table: ExpertTable | None) -> None:
        """Hold the experts of a term's first table; None: they stay where they are."""
        self.slots.stop()
        self._number = 0
        self._coming.clear()
        if table is not None:
            self.slots.place(table)
        self.slots.loads()

    def change(self, number: int, table: ExpertTable) -> None:
        """Load what this instance lacks of a coming table (ChangeExperts)."""
        self._coming[number] = table
        self.slots.fill(number, table)

    def begin_window(self, window: int, number: int) -> None:
        """Let rows follow this table from this window on."""
        if number != self._number:
            self._report(window - 1)
            self._number = number
            self.slots.follow(self._coming[number])
            self._coming = {each: self._coming[each] for each in self._coming if each > number}

    def end_window(self, window: int) -> None:
        """Report the loads now and then."""
        if time.monotonic() - self._reported_s >= self.report_s:
            self._report(window)

    def poll(self) -> None:
        """Report experts that have come."""
        if (filled := self.slots.filled()) is not None:
            self._events.append(ExpertsHere(self._instance, *filled))

    def _report(self, window: int) -> None:
        self._reported_s = time.monotonic()
        if pairs := self.slots.loads():
            self._events.append(ExpertLoad(self._instance, self._number, window, pairs))
