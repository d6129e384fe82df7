"""Page moves under way: full pages that change their instance while their row runs.

Enters: a policy's wishes, moves that have arrived. Leaves: moves to carry out, and frames that are
read no more once the windows sent so far are over. Does not know: tickets, how pages travel, why
they move.

A page that moves is full, so no step writes it. It is read at its old place until a window says
otherwise, and every instance begins that window after all its pages have arrived: the row never
waits. The paper has no page moves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.frame_ledger import FrameRun
from control_plane.scheduler.state.request import RUNNING, PageMove, Request
from control_plane.scheduler.windows.lowering import Lowering
from nanocp.values.plan import PAGE_SIZE


class PageMoves:
    """At most `max_pages` pages at a time, and one move of a request."""

    def __init__(self, state: ClusterState, lowering: Lowering, max_pages: int) -> None:
        self._state = state
        self._lowering = lowering
        self._max_pages = max_pages
        self.num_pages = 0
        """Pages that are moving."""
        self.arrived: list[Request] = []
        """All their pages are there; they are read there from the next window on."""

    def start(
        self, wishes: Iterable[tuple[Request, range, int]], stopped: Collection[int] = ()
    ) -> Iterator[tuple[Request, PageMove]]:
        """Start those of the wishes (request, pages, destination) that are legal; yield the moves.

        A legal wish is for full pages of a running row, within every bound, or for any pages of a
        stopped one. stopped: ids of requests whose rows are.
        """
        if self.num_pages >= self._max_pages:
            return
        for request, wanted, destination in wishes:
            pages = wanted[: self._max_pages - self.num_pages]
            is_stopped = request.request_id in stopped
            if pages and self._state.can_move(request, pages, destination, is_stopped):
                self.num_pages += len(pages)
                yield request, self._state.start_move(request, pages, destination)

    def finish(self) -> Iterator[tuple[Request, dict[int, list[FrameRun]]]]:
        """Let arrived pages change place; yield each request and the frames they had before."""
        arrived, self.arrived = self.arrived, []
        for request in arrived:
            move = request.move
            assert move is not None
            cut = request.runs[request.run_of(move.first_page * PAGE_SIZE)]
            is_new = move.destination not in request.pages_on
            frames = self._state.finish_move(request)
            self._lowering.finish_move(request, move, cut, is_new, request.state is RUNNING)
            self.num_pages -= move.num_pages
            yield request, frames

    def cancel(self, request: Request) -> None:
        """The term ends: the request's pages, if some were to move, stay where they are."""
        if request.move is not None:
            self.drop(request)
            self._state.cancel_move(request)

    def drop(self, request: Request) -> None:
        """The request ends: its move, if it has one, is under way no more."""
        if request.move is not None:
            self.num_pages -= request.move.num_pages
            if request in self.arrived:
                self.arrived.remove(request)
