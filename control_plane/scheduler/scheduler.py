"""The scheduler: a plan follows from state, events and time alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

from control_plane.scheduler.base import SchedulerBase
from control_plane.scheduler.explanation import Explainer
from control_plane.scheduler.pages.offload import Offload
from control_plane.scheduler.pages.prefix_sharing import PrefixSharing
from control_plane.scheduler.pages.quarantine import Quarantine
from control_plane.scheduler.pages.tickets import Tickets
from control_plane.scheduler.policies.layout import num_growth_pages, obstacle
from control_plane.scheduler.policies.registry import make_policy
from control_plane.scheduler.queue.deferral import Deferral, tokens_read
from control_plane.scheduler.queue.known_requests import KnownRequests
from control_plane.scheduler.state.answer import Answer
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.request import TRANSFERRING, Request
from control_plane.scheduler.terms.held_requests import HeldRequests
from control_plane.scheduler.terms.seat_change import SeatChange
from control_plane.scheduler.windows.carry_moves import CarryMoves
from control_plane.scheduler.windows.lanes import Lanes
from control_plane.scheduler.windows.lowering import Lowering
from control_plane.scheduler.windows.page_moves import PageMoves
from control_plane.scheduler.windows.row_windows import MAX_WINDOWS_IN_FLIGHT, RowWindows
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import (
    PAGE_SIZE,
    Arrival,
    Event,
    FinishReason,
    Plan,
    Regrouped,
    Resubmitted,
    SeatsWanted,
    TookOver,
    TransferDone,
    TransferFailed,
    TransferFenced,
    TransferMissed,
    WindowDone,
)

_instance_and_window = attrgetter("instance", "window")


class Scheduler(SchedulerBase):
    """The one centralized scheduler of a cluster (4.1, 4.2)."""

    def __init__(
        self, cluster: ClusterConfig, scheduler: SchedulerConfig, explainer: Explainer | None = None
    ) -> None:
        """Raises ValueError for an unknown policy."""
        self._policy = make_policy(scheduler)
        num_steps = scheduler.steps_per_window
        self._state = state = ClusterState(cluster, MAX_WINDOWS_IN_FLIGHT * num_steps)
        answer = Answer()
        self.tickets = tickets = Tickets(answer, state.loads.arriving_tokens)
        deferral = Deferral(scheduler, partial(tokens_read, state, tickets))
        super().__init__(cluster, scheduler, answer, deferral)
        self._explainer = explainer
        if explainer is not None:
            self._policy = explainer.watch(self._policy, state, scheduler)
            explainer.deferred = deferral
        lanes = Lanes(cluster.num_instances, scheduler)
        self._lowering = lowering = Lowering(cluster.num_instances, lanes)
        policy, promise, share = self._policy, self._promise, self._admission.fair_share
        self._rows = RowWindows(state, lowering, policy, promise, answer, scheduler, lanes, share)
        self._quarantine = quarantine = Quarantine(cluster.num_instances)
        self.requests = KnownRequests(state, self._admission, quarantine)
        self.prefix_sharing = sharing = PrefixSharing(state, scheduler.prefix_sharing)
        self.offload = Offload(scheduler, state, sharing, tickets, quarantine, answer)
        self._moves = PageMoves(self._state, self._lowering, scheduler.max_moving_pages)
        self._carries = CarryMoves(state, lowering, self._rows, quarantine, tickets)
        self.held = HeldRequests(self._state, self.prefix_sharing, scheduler.held_timeout_us)
        self._change = SeatChange(
            self._state, self._lowering, self._rows, self._moves, self._quarantine
        )
        self._handlers |= {
            TransferDone: self._transfer_done,
            TransferFenced: self._transfer_fenced,
            TransferFailed: self._transfer_failed,
            TransferMissed: self._transfer_missed,
            Regrouped: self._regrouped,
            SeatsWanted: lambda event: self._change.begin(event.seats),
            TookOver: self._took_over,
        }

    @property
    def _waits_until_us(self) -> int | None:
        return self.held.next_deadline_us

    def plan_window(self, events: Sequence[Event], now_us: int) -> Plan:
        """Take events in order and decide.

        The plan has a window if rows run and fewer than two windows are in flight.

        now_us: the controller's monotonic time, in microseconds; it never goes back.
        """
        self._admission.begin_call(now_us)
        by_kind: Iterable[tuple[type, Iterable[Any]]] = groupby(events, type)
        for kind, of_kind in by_kind:
            if kind is WindowDone:
                self._windows_done([*of_kind])
                continue
            for event in of_kind:
                self._handlers[kind](event)
        for request_id in self._expire():
            self.offload.forget(request_id)
        rows = self._rows
        if self._term.is_over or self._change.has_settled:
            return self._answer.take(None, (), self._state.step)
        is_ending = self._change.is_drained and not self.held
        moving = self.tickets or self._moves.num_pages or self._carries
        is_last = is_ending and not (moving or rows.runnable)
        if is_last and not self._lowering.has_pending:
            plan = self._answer.take(None, (), self._state.step)
            return replace(plan, is_settled=self._change.settle())
        issues = self._admission.failure is None and rows.may_issue
        begins = (self._state.step, rows.advances.slack) if rows.drafts.most else None
        if issues:
            for request in rows.exits():
                self._release(request)
            self._finish_moves()
            self._change.stop_rows()
            # A row with a state stands still when it is re-bound, before it grows for the window.
            if self._state.cluster.carry_pages:
                rows.rebind(self._change.rebindings(), may_carry=not is_ending)
            rows.grow()
            if not self._state.cluster.carry_pages:
                rows.rebind(self._change.rebindings())
        if not is_ending:
            self._place_waiting()
        if issues:
            self._carries.start()
            rows.start_runnable()
            self._break_deadlock()
            if not is_ending:
                self._start_moves()
                self._break_deadlock(by_moving=True)
                self.offload.plan()
            # The last window of a term brings all tables up to date.
            if rows.num_running or is_last:
                window, plans = rows.issue()
                return self._answer.take(window, plans, self._state.step, begins)
        return self._answer.take(None, (), self._state.step, begins)

    # --- events

    def _goes_on(self, request: Request | None, arrival: Arrival) -> bool:
        # Between two terms no ticket is issued: the attempt is void when the next term begins.
        again = self.held.begin_attempt(request, arrival, not self._term.is_over)
        if again is None:
            return False
        if again.state is TRANSFERRING:
            assert again.carry is not None
            self.tickets.issue(again, again.position, (again.carry,))
        else:
            self._rows.come_back(again)
        self._answer.placed[again.request_id] = again
        return True

    def _windows_done(self, reports: Sequence[WindowDone]) -> None:
        if self._admission.failure is not None:
            return
        # Every instance reports every window, and most reports say no more than that.
        for report in reports:
            if report.advanced:
                self._rows.advances.told(report.window, report.advanced)
            if report.drafts:
                self._rows.drafts.reported(report.drafts)
            if report.written:
                self.offload.written(report.written)
            if report.finished:
                self._finished(report)
        self.requests.free(*self._quarantine.windows_reported(map(_instance_and_window, reports)))
        self.offload.window_reported()
        last, rows, admission = self._quarantine.last_complete, self._rows, self._admission
        rows.reported(last)
        if rows.drafts.most:
            admission.deferral.generated(reports)
        now_us, queue = admission.now_us, admission.queue
        admission.deferral.reported(last, bool(rows.in_flight), now_us, queue)
        admission.should_walk |= len(admission.deferral) > 0

    def _finished(self, report: WindowDone) -> None:
        for request_id, num_tokens, _ in report.finished:
            self._promise.ended(num_tokens)
            # Else it was aborted, or max_tokens were planned, or another attempt goes on.
            request = self._state.requests.get(request_id)
            if request is not None and request.is_row_of(report.window):
                self._release(request)

    def _transfer_failed(self, event: TransferFailed) -> None:
        if request := self.tickets.owner(event.ticket):
            self._end_by_id(request.request_id, FinishReason.FAILED, event.message)

    def _transfer_missed(self, event: TransferMissed) -> None:
        request = self.tickets.owner(event.ticket)
        self.offload.missed(event)
        if request is not None:
            self._preempt(request, request.arrival.prompt_len)

    def _transfer_fenced(self, event: TransferFenced | TransferDone) -> None:
        self.offload.answered(event)
        self.requests.free(*self._quarantine.receiver_answered(event.ticket, event.instance))

    def _transfer_done(self, event: TransferDone) -> None:
        request = self.tickets.owner(event.ticket)
        if request is None:  # it ended meanwhile
            self._transfer_fenced(event)
        elif self.tickets.confirmed(request, event.instance):
            self.offload.over(event.ticket)
            self._admission.should_walk |= self._config.max_unfilled_tokens > 0
            if request.carry_source is not None:
                self._carries.arrived.append(request)
            elif request.move is None:
                self.prefix_sharing.written(request)
                self._rows.add(request)
            else:
                self._moves.arrived.append(request)

    def _took_over(self, event: TookOver) -> None:
        self.tickets.num_issued = event.newest_ticket
        self.held.take_over(event, self._admission.now_us)

    def _regrouped(self, event: Regrouped) -> None:
        seats = event.seats or tuple(range(self._state.cluster.num_instances))
        if not event.keeps_rows:
            self._end_term(seats, {request: span for request, *span in event.restarts})
            self.held.wait(self._admission.now_us)
        for instance in self._change.serve(seats, self._term.lost_seats):
            self.offload.lose(instance)
        self._term.begin()
        self._admission.should_walk = True

    def _end_term(self, seats: Sequence[int], restarts: Mapping[int, Sequence[int]]) -> None:
        absent = set(range(self._state.cluster.num_instances)).difference(seats)
        self.requests.free(*self._quarantine.end_term(self._rows.next_window - 1))
        self._admission.first_windows.lost(self._rows.lost_in_first_window(self._term.lost_seats))
        for request in list(self._state.requests.values()):
            self._moves.cancel(request)
            self._carries.drop(request)
            if not self.held.end_term(request, self._term.lost_seats, absent, restarts):
                self.requests.free(self._state.remove(request))
        self.tickets.end_term()
        self.offload.end_term()
        self._rows.end_term()
        self._admission.deferral.end_term(self._rows.next_window - 1)
        self._lowering.end_term()

    def _resubmitted(self, event: Resubmitted) -> None:
        for request in self.held.end_wait():
            self._release(request)
        self._admission.should_walk = True

    # --- ends

    def _end_by_id(self, request_id: int, reason: FinishReason, message: str) -> None:
        is_placed = request_id in self._state.requests
        super()._end_by_id(request_id, reason, message)
        if not is_placed:
            self.offload.forget(request_id)

    def _preempt(self, request: Request, num_tokens: int) -> None:
        is_written = request.state is not TRANSFERRING
        self._release(request, self.offload.stow_all(request) if is_written else None)
        self._admission.preempted(request.request_id, num_tokens)

    def _release(self, request: Request, stowed: tuple[int, Sequence[int]] | None = None) -> None:
        """Give up the request's row, ticket and frames.

        The frames are free when quarantine ends (protocol.md, quarantine). stowed: the ticket
        under which they are copied, and who answers for it.
        """
        last_window = self._rows.remove(request)
        if request.is_started:
            self._lowering.end(request)
        self.tickets.fence(request)
        self.offload.released(request)
        self._moves.drop(request)
        self._carries.drop(request)
        self.held.drop(request)
        frames = self._state.remove(request)
        ticket, receivers = stowed or (request.ticket, request.receivers)
        bound = request.ever_bound
        self.requests.free(self._quarantine.hold(frames, last_window, bound, ticket, receivers))
        self._admission.should_walk = True

    # --- placement (4.2.2, 4.2.3)

    def _place_waiting(self) -> None:
        # A row that is parked goes before a new one: it has tokens to continue. So does a request
        # that the end of a term has interrupted.
        is_parked = len(self._rows.parked) > len(self._rows.stopped)
        if self._state.open and not (is_parked or self.held.is_waiting):
            self._admission.walk(self._place, len(self._state.open))

    def _place(self, arrival: Arrival) -> bool:
        if self.tickets.are_full(arrival, limit := self._config.max_unfilled_tokens):
            may_wait = f"{limit} prompt tokens of placed requests may wait for their KV"
            sentence = f"max_unfilled_tokens: {may_wait}"
            self._admission.note(arrival.request_id, lambda: sentence)
            return False
        state = self._state
        proposal = self._policy.place(state, arrival, self._rows.next_window)
        # A request that was preempted once is promised all, and parks no more. A cluster that has
        # lost instances may never have as much, so it promises no more than to others.
        is_whole = len(state.open) == self._state.cluster.num_instances
        num_promised = arrival.max_tokens
        if not (arrival.resumes and is_whole):
            num_promised = self._promise.num_tokens(arrival.max_tokens)
        num_growth = num_growth_pages(arrival.prompt_len, num_promised)
        layout = self.prefix_sharing.layout(proposal, arrival, num_growth)
        if self._explainer is not None:
            self._explainer.tried(arrival, proposal, num_growth, layout)
        if layout is None:
            self._admission.note(
                arrival.request_id,
                lambda: "{}: {}".format(*obstacle(state, proposal, num_growth)),
            )
            return False
        request = Request.from_arrival(arrival, layout.proposal.moe_binding)
        state.place(request, layout)
        self.prefix_sharing.placed(request, arrival)
        self._answer.placed[request.request_id] = request
        # Pages may be shared; a state is of this request alone.
        num_there = request.num_shared * PAGE_SIZE if request.carry is None else 0
        if arrival.needs_prefill and arrival.prompt_len > 1 + num_there:
            request.state = TRANSFERRING
            num_tokens = arrival.prompt_len - 1
            self.tickets.issue(request, num_tokens, request.targets(num_tokens))
        else:
            self._rows.add(request)
        self.offload.placed(request, arrival.is_recomputed)
        return True

    # --- at a window's edge

    def _break_deadlock(self, by_moving: bool = False) -> None:
        """Preempt rows until one can go on, if all are parked and nothing else will free a frame.

        The newest row of the lowest class goes first. No window is in flight, so no row can have
        stopped meanwhile, and its position is known. by_moving: all may have been stopped to move,
        and none has room for it; then until one can move.
        """
        rows = self._rows
        while rows.is_at_rest if by_moving else rows.is_stopped:
            if self._quarantine or self.tickets or self.held:
                break
            newest = self._state.requests[rows.parked[-1][1]]
            rows.advances.settle(newest)
            self._preempt(newest, newest.position + 1)
            rows.unpark()
            if by_moving:
                self._start_moves()

    # --- page moves (4: re-levelling without a pause)

    def _start_moves(self) -> None:
        of_policy = self._policy.moves(self._state, self._rows.next_window)
        wishes = chain(self._change.moves(), of_policy)
        for request, move in self._moves.start(wishes, self._rows.stopped):
            num_tokens = (move.first_page + move.num_pages) * PAGE_SIZE
            self.tickets.issue(request, num_tokens, move.targets, move.source)

    def _finish_moves(self) -> None:
        arrived = list(self._moves.finish())
        for request, _ in arrived:
            self._answer.placed[request.request_id] = request
        for request, frames in (*arrived, *self._carries.finish()):
            # The windows sent so far read the old frames (protocol.md, quarantine).
            last = self._rows.next_window - 1
            self.requests.free(self._quarantine.hold(frames, last, request.ever_bound, None, ()))
