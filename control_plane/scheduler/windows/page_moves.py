"""Page moves: full pages that change their instance while their row runs, without a wait.

A page is read at its old place until a window that begins after all pages have arrived. The paper
has no page moves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.frame_ledger import FrameRun
from control_plane.scheduler.state.request import RUNNING, PageMove, Request
from control_plane.scheduler.windows.lowering import Lowering
from nanocp.values.plan import PAGE_SIZE


class PageMoves:
    """Holds at most `max_pages` moving pages, and one move for each request."""

    def __init__(self, state: ClusterState, lowering: Lowering, max_pages: int) -> None:
        self._state = state
        self._lowering = lowering
        self._max_pages = max_pages
        self.num_pages = 0
        """Pages that are moving."""
        self.arrived: list[Request] = []
        """Requests whose pages have all arrived; the next window reads them there."""

    def start(
        self, wishes: Iterable[tuple[Request, range, int]], stopped: Collection[int] = ()
    ) -> Iterator[tuple[Request, PageMove]]:
        """Start the legal ones of these (request, pages, destination); yield the moves.

        Legal moves keep every bound and are for full pages, or any pages of a stopped row. stopped:
        ids of requests with such rows.
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
        """Switch to arrived pages; yield each request and its former frames."""
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
        """Leave a request's moving pages at their source, since the term ends."""
        if request.move is not None:
            self.drop(request)
            self._state.cancel_move(request)

    def drop(self, request: Request) -> None:
        """Forget the move of a request that ends."""
        if request.move is not None:
            self.num_pages -= request.move.num_pages
            if request in self.arrived:
                self.arrived.remove(request)
