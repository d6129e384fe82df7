"""The rows of each window: they start, get pages ahead of their tokens, park and leave.

Every page that a row writes in a window is committed first (protocol.md, pages ahead).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Set
from itertools import chain

from control_plane.scheduler.policies.layout import num_growth_pages
from control_plane.scheduler.policies.policy import Policy
from control_plane.scheduler.queue.fair_share import FairShare
from control_plane.scheduler.state.answer import Answer
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.promise import Promise
from control_plane.scheduler.state.request import PARKED, RUNNABLE, RUNNING, Request
from control_plane.scheduler.windows.advances import Advances
from control_plane.scheduler.windows.drafts import Drafts
from control_plane.scheduler.windows.lanes import Lanes
from control_plane.scheduler.windows.lowering import Lowering
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.plan import PAGE_SIZE, InstancePlan

MAX_WINDOWS_IN_FLIGHT = 2


class RowWindows:
    """The rows by their state in the next window, and the windows in flight."""

    def __init__(
        self,
        state: ClusterState,
        lowering: Lowering,
        policy: Policy,
        promise: Promise,
        answer: Answer,
        config: SchedulerConfig,
        lanes: Lanes,
        fair_share: FairShare,
    ) -> None:
        """Begin without a row and without a window."""
        self.drafts = Drafts(config)
        self._num_drafts = 0
        """Most drafts of a row in each step of the next window."""
        self.advances = Advances(state, fair_share, config)
        self._state = state
        self._lowering = lowering
        self._policy = policy
        self._promise = promise
        self._answer = answer
        self._num_steps = config.steps_per_window
        self._lanes = lanes
        self._fair_share = fair_share
        self.next_window = 0
        self.in_flight: list[int] = []
        """Windows that some instance has not reported, ascending."""
        self.num_running = 0
        """Rows that are in every window from the last issued one on."""
        self.runnable: dict[int, Request] = {}
        """Rows that start in the next window, by request id."""
        self.parked: list[tuple[int, int]] = []
        """(priority, request id), ascending: the last is the newest of the lowest class."""
        self.stopped: set[int] = set()
        """Ids of requests whose rows are parked until their pages have moved."""
        self.carried: dict[int, Request] = {}
        """Rows stopped until their recurrent states are at their MoE bindings, by request id."""
        self._due: dict[int, list[tuple[int, int]]] = {}
        """Window -> (priority, request id) of rows that may reach the end of a run of pages in
        it."""
        self._exits: dict[int, list[int]] = {}
        """Window -> ids of rows that may have all max_tokens tokens before it."""

    # --- windows

    @property
    def may_issue(self) -> bool:
        """Return whether fewer than two windows are in flight."""
        return len(self.in_flight) < MAX_WINDOWS_IN_FLIGHT

    def issue(self) -> tuple[int, tuple[InstancePlan, ...]]:
        """Issue the next window to every instance; return its number and plans."""
        window, state = self.next_window, self._state
        two_lanes = 0
        if self._lanes.is_on:
            self._lowering.level_lanes(state.requests)
            num_links = max(map(state.committed.num_links, range(len(state.loads.num_rows))))
            num_rows = max((state.loads.num_rows[i] for i in state.open), default=0)
            two_lanes = self._lanes.order(window, num_rows, num_links)
        num_drafts = self.drafts.within(self._num_drafts, state.committed, state.bounds)
        plans = self._lowering.emit(window, state.step, self._num_steps, two_lanes, num_drafts)
        self.in_flight.append(window)
        self.advances.issued(window, self._num_steps * num_drafts)
        self.next_window += 1
        state.loads.step += self._num_steps
        self._fair_share.window(self._num_steps)
        return window, plans

    def reported(self, last_window: int) -> None:
        """Record that every instance has run the windows up to this one."""
        while self.in_flight and self.in_flight[0] <= last_window:
            del self.in_flight[0]
        self.advances.reported(last_window)

    def lost_in_first_window(self, lost: Set[int]) -> list[int] | None:
        """Return requests of lost instances whose rows began with a window in flight.

        None without such a window or a loss.
        """
        if not (self.in_flight and lost):
            return None
        first_step = self.in_flight[0] * self._num_steps
        return [
            request.request_id
            for request in self._state.requests.values()
            if request.state is RUNNING
            and request.since_step >= first_step
            and not lost.isdisjoint(request.ever_bound)
        ]

    def end_term(self) -> None:
        """Record that no row is in a window and no window is in flight."""
        self.in_flight.clear()
        self.advances.end_term()
        self.num_running = 0
        self._fair_share.end_term()
        self.runnable.clear()
        self.parked.clear()
        self.stopped.clear()
        self.carried.clear()
        self._due.clear()
        self._exits.clear()

    # --- rows that come and go

    def add(self, request: Request) -> None:
        """Start the row of a request, whose KV is in place, in the next window."""
        request.state = RUNNABLE
        self.runnable[request.request_id] = request

    def come_back(self, request: Request) -> None:
        """Start a row for a parked request once its pages are committed."""
        insort(self.parked, request.order)

    def remove(self, request: Request) -> int | None:
        """Take the row of an ended request out of the next windows.

        Returns the last window sent that contains it, or None.
        """
        self.stopped.discard(request.request_id)
        self.carried.pop(request.request_id, None)
        if request.state is RUNNING:
            self._suspend(request)
        elif request.state is PARKED:
            self.parked.remove(request.order)
        elif request.state is RUNNABLE:
            del self.runnable[request.request_id]
        self.advances.left(request.request_id, request.last_window)
        return request.last_window

    def exits(self) -> Iterator[Request]:
        """Yield running rows that surely have all tokens; the caller ends each."""
        for request_id in self._exits.pop(self.next_window, ()):
            request = self._state.requests.get(request_id)
            if request and request.state is RUNNING and request.exit_window == self.next_window:
                self.advances.settle(request)
                if request.position_at(self._state.step) >= request.kv_len_max:
                    yield request
                else:
                    self._enter_exit(request)

    def start_runnable(self) -> None:
        """Start every runnable row, or park it without room."""
        runnable, self.runnable = self.runnable, {}
        for request in runnable.values():
            if self._fill_window(request):
                self._run(request)
            else:
                self._park(request)

    def unpark(self) -> None:
        """Restart parked rows whose pages can be committed, by class and by age."""
        for _, request_id in list(self.parked):
            self._unpark(self._state.requests[request_id])

    def stop(self, request: Request) -> None:
        """Take the row out of the windows until its id leaves `stopped`."""
        if request.state is RUNNING:
            self._suspend(request)
            self._park(request)
        self.stopped.add(request.request_id)

    @property
    def is_at_rest(self) -> bool:
        """Return whether rows are parked, and none is in any window."""
        return bool(self.parked) and not self.num_running and not self.in_flight

    @property
    def is_stopped(self) -> bool:
        """Return whether rows are parked and nothing in a window can free a frame for them.

        Rows stopped until their pages have moved do not count.
        """
        return self.is_at_rest and len(self.parked) > len(self.stopped)

    # --- pages ahead

    def grow(self) -> None:
        """Choose the next window's drafts; commit its pages or park rows, by class and age.

        See protocol.md, pages ahead.
        """
        is_parked, loads = len(self.parked) > len(self.stopped), self._state.loads
        if self.drafts.most:
            num_rows = max((loads.num_rows[i] for i in self._state.open), default=0)
            kv_tokens = max(map(loads.kv_tokens, self._state.open), default=0)
            window = self.next_window
            self._num_drafts = self.drafts.of_window(window, is_parked, num_rows, kv_tokens)
            self.advances.settle_some(window)
        for _, request_id in sorted([*self.parked, *self._due.pop(self.next_window, ())]):
            request = self._state.requests.get(request_id)
            if request is not None and request.state is PARKED:
                self._unpark(request)
                continue
            if request is None or request.state is not RUNNING:
                continue
            if request.due_window != self.next_window:
                continue  # it was parked after it was entered here
            if self._fill_window(request):
                self._enter_runs(request)
                continue
            self._suspend(request)
            self._park(request)

    def _fill_window(self, request: Request) -> bool:
        self.advances.settle(request)
        end = request.position_at(self._state.step) + self.advances.reach(1, self._num_drafts)
        while True:
            position = request.num_pages * PAGE_SIZE
            if position >= min(end, request.kv_len_max):
                return True
            holder = self._policy.holder(self._state, request, self.next_window)
            if holder is None:
                return False
            num_promised = self._promise.num_tokens(request.kv_len_max - position + 1)
            wanted = max(num_growth_pages(position, num_promised), 1)
            self._append_pages(request, holder, min(wanted, self._state.frames[holder].num_free))

    def _append_pages(self, request: Request, holder: int, count: int) -> None:
        is_new = holder not in request.pages_on
        if holder != request.runs[-1].instance:
            self._answer.placed[request.request_id] = request
        runs = self._state.append_pages(request, holder, count)
        if request.is_started:
            self._lowering.append_pages(request, runs, is_new, request.state is RUNNING)

    def _enter_runs(self, request: Request) -> None:
        least = request.position_at(self._state.step)
        while (position := request.tail_end) < request.kv_len_max:
            if position - least >= self._num_steps:
                request.due_window = self.next_window + self.advances.windows_to(position - least)
                self._due.setdefault(request.due_window, []).append(request.order)
                return
            self._state.enter_next_run(request)

    def _enter_exit(self, request: Request) -> None:
        least = request.position_at(self._state.step)
        num_left = request.kv_len_max - least - self.advances.slack
        num_windows = -(-num_left // (self._num_steps * (1 + self.drafts.most)))
        request.exit_window = self.next_window + max(num_windows, 1)
        self._exits.setdefault(request.exit_window, []).append(request.request_id)

    # --- states of a row

    def _run(self, request: Request) -> None:
        self._state.run(request)
        self.num_running += 1
        self._fair_share.row_starts(request.arrival)
        self._enter_exit(request)
        self._enter_runs(request)
        if request.is_started:
            if request.ran_at is not None:
                request.ran_at = None
                self._answer.placed[request.request_id] = request
            self._lowering.resume(request)
        else:
            self._lowering.start(request, self.next_window)

    def _suspend(self, request: Request) -> None:
        self._lowering.suspend(request)
        request.last_window = self.next_window - 1
        self.num_running -= 1
        self._fair_share.row_stops(request.arrival)

    def _park(self, request: Request) -> None:
        self._state.park(request)
        insort(self.parked, request.order)

    def _unpark(self, request: Request) -> None:
        if request.request_id not in self.stopped and self._fill_window(request):
            self.parked.remove(request.order)
            self._run(request)

    # --- re-binding

    def rebind(self, wishes: Iterable[tuple[Request, int]], may_carry: bool = True) -> None:
        """Move rows as wished, then by the policy, one after the other within the bounds (4.2.1).

        may_carry: rows with recurrent states may move.
        """
        max_hand_offs = self._state.bounds.max_hand_offs
        num_hand_offs: dict[tuple[int, int], int] = {}
        moved: set[int] = set()
        of_policy = self._policy.rebindings(self._state, self.next_window)
        for request, new in chain(wishes, of_policy):
            old = request.moe_binding
            num = num_hand_offs.get((old, new), 0)
            # A row moves once at an edge, and not at the one where it starts or comes back.
            # Nor does it while pages of it move: its links are committed for where it is.
            is_still = (
                request.request_id in moved
                or request.since_step == self._state.step
                or request.move
            )
            if new == old or is_still or num >= max_hand_offs:
                continue
            if not self._state.committed.can_rebind(request.pages_on, new):
                continue
            has_carry = request.carry is not None
            carried = self.carried.values()
            if has_carry and not (may_carry and _can_carry(self._state, carried, request, new)):
                continue
            num_hand_offs[old, new] = num + 1
            moved.add(request.request_id)
            self.advances.settle(request)
            if has_carry:
                self.stop(request)
                self.carried[request.request_id] = request
            self._state.rebind(request, new)
            position = request.position_at(self._state.step)
            self._lowering.rebind(request, old, position, is_running=not has_carry)
            if not has_carry:
                self._answer.placed[request.request_id] = request


def _can_carry(state: ClusterState, carried: Iterable[Request], request: Request, new: int) -> bool:
    """Return whether the state may travel: one at a time leaves or reaches an instance."""
    ends = {request.moe_binding, new}
    is_free = not any(
        other.carry_source is not None and ends & {other.moe_binding, other.carry_source.instance}
        for other in carried
    )
    return is_free and request.ticket is None and state.frames[new].carries.has_free
