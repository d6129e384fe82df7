"""Windows of instances, and the tickets that go beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from control_plane.coordinator.flights.expert_changes import expert_changes
from control_plane.coordinator.flights.flights import Flights
from control_plane.coordinator.flights.transfers import Transfers, cached_tokens, fetched_pages
from control_plane.coordinator.flights.windows import WindowsInFlight
from control_plane.coordinator.members.members import Members
from control_plane.observe.metrics.registry import Metrics
from control_plane.ports.controller_interface import Submission
from control_plane.scheduler.invariants import check
from control_plane.scheduler.scheduler import Scheduler
from control_plane.scheduler.windows.row_windows import MAX_WINDOWS_IN_FLIGHT
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.members import ExpertLoad, ExpertsHere, Member, Report, Resync
from nanocp.values.passes import ServiceEvent
from nanocp.values.plan import (
    Event,
    Plan,
    TransferDone,
    TransferFenced,
    TransferMissed,
    WindowDone,
)


class DecodeFlights(Flights):
    """The windows of a decode cluster; see flights.Flights for every method."""

    def __init__(
        self,
        cluster: ClusterConfig,
        scheduler: SchedulerConfig,
        members: Members,
        metrics: Metrics,
        recomputes: bool = True,
    ) -> None:
        """recomputes: see Transfers. Raises ValueError for an unknown policy."""
        self.scheduler = Scheduler(cluster, scheduler)
        self._members = members
        self._metrics = metrics
        self._windows = WindowsInFlight(cluster.num_instances)
        self.transfers: Transfers = Transfers(members, scheduler.num_drafts > 0, recomputes)
        self.experts = expert_changes(cluster, members, metrics.experts)

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def is_full(self) -> bool:
        return len(self._windows) >= MAX_WINDOWS_IN_FLIGHT

    @property
    def oldest(self) -> int | None:
        return self._windows.oldest

    @property
    def newest_ticket(self) -> int:
        return self.scheduler.tickets.num_issued

    def missing(self) -> list[int]:
        return self._windows.missing()

    def plan(self, events: Sequence[ServiceEvent], now_us: int) -> Plan:
        plan = self.scheduler.plan_window(cast(Sequence[Event], events), now_us)
        self._metrics.recovery.waits(len(self.scheduler.held), self.transfers.num_prefilling)
        if self.scheduler.offload.is_on:
            self._metrics.offload.planned(self.scheduler.offload.reading)
        return plan

    def prepare(self, plan: Plan, submitted: Mapping[int, Submission]) -> Iterator[Event]:
        num_fetched = fetched_pages(plan.fetches)
        for transfer in plan.transfers:
            if transfer.source is not None:
                self._metrics.scheduling.moving(len(transfer.instances()))
            submission = submitted.get(transfer.request_id)
            number = num_fetched.get(transfer.ticket, 0)
            if failed := self.transfers.start(transfer, submission, number):
                yield failed
        for fetch in plan.fetches:
            self._members.send(Member("instance", fetch.instance), fetch)
        # After the fetches: a slot may be given to another page once its ticket is over.
        for stow in plan.stows:
            self._members.send(Member("instance", stow.instance), stow)
        for fence in plan.fences:
            self.transfers.fence(fence)
        self._metrics.engines.awaited(self.transfers.num_pages_awaited)

    def cached_tokens(self, plan: Plan) -> Mapping[int, int]:
        return cached_tokens(plan)

    def send(self, plan: Plan) -> None:
        plans = plan.instances
        if self.experts is not None and (number := self.experts.sent(plans[0].window)):
            plans = tuple(each._replace(experts=number) for each in plans)
        self._windows.sent(plans)
        self._metrics.instances.sent(plans[0].two_lanes)
        for instance_plan in plans:
            self._members.send(Member("instance", instance_plan.instance), instance_plan)

    def window_done(self, done: WindowDone) -> bool:
        is_complete = self._windows.reported(done.instance, done.window)
        if is_complete and self.experts is not None:
            self.experts.window_done(done.window)
        return is_complete

    def reported(self, member: Member, report: Report) -> Event | None:
        match report:
            case TransferDone(ticket, instance) | TransferFenced(ticket, instance):
                self.transfers.answered(ticket, instance)
                return report
            case TransferMissed():
                return report
            case ExpertLoad() | ExpertsHere():
                if self.experts is not None:
                    self.experts.reported(report)
                return None
            case Resync(window, reason):
                text = f"{member} needs the full table of window {window}: {reason}"
                self._members.output.warn(text)
                self._metrics.instances.resynced()
                full_plan = self._windows.full_plan(member.instance or 0, window)
                self._members.send(member, full_plan)
                return None
        raise ValueError(f"{member} says {report}, which has no meaning here")

    def begin_term(self, seats: Sequence[int], keeps_rows: bool) -> None:
        self._windows.begin_term(seats, keeps_rows)
        if self.experts is not None:
            self.experts.begin_term()

    def end_term(self) -> None:
        self._windows.abandon()
        if self.experts is not None:
            self.experts.end_term()
        self.transfers.end_term()

    def check(self) -> None:
        check(self.scheduler, self._windows.tables)
