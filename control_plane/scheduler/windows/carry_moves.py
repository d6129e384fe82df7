"""Re-bindings of rows with a recurrent state: each row waits until its state has arrived.

Only a state's MoE binding may change it (protocol.md, one state). After the row's last window is
reported, its state travels under a ticket.
"""

from __future__ import annotations

from collections.abc import Iterator

from control_plane.scheduler.pages.quarantine import Quarantine
from control_plane.scheduler.pages.tickets import Tickets
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.frame_ledger import FrameRun
from control_plane.scheduler.state.request import Request
from control_plane.scheduler.windows.lowering import Lowering
from control_plane.scheduler.windows.row_windows import RowWindows


class CarryMoves:
    """Recurrent states that wait to travel, or have arrived."""

    def __init__(
        self,
        state: ClusterState,
        lowering: Lowering,
        rows: RowWindows,
        quarantine: Quarantine,
        tickets: Tickets,
    ) -> None:
        self._state = state
        self._lowering = lowering
        self._rows = rows
        self._quarantine = quarantine
        self._tickets = tickets
        self.arrived: list[Request] = []
        """Requests whose states have arrived; their rows may continue in the next window."""

    def __len__(self) -> int:
        return len(self._rows.carried)

    def start(self) -> None:
        """Send the states whose rows' last windows are reported."""
        for request in self._rows.carried.values():
            last, source = request.last_window, request.carry_source
            is_waiting = request.ticket is None and request not in self.arrived
            if is_waiting and last is not None and last <= self._quarantine.last_complete:
                assert request.carry is not None and source is not None
                targets = (request.carry,)
                self._tickets.issue(request, request.position, targets, source.instance)

    def finish(self) -> Iterator[tuple[Request, dict[int, list[FrameRun]]]]:
        """Let rows with arrived states continue; yield each with the frame it left."""
        arrived, self.arrived = self.arrived, []
        for request in arrived:
            source, request.carry_source = request.carry_source, None
            assert source is not None
            self._lowering.carry_arrived(request, source)
            del self._rows.carried[request.request_id]
            self._rows.stopped.discard(request.request_id)
            frames = [FrameRun(source.frame, source.num_pages)]
            self._state.frames[source.instance].quarantine(frames)
            yield request, {source.instance: frames}

    def drop(self, request: Request) -> None:
        """Forget a request that ends."""
        if request in self.arrived:
            self.arrived.remove(request)
