"""The brain: plan = scheduler.plan_window(events, now_us), a pure function of state, events and
time.

Enters: events and the controller's time. Leaves: plans: windows, transfers, fences, placements,
ends. Does not know: clocks, sockets, tokens, who carries the plan out. Every end of a request goes
through `_end`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from typing import Any

from control_plane.scheduler.cluster_state import ClusterState
from control_plane.scheduler.explanation import Explainer
from control_plane.scheduler.frame_pool import Run
from control_plane.scheduler.layout import num_growth_pages
from control_plane.scheduler.lowering import Lowering
from control_plane.scheduler.page_moves import PageMoves
from control_plane.scheduler.policies.registry import make_policy
from control_plane.scheduler.prefix_sharing import PrefixSharing
from control_plane.scheduler.promise import Promise
from control_plane.scheduler.quarantine import Quarantine
from control_plane.scheduler.request import PARKED, RUNNABLE, RUNNING, TRANSFERRING, Request
from control_plane.scheduler.waiting_queue import WaitingQueue, invalidity
from nanocp.config import ClusterConfig, SchedulerConfig
from nanocp.plan import (
    PAGE_SIZE,
    AbortRequested,
    Arrival,
    Ended,
    Event,
    Fence,
    FinishReason,
    InstanceLoad,
    InstanceLost,
    InstancePlan,
    Placement,
    Plan,
    Preempted,
    TargetRun,
    Transfer,
    TransferDone,
    TransferFailed,
    TransferFenced,
    WindowDone,
)

MAX_WINDOWS_IN_FLIGHT = 2
_MAX_PASSED = 32
"""Requests that one call tries and leaves in the queue: a full queue costs no more than this many
tries a call."""


class Scheduler:
    """The one centralized scheduler of a cluster (4.1, 4.2)."""

    def __init__(
        self, cluster: ClusterConfig, scheduler: SchedulerConfig, explainer: Explainer | None = None
    ) -> None:
        """Raises ValueError for an unknown policy."""
        self._cluster = cluster
        self._config = scheduler
        self._policy = make_policy(scheduler)
        self._promise = Promise(scheduler)
        self._state = ClusterState(cluster, MAX_WINDOWS_IN_FLIGHT * scheduler.steps_per_window)
        self._explainer = explainer
        if explainer is not None:
            self._policy = explainer.watch(self._policy, self._state, scheduler)
        self._queue = WaitingQueue(scheduler)
        self._lowering = Lowering(cluster.num_instances)
        self._quarantine = Quarantine(cluster.num_instances)
        self.prefix_sharing = PrefixSharing(self._state, scheduler.prefix_sharing)
        self._moves = PageMoves(self._state, self._lowering, scheduler.max_moving_pages)
        self._ticket_owner: dict[int, Request] = {}
        self._num_tickets = 0
        self._runnable: dict[int, Request] = {}
        self._parked: list[tuple[int, int]] = []
        """(priority, request id), ascending: the last is the newest of the lowest class."""
        self._away: set[int] = set()
        """Preempted requests that have not come back to the queue."""
        self._num_live_rows = 0
        self._next_window = 0
        self._unreported: dict[int, int] = {}  # window in flight -> instances yet to report it
        self._run_due: dict[int, list[tuple[int, int]]] = {}
        """window -> (priority, request id) of rows that then come to the end of a run of pages."""
        self._exits: dict[int, list[int]] = {}  # window -> rows that need not be in it
        self._lost: str | None = None
        self._now_us = 0
        self._retry_queue = False
        """Something changed since the queue was last walked."""
        self._transfers: list[Transfer] = []
        self._fences: list[Fence] = []
        self._placements: dict[int, Request] = {}  # placed, or changed since the last answer
        self._ended: list[Ended] = []
        self._preempted: list[Preempted] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            WindowDone: self._window_done,
            Arrival: self._arrive,
            TransferDone: self._transfer_done,
            AbortRequested: self._abort,
            TransferFenced: self._transfer_fenced,
            TransferFailed: self._transfer_failed,
            InstanceLost: self._instance_lost,
        }

    # --- the door

    def plan_window(self, events: Sequence[Event], now_us: int) -> Plan:
        """Take events in their order, decide, and issue a window if there are rows and fewer than
        two in flight.

        now_us is the controller's monotonic time in microseconds; it never goes back.
        """
        assert now_us >= self._now_us, f"time went back from {self._now_us} to {now_us} us"
        self._now_us = now_us
        handlers = self._handlers
        for event in events:
            handlers[type(event)](event)
        self._expire()
        issues = self._lost is None and len(self._unreported) < MAX_WINDOWS_IN_FLIGHT
        if issues:
            self._retire_exits()
            self._finish_moves()
            self._grow_rows()
            self._rebind()
        self._place_waiting()
        if issues:
            self._start_runnable()
            self._break_deadlock()
            self._start_moves()
        return self._answer(issues and self._num_live_rows > 0)

    @property
    def decided(self) -> tuple[ClusterState, WaitingQueue]:
        """Who is placed and where, and who waits: to look at only."""
        return self._state, self._queue

    def loads(self) -> tuple[InstanceLoad, ...]:
        """What is decided for each instance."""
        return tuple(self._state.load(instance) for instance in range(self._cluster.num_instances))

    @property
    def num_waiting(self) -> int:
        """Requests in the waiting queue, and preempted ones on their way back to it."""
        return len(self._queue) + len(self._away)

    @property
    def next_deadline_us(self) -> int | None:
        """When the next request expires, unless it is placed before: the latest time for another
        call."""
        return self._queue.next_deadline_us

    @property
    def num_running(self) -> int:
        """Requests that are placed and have not ended: in transfer, runnable, running or parked."""
        return len(self._state.requests)

    def placement(self, request_id: int) -> Placement | None:
        """Where a placed request lives; None if it waits, has ended or is unknown."""
        request = self._state.requests.get(request_id)
        return request.placement(self._state.step) if request else None

    # --- events

    def _arrive(self, arrival: Arrival) -> None:
        if self._lost is not None:
            self._ended.append(Ended(arrival.request_id, FinishReason.FAILED, self._lost))
        elif arrival.resumes:
            self._come_back(arrival)
        elif invalid := invalidity(arrival, self._cluster):
            self._ended.append(Ended(arrival.request_id, FinishReason.INVALID, invalid))
        elif refusal := self._queue.refusal(arrival):
            self._ended.append(Ended(arrival.request_id, FinishReason.REFUSED, refusal))
        else:
            self._queue.append(arrival, self._now_us)
            self._retry_queue = True

    def _come_back(self, arrival: Arrival) -> None:
        if arrival.request_id in self._away:
            self._away.remove(arrival.request_id)
            self._queue.append(arrival, self._now_us)
            self._retry_queue = True
        else:
            self._ended.append(
                Ended(
                    arrival.request_id, FinishReason.ABORTED, "it was ended while it was preempted"
                )
            )

    def _window_done(self, event: WindowDone) -> None:
        if self._lost is not None:
            return
        for request_id, num_tokens, _ in event.finished:
            self._promise.ended(num_tokens)
            request = self._state.requests.get(request_id)
            if request is not None:  # else aborted, or left out because max_tokens were planned
                self._end(request, None)
        window = event.window
        for held in self._quarantine.window_reported(event.instance, window):
            self._free(held)
        num_left = self._unreported[window] - 1
        if num_left:
            self._unreported[window] = num_left
        else:
            del self._unreported[window]

    def _abort(self, event: AbortRequested) -> None:
        self._end_by_id(event.request_id, FinishReason.ABORTED, "aborted")

    def _transfer_failed(self, event: TransferFailed) -> None:
        if request := self._ticket_owner.get(event.ticket):
            self._end(request, FinishReason.FAILED, event.message)

    def _transfer_fenced(self, event: TransferFenced | TransferDone) -> None:
        for held in self._quarantine.receiver_answered(event.ticket, event.instance):
            self._free(held)

    def _transfer_done(self, event: TransferDone) -> None:
        request = self._ticket_owner.get(event.ticket)
        if request is None:  # it ended meanwhile
            self._transfer_fenced(event)
            return
        request.receivers.pop(event.instance, None)
        if not request.receivers:
            del self._ticket_owner[event.ticket]
            request.ticket = None
            if request.move is None:
                self.prefix_sharing.written(request)
                self._make_runnable(request)
            else:
                self._moves.arrived.append(request)

    def _instance_lost(self, event: InstanceLost) -> None:
        if self._lost is not None:
            return
        self._lost = f"instance {event.instance} was lost"
        waiting = [entry.arrival.request_id for entry in self._queue]
        for request_id in sorted([*waiting, *self._away, *self._state.requests]):
            self._end_by_id(request_id, FinishReason.FAILED, self._lost)
        for held in self._quarantine.give_up():  # nobody will answer, and nothing will be placed
            self._free(held)

    # --- ends

    def _expire(self) -> None:
        while (waiting := self._queue.expired(self._now_us)) is not None:
            waited_ms = (self._now_us - waiting.arrived_us) // 1000
            message = f"the request was not placed before its deadline: it waited {waited_ms} ms in the queue"
            self._end_by_id(waiting.arrival.request_id, FinishReason.EXPIRED, message)

    def _end_by_id(self, request_id: int, reason: FinishReason, message: str) -> None:
        if request := self._state.requests.get(request_id):
            self._end(request, reason, message)
            return
        waits = self._queue if request_id in self._queue else self._away
        if request_id in waits:
            waits.remove(request_id)
            self._retry_queue = True
            self._ended.append(Ended(request_id, reason, message))

    def _end(self, request: Request, reason: FinishReason | None, message: str = "") -> None:
        """Whatever it was doing, it stops; its frames go through quarantine. No reason: its last
        token tells, or it was preempted."""
        request_id = request.request_id
        last_window = request.last_window
        if request.state is RUNNING:
            last_window = self._next_window - 1
            self._lowering.suspend(request)
            self._num_live_rows -= 1
        elif request.state is PARKED:
            self._parked.remove((request.priority, request_id))
        elif request.state is RUNNABLE:
            del self._runnable[request_id]
        if request.is_started:
            self._lowering.end(request)
        if request.ticket is not None:
            del self._ticket_owner[request.ticket]
            self._fences.append(Fence(request.ticket, tuple(sorted(request.receivers))))
        self._moves.drop(request)
        frames = self._state.remove(request)
        self._free(
            self._quarantine.hold(
                frames, last_window, request.ever_bound, request.ticket, request.receivers
            )
        )
        self._retry_queue = True
        if reason is not None:
            self._ended.append(Ended(request_id, reason, message))

    def _free(self, held: dict[int, list[Run]]) -> None:
        self._state.free(held)
        self._retry_queue = True

    # --- placement (4.2.2, 4.2.3)

    def _place_waiting(self) -> None:
        # A row that is parked or was preempted comes before a new one: it has tokens to continue.
        if not self._retry_queue or self._parked or self._away:
            return
        self._retry_queue = False
        placed: list[int] = []
        num_passed = 0
        for arrival, arrived_us in self._queue:
            if self._place(arrival):
                placed.append(arrival.request_id)
                continue
            num_passed += 1
            may_be_passed = (
                self._now_us - arrived_us < self._config.max_overtake_us and not arrival.resumes
            )
            if num_passed == _MAX_PASSED or not may_be_passed:
                break
        for request_id in placed:
            self._queue.remove(request_id)

    def _place(self, arrival: Arrival) -> bool:
        state = self._state
        chosen = self._policy.place(state, arrival.prompt_len, self._next_window)
        # A request that was preempted once is promised all, and parks no more.
        num_promised = (
            arrival.max_tokens if arrival.resumes else self._promise.num_tokens(arrival.max_tokens)
        )
        num_growth = num_growth_pages(arrival.prompt_len, num_promised)
        choice, shared, laid_out = self.prefix_sharing.lay_out(chosen, arrival, num_growth)
        if self._explainer is not None:
            self._explainer.tried(
                arrival, choice, num_growth, laid_out[1] if laid_out else None, shared
            )
        if laid_out is None:
            return False
        request = Request.from_arrival(arrival, choice.moe_binding)
        state.place(request, *laid_out, shared.runs)
        self.prefix_sharing.placed(request, arrival)
        self._placements[request.request_id] = request
        if arrival.needs_prefill and arrival.prompt_len > 1 + request.num_shared * PAGE_SIZE:
            request.state = TRANSFERRING
            self._issue_ticket(
                request, arrival.prompt_len - 1, request.targets(arrival.prompt_len - 1)
            )
        else:
            self._make_runnable(request)
        return True

    def _issue_ticket(
        self,
        request: Request,
        num_tokens: int,
        targets: tuple[TargetRun, ...],
        source: int | None = None,
    ) -> None:
        self._num_tickets += 1
        request.ticket = self._num_tickets
        request.receivers = {target.instance: None for target in targets}
        self._ticket_owner[request.ticket] = request
        self._transfers.append(
            Transfer(request.ticket, request.request_id, num_tokens, targets, source)
        )

    def _make_runnable(self, request: Request) -> None:
        request.state = RUNNABLE
        self._runnable[request.request_id] = request

    # --- rows at a window's edge

    def _retire_exits(self) -> None:
        """Rows whose max_tokens steps are all planned leave; the last token tells the front end."""
        for request_id in self._exits.pop(self._next_window, ()):
            request = self._state.requests.get(request_id)
            if request and request.state is RUNNING and request.exit_window == self._next_window:
                self._end(request, None)

    def _grow_rows(self) -> None:
        """Every row that needs a page in the next window gets it, or is parked (docs/protocol.md,
        pages ahead), by class and by age."""
        for _, request_id in sorted([*self._parked, *self._run_due.pop(self._next_window, ())]):
            request = self._state.requests.get(request_id)
            if request is not None and request.state is PARKED:
                self._unpark(request)
                continue
            if request is None or request.state is not RUNNING:
                continue
            if self._window_of(request, request.tail_end) != self._next_window:
                continue  # it was parked since it was told to come
            if self._fill_window(request):
                self._enter_runs(request)
                continue
            self._lowering.suspend(request)
            request.last_window = self._next_window - 1
            self._num_live_rows -= 1
            self._park(request)

    def _fill_window(self, request: Request) -> bool:
        """Commit the pages that the row needs up to the end of the next window; False if some
        cannot be."""
        while True:
            position = request.num_pages * PAGE_SIZE
            if (
                position >= request.kv_len_max
                or self._window_of(request, position) > self._next_window
            ):
                return True
            holder = self._policy.holder(self._state, request, self._next_window)
            if holder is None:
                return False
            num_promised = self._promise.num_tokens(request.kv_len_max - position + 1)
            wanted = max(num_growth_pages(position, num_promised), 1)
            self._append_pages(request, holder, min(wanted, self._state.pools[holder].num_free))

    def _append_pages(self, request: Request, holder: int, count: int) -> None:
        is_new = holder not in request.pages_on
        if holder != request.runs[-1].instance:
            self._placements[request.request_id] = request
        runs = self._state.append_pages(request, holder, count)
        if request.is_started:
            self._lowering.append_pages(request, runs, is_new, request.state is RUNNING)

    def _enter_runs(self, request: Request) -> None:
        """The running row goes through every run that ends in the next window; then it is due
        again."""
        while (position := request.tail_end) < request.kv_len_max:
            window = self._window_of(request, position)
            if window > self._next_window:
                self._run_due.setdefault(window, []).append((request.priority, request.request_id))
                return
            self._state.enter_next_run(request)

    def _window_of(self, request: Request, position: int) -> int:
        """The window in which the row appends at the position."""
        since_step = request.since_step if request.state is RUNNING else self._state.step
        return (since_step + position - request.position) // self._config.steps_per_window

    def _park(self, request: Request) -> None:
        self._state.park(request)
        insort(self._parked, (request.priority, request.request_id))

    def _unpark(self, request: Request) -> None:
        if self._fill_window(request):
            self._parked.remove((request.priority, request.request_id))
            self._run(request)

    def _run(self, request: Request) -> None:
        """The row is in every window from the next one on."""
        self._state.run(request)
        self._num_live_rows += 1
        num_left = request.kv_len_max - request.position
        num_steps = self._config.steps_per_window
        request.exit_window = -(-(request.since_step + num_left) // num_steps)
        self._exits.setdefault(request.exit_window, []).append(request.request_id)
        self._enter_runs(request)
        if request.is_started:
            self._lowering.resume(request)
        else:
            self._lowering.start(request)

    def _start_runnable(self) -> None:
        runnable, self._runnable = self._runnable, {}
        for request in runnable.values():
            if self._fill_window(request):
                self._run(request)
            else:
                self._park(request)

    def _break_deadlock(self) -> None:
        """Every row is parked and nothing else will free a frame: rows are preempted until one can
        go on.

        The newest of the lowest class goes first. No window is in flight, so each has stopped
        nowhere on its own, and how far it has come is known.
        """
        while self._parked and not (
            self._num_live_rows or self._unreported or self._quarantine or self._ticket_owner
        ):
            newest = self._state.requests[self._parked[-1][1]]
            self._preempted.append(Preempted(newest.request_id, newest.position + 1))
            self._end(newest, None)
            self._away.add(newest.request_id)
            for _, request_id in list(self._parked):
                self._unpark(self._state.requests[request_id])

    def _rebind(self) -> None:
        """4.2.1: the policy's wishes, one at a time, as far as the bounds allow."""
        num_hand_offs: dict[tuple[int, int], int] = {}
        moved: set[int] = set()
        for request, new in self._policy.rebindings(self._state, self._next_window):
            old = request.moe_binding
            num = num_hand_offs.get((old, new), 0)
            # A row moves once at an edge, and not at the one where it starts or comes back.
            # Nor does it while pages of it move: its links are committed for where it is.
            is_still = (
                request.request_id in moved
                or request.since_step == self._state.step
                or request.move
            )
            if new == old or is_still or num >= self._cluster.bounds.max_hand_offs:
                continue
            if not self._state.can_rebind(request, new):
                continue
            num_hand_offs[old, new] = num + 1
            moved.add(request.request_id)
            self._state.rebind(request, new)
            self._lowering.rebind(request, old, request.position_at(self._state.step))
            self._placements[request.request_id] = request

    # --- page moves (4: re-levelling without a pause)

    def _start_moves(self) -> None:
        for request, move in self._moves.start(self._policy.moves(self._state, self._next_window)):
            num_tokens = (move.first_page + move.num_pages) * PAGE_SIZE
            self._issue_ticket(request, num_tokens, move.targets, move.source)

    def _finish_moves(self) -> None:
        for request, frames in self._moves.finish():
            # The windows sent so far read the old frames (docs/protocol.md, quarantine).
            self._free(
                self._quarantine.hold(frames, self._next_window - 1, request.ever_bound, None, ())
            )
            self._placements[request.request_id] = request

    # --- the answer

    def _answer(self, issues: bool) -> Plan:
        window: int | None = None
        plans: tuple[InstancePlan, ...] = ()
        if issues:
            window = self._next_window
            num_steps = self._config.steps_per_window
            plans = self._lowering.emit(window, self._state.step, num_steps)
            self._unreported[window] = self._cluster.num_instances
            self._next_window += 1
            self._state.step += num_steps
        plan = Plan(
            window,
            plans,
            tuple(self._transfers),
            tuple(self._fences),
            tuple(request.placement(self._state.step) for request in self._placements.values()),
            tuple(self._ended),
            tuple(self._preempted),
        )
        self._transfers, self._fences, self._placements, self._ended, self._preempted = (
            [],
            [],
            {},
            [],
            [],
        )
        return plan
