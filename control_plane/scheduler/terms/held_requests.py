"""Held requests: placed requests that wait for their next attempt after a term has ended.

A request is held if each of its pages is on an instance that survived (protocol.md, kept KV).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

from control_plane.scheduler.pages.prefix_sharing import PrefixSharing
from control_plane.scheduler.queue.waiting_queue import earliest
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.frame_ledger import FrameRun
from control_plane.scheduler.state.request import HELD, TRANSFERRING, Request
from control_plane.scheduler.terms.adoption import Adoption
from nanocp.values.plan import PAGE_SIZE, Arrival, TookOver


class HeldRequests:
    """Requests, also of an earlier controller, with pages but without a row."""

    def __init__(self, state: ClusterState, sharing: PrefixSharing, timeout_us: int) -> None:
        self._state = state
        self._adoption = Adoption(state, sharing, timeout_us)
        self._timeout_us = timeout_us
        self._held: dict[int, Request] = {}
        self._until_us: int | None = None
        """Time at which the wait for front ends ends; None if all have submitted."""

    def __len__(self) -> int:
        return len(self._held) + len(self._adoption)

    @property
    def is_waiting(self) -> bool:
        """Return whether some front end may still have open requests to submit."""
        return self._until_us is not None

    def wait(self, now_us: int) -> None:
        """Wait for every front end to submit its open requests again."""
        self._until_us = now_us + self._timeout_us
        self._adoption.end()

    def take_over(self, event: TookOver, now_us: int) -> None:
        """Wait for requests of an earlier controller, whose pages are kept."""
        self._adoption.begin(event, now_us)

    def reserved_frames(self) -> Iterator[tuple[int, int]]:
        """Yield every (instance, frame) kept for a request of an earlier controller."""
        return self._adoption.frames()

    def end_term(
        self,
        request: Request,
        lost: Set[int],
        absent: Set[int],
        restarts: Mapping[int, Sequence[int]],
    ) -> bool:
        """Hold the request. False: it has lost a page, or its KV was still on its way.

        lost: instances whose frames are gone. absent: instances that the next term lacks; their
        rows are re-bound if possible. restarts: see Regrouped. A lost or moving recurrent state is
        computed again.
        """
        state, pages_on = self._state, request.pages_on
        is_whole = request.state is not TRANSFERRING and pages_on.keys().isdisjoint(lost | absent)
        moe_binding = request.moe_binding
        if is_whole and moe_binding in absent:
            moe_binding = min(
                (i for i in pages_on if state.committed.can_rebind(pages_on, i)), default=-1
            )
        if not is_whole or moe_binding < 0:
            self.drop(request)  # It may be held since an earlier term.
            return False
        state.hold(request)
        if request.carry is not None:
            is_moving = request.carry_source is not None or moe_binding != request.moe_binding
            span = None if is_moving else restarts.get(request.request_id)
            request.restart = None if span is None else (span[0], span[1])
            if span is None:
                self._drop_carry(request)
        if moe_binding != request.moe_binding:
            state.rebind(request, moe_binding)
        self._held[request.request_id] = request
        return True

    def begin_attempt(
        self, request: Request | None, arrival: Arrival, may_transfer: bool = True
    ) -> Request | None:
        """Start a request's row where its front end's new attempt says.

        request: None if it is not placed. may_transfer: a ticket may be issued. Returns the parked
        request, perhaps in need of a ticket for its recurrent state. None without held pages, if
        the prompt must be computed again, or if it would write to a page that others may find.
        """
        if request is None:
            adopted = self._adoption.adopt(arrival)
            return None if adopted is None else self._with_state(adopted, may_transfer)
        # A row must not write to a page that others may find.
        rewrites = arrival.prompt_len - 1 < len(request.page_hashes) * PAGE_SIZE
        if request.state is not HELD or arrival.is_recomputed or rewrites:
            return None
        if self._state.cluster.carry_pages and not self._has_carry(request, arrival.prompt_len - 1):
            return None
        del self._held[request.request_id]
        self._state.begin_attempt(request, arrival)
        return self._with_state(request, may_transfer)

    def _with_state(self, request: Request, may_transfer: bool) -> Request:
        """Let a parked request without its recurrent state wait for another; it has its pages."""
        is_stateless = request.restart is None and request.carry is not None
        if is_stateless and request.position and may_transfer:
            request.state = TRANSFERRING
            self._state.loads.count_row(request.moe_binding, +1)
        return request

    def _has_carry(self, request: Request, position: int) -> bool:
        if request.restart is not None:
            least, most = request.restart
            if least <= position <= most:
                return True
            self._drop_carry(request)
        frames = self._state.frames[request.moe_binding]
        if request.carry is None and frames.carries.has_free:
            request.carry = frames.carries.take(request.moe_binding)
        return request.carry is not None

    def _drop_carry(self, request: Request) -> None:
        """Drop a useless recurrent state; between terms nobody writes to its frames."""
        for run in (request.carry, request.carry_source):
            if run is not None:
                frames = self._state.frames[run.instance]
                frames.quarantine([FrameRun(run.frame, run.num_pages)])
                frames.free([FrameRun(run.frame, run.num_pages)])
        request.carry = request.carry_source = request.restart = None

    def drop(self, request: Request) -> None:
        """Forget a request that ends."""
        self._held.pop(request.request_id, None)

    @property
    def next_deadline_us(self) -> int | None:
        """Return when to call `end_wait`, in us; None if all front ends have submitted."""
        return earliest(self._until_us, self._adoption.next_deadline_us)

    def end_wait(self) -> list[Request]:
        """End the wait for front ends; return the requests that are over, held until dropped."""
        self._until_us = None
        self._adoption.end()
        return list(self._held.values())
