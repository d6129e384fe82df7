"""What the coordinator asks of windows and passes alike: a protocol."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from control_plane.coordinator.flights.expert_changes import ExpertChanges
from control_plane.coordinator.flights.stages import StageLayouts
from control_plane.coordinator.flights.transfers import Transfers
from control_plane.observe.observed import ObservedScheduler
from control_plane.ports.controller_interface import Submission
from nanocp.values.members import Member, Report
from nanocp.values.passes import ServiceEvent
from nanocp.values.plan import Event, Plan, WindowDone


class Flights(Protocol):
    """One scheduler, and what of its plans is in flight. Used from the controller's thread.

    A flight is a window of instances (decode.py) or a pass of a pipeline (pipeline.py), from when
    it is sent until it is reported.
    """

    scheduler: ObservedScheduler
    transfers: Transfers | None = None
    """The tickets beside windows; None: beside passes there are none."""
    experts: ExpertChanges | None = None
    """The expert table of the term; None: no experts, or each instance has all."""
    stages: StageLayouts | None = None
    """The stages that have layers; None: instances have all of them."""

    def __len__(self) -> int:
        """Windows or passes in flight."""

    @property
    def is_full(self) -> bool:
        """Whether the scheduler issues no other one before one is reported."""

    @property
    def oldest(self) -> int | None:
        """The number of the oldest in flight, or None."""

    @property
    def newest_ticket(self) -> int:
        """The last ticket that was issued, 0 before the first: tickets only grow."""

    def missing(self) -> list[int]:
        """Instances that have not reported the oldest."""

    def plan(self, events: Sequence[ServiceEvent], now_us: int) -> Plan:
        """Call the scheduler."""

    def prepare(self, plan: Plan, submitted: Mapping[int, Submission]) -> Iterable[Event]:
        """Send all that goes before the window; yields what fails at once.

        submitted: requests that were submitted and not placed before.
        """

    def cached_tokens(self, plan: Plan) -> Mapping[int, int]:
        """Request that is placed now -> tokens of its prompt that other requests have written.

        A request without an entry computes its last token only.
        """

    def send(self, plan: Plan) -> None:
        """Send the plan's window or pass, of which there is one."""

    def window_done(self, done: WindowDone) -> bool:
        """Take a report; whether all that is awaited of its flight is here.

        Raises ValueError if the instance had no such flight to report.
        """

    def reported(self, member: Member, report: Report) -> ServiceEvent | None:
        """Take any other report of a member; returns what it is for the scheduler, if anything.

        Raises ValueError for one that has no meaning here.
        """

    def begin_term(self, seats: Sequence[int], keeps_rows: bool) -> None:
        """A term with these instances begins."""

    def end_term(self) -> None:
        """No member takes windows any more: nothing in flight will be reported."""

    def check(self) -> None:
        """Raise AssertionError if the scheduler's state is broken. Nothing may be in flight."""
