"""A planned change of the term's instances: those that leave are emptied first, without a pause.

Rows are re-bound, and pages move. The term ends when no ticket and no window is left (protocol.md,
planned terms).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from control_plane.scheduler.pages.quarantine import Quarantine
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.request import PARKED, RUNNING, Request
from control_plane.scheduler.windows.lowering import Lowering
from control_plane.scheduler.windows.page_moves import PageMoves
from control_plane.scheduler.windows.row_windows import RowWindows
from nanocp.values.plan import TargetRun


class SeatChange:
    """The change under way, if any."""

    def __init__(
        self,
        state: ClusterState,
        lowering: Lowering,
        rows: RowWindows,
        moves: PageMoves,
        quarantine: Quarantine,
    ) -> None:
        self._state = state
        self._lowering = lowering
        self._rows = rows
        self._moves = moves
        self._quarantine = quarantine
        self.seats: tuple[int, ...] = ()
        """Instances of the next term; empty if no change is under way."""
        self._released: set[int] = set()
        """Stopped rows of a former change: each continues after its move."""
        self.has_settled = False
        """True if the term ended without a loss: no window until the next one."""

    def begin(self, seats: Sequence[int]) -> None:
        """Place nothing more on instances outside these; the whole term: cancel the change."""
        self.has_settled = False
        self._released = set(self._rows.stopped)
        self.seats = () if tuple(seats) == tuple(self._quarantine.seats) else tuple(seats)
        self._open(i for i in self._quarantine.seats if i in seats)

    def serve(self, seats: Sequence[int], lost: Collection[int]) -> list[int]:
        """Begin the next term: instances outside it have nothing, and get nothing.

        lost: instances whose frames are gone. Returns all that have nothing now.
        """
        instances = range(len(self._state.frames))
        gone = [each for each in instances if each in lost or each not in seats]
        self.seats, self.has_settled = (), False
        self._rows.stopped.clear()
        self._released.clear()
        for instance in gone:
            self._state.lose(instance)
        for request in self._state.requests.values():
            for instance in request.ever_bound.keys() - set(seats):
                del request.ever_bound[instance]
        self._open(seats)
        self._lowering.serve(seats)
        self._quarantine.end_term(self._rows.next_window - 1)
        self._quarantine.seats = seats
        return gone

    def _open(self, seats: Iterable[int]) -> None:
        seats = set(seats)
        for instance in range(len(self._state.frames)):
            if instance in seats:
                self._state.reopen(instance)
            else:
                self._state.close(instance)

    @property
    def is_drained(self) -> bool:
        """Return whether no request needs an instance that leaves in a change."""
        state = self._state
        return bool(self.seats) and not any(
            state.committed.attention_rows[i]
            or state.frames[i].num_committed
            or state.frames[i].carries.num_taken
            for i in range(len(state.frames))
            if i not in self.seats
        )

    def settle(self) -> bool:
        """Issue no more windows; return whether all are reported."""
        self.has_settled = not self._rows.in_flight and not self._quarantine
        return self.has_settled

    def stop_rows(self) -> None:
        """Stop rows that cannot be moved while they run, and start those that have moved.

        It is called at a window's edge before rows grow.
        """
        for request_id in list(self._rows.stopped):
            request = self._state.requests[request_id]
            is_empty = self._run_that_leaves(request) is None
            if request_id in self._rows.carried:
                continue
            if request.move is None and (is_empty or request_id in self._released):
                self._rows.stopped.discard(request_id)
                self._released.discard(request_id)
        if not self.seats:
            return
        for request in list(self._state.requests.values()):
            if request.request_id in self._rows.stopped:
                continue
            if request.move is None and request.is_started and request.ticket is None:
                run = self._run_that_leaves(request)
                if run is None or (request.state is RUNNING and self._movable(request)):
                    continue
                is_told = request.is_told(self._state.first_unknown_step)
                if (
                    is_told
                    and request.state in (RUNNING, PARKED)
                    and self._destination(request, 1) >= 0
                ):
                    self._rows.stop(request)

    def rebindings(self) -> Iterator[tuple[Request, int]]:
        """Yield (running request, new MoE binding) for rows of instances that leave."""
        state = self._state
        if not self.seats:
            return
        for request in list(state.requests.values()):
            if request.state is RUNNING and request.moe_binding not in self.seats:
                stay = [i for i in request.pages_on if i in self.seats]
                if stay:
                    yield request, min(stay, key=lambda i: (state.loads.num_rows[i], i))

    def moves(self) -> Iterator[tuple[Request, range, int]]:
        """Yield (request, pages, new instance) for pages on instances that leave."""
        if not self.seats:
            return
        requests = list(self._state.requests.values())
        # Few pages move at a time: those first whose row waits for them.
        requests.sort(key=lambda request: request.request_id not in self._rows.stopped)
        for request in requests:
            if request.move is not None or request.ticket is not None:
                continue
            if request.request_id in self._rows.carried:
                continue
            if request.request_id not in self._rows.stopped:
                pages = self._movable(request) if request.state is RUNNING else None
            elif self._is_settled(request):
                run = self._run_that_leaves(request)
                pages = None if run is None else _pages(run)
            else:
                pages = None
            if pages and (destination := self._destination(request, len(pages))) >= 0:
                room = self._state.frames[destination].num_free
                yield request, pages[-room:], destination

    def _is_settled(self, request: Request) -> bool:
        last = request.last_window
        return last is not None and all(
            self._quarantine.last_reported[i] >= last for i in self._quarantine.seats
        )

    def _run_that_leaves(self, request: Request) -> TargetRun | None:
        if not self.seats or request.pages_on.keys() <= set(self.seats):
            return None
        return next(run for run in request.runs if run.instance not in self.seats)

    def _movable(self, request: Request) -> range | None:
        leaving = (run for run in request.runs if run.instance not in self.seats)
        found = (request.movable_pages(run, self._state.first_unknown_step) for run in leaving)
        return next((pages for pages in found if pages), None)

    def _destination(self, request: Request, num_pages: int) -> int:
        """Prefer an instance that has other pages of the request. -1: none has room."""
        frames, pages_on = self._state.frames, request.pages_on
        reached = (
            (frames[i].num_free >= num_pages, i in pages_on, frames[i].num_free, -i)
            for i in self._state.open
            if frames[i].num_free
            and self._state.committed.can_reach(request.moe_binding, request.span, i)
        )
        return -max(reached, default=(False, False, 0, 1))[-1]


def _pages(run: TargetRun) -> range:
    return range(run.first_page, run.first_page + run.num_pages)
