"""Adoption: requests get the pages back that instances kept while their controller was lost.

A request is adopted if every page of its next attempt was kept (protocol.md, kept KV).
"""

from __future__ import annotations

from collections.abc import Iterator

from control_plane.scheduler.pages.prefix_sharing import PrefixSharing
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.frame_ledger import FrameRun
from control_plane.scheduler.state.request import Request, num_pages
from nanocp.values.plan import CARRY_PAGE, Arrival, TargetRun, TookOver


class Adoption:
    """Pages that wait for their requests."""

    def __init__(self, state: ClusterState, sharing: PrefixSharing, timeout_us: int) -> None:
        self._state = state
        self._sharing = sharing
        self._timeout_us = timeout_us
        self._kept: dict[int, tuple[TargetRun, ...]] = {}
        self._reserved: set[tuple[int, int]] = set()
        """(instance, frame) that no request has yet."""
        self._carries: dict[int, tuple[TargetRun, tuple[int, int]]] = {}
        """Request -> its recurrent state, and positions at which its row may continue with it."""
        self.next_deadline_us: int | None = None
        """Time at which the wait for requests ends, in us; None if none is awaited."""

    def __len__(self) -> int:
        return len(self._kept)

    def begin(self, event: TookOver, now_us: int) -> None:
        """Reserve the frames of kept requests; all others are free."""
        self.end()
        spans = {request_id: (least, most) for request_id, least, most in event.restarts}
        for request_id, runs in event.kept:
            pages = tuple(run for run in runs if run.first_page < CARRY_PAGE)
            if pages:
                self._kept[request_id] = pages
            # A state in two places was on its way.
            states = [run for run in runs if run.first_page == CARRY_PAGE]
            if len(states) == 1 and request_id in spans and pages:
                self._state.frames[states[0].instance].carries.reserve(states[0])
                self._carries[request_id] = states[0], spans[request_id]
            for instance, frame in _places(pages):
                if (instance, frame) not in self._reserved:
                    self._state.frames[instance].reserve(frame)
                    self._reserved.add((instance, frame))
        self.next_deadline_us = now_us + self._timeout_us if self._kept else None

    def adopt(self, arrival: Arrival) -> Request | None:
        """Place a returning request over its kept pages, parked; None if that is impossible."""
        runs = self._kept.pop(arrival.request_id, None)
        if runs is None:
            return None
        carry, (least, most) = self._carries.pop(arrival.request_id, (None, (0, -1)))
        is_right = least <= arrival.prompt_len - 1 <= most
        request = self._adopted(arrival, runs, carry if is_right else None)
        if request is not None and self._state.cluster.carry_pages:
            instance = request.moe_binding
            is_there = is_right and carry is not None and carry.instance == instance
            kept = carry if is_there else None
            request.carry = self._state.frames[instance].carries.take(instance, kept)
            request.restart = (least, most) if is_there else None
        if carry is not None and (request is None or request.carry != carry):
            self._state.frames[carry.instance].free([FrameRun(carry.frame, carry.num_pages)])
        if not self._kept:
            self.end()
        return request

    def _adopted(
        self, arrival: Arrival, runs: tuple[TargetRun, ...], carry: TargetRun | None
    ) -> Request | None:
        """carry: its recurrent state, if its row may continue with it; it sets the MoE binding."""
        state = self._state
        if arrival.is_recomputed or not self._can_have(arrival, runs):
            return None
        pages_on: dict[int, int] = {}
        for run in runs:
            pages_on[run.instance] = pages_on.get(run.instance, 0) + run.num_pages
        bound_reached = state.committed.bound_reached
        members = dict.fromkeys([*pages_on, *([] if carry is None else [carry.instance])])
        can_have_row = [i for i in members if bound_reached(i, pages_on) is None]
        if state.cluster.carry_pages:
            has_state = carry.instance if carry is not None else -1
            can_have_row = [
                i for i in can_have_row if i == has_state or state.frames[i].carries.has_free
            ]
        if not can_have_row:
            return None
        moe_binding = min(can_have_row, key=lambda i: (state.committed.rows[i], i))
        if carry is not None and carry.instance in can_have_row:
            moe_binding = carry.instance
        request = Request.from_arrival(arrival, moe_binding)
        request.pages_on = pages_on
        for instance, frame in _places(runs):
            if (instance, frame) in self._reserved:
                state.frames[instance].take_reserved()
                self._reserved.remove((instance, frame))
            else:
                state.frames[instance].share(frame)
        state.adopt(request, runs)
        self._sharing.adopted(request, arrival)
        return request

    def end(self) -> None:
        """Stop waiting, and free the pages that no request has."""
        for instance, frame in self._reserved:
            self._state.frames[instance].free([FrameRun(frame, 1)])
        for run, _ in self._carries.values():
            self._state.frames[run.instance].free([FrameRun(run.frame, run.num_pages)])
        self._carries.clear()
        self._reserved.clear()
        self._kept.clear()
        self.next_deadline_us = None

    def frames(self) -> Iterator[tuple[int, int]]:
        """Yield every reserved (instance, frame). For invariants."""
        yield from self._reserved
        for run, _ in self._carries.values():
            yield from _places((run,))

    def _can_have(self, arrival: Arrival, runs: tuple[TargetRun, ...]) -> bool:
        page = 0
        for run in runs:
            if run.first_page != page:
                return False
            page += run.num_pages
        frames, hashes = self._state.frames, arrival.page_hashes
        return page >= num_pages(arrival.prompt_len - 1) and all(
            place in self._reserved
            or (page < len(hashes) and frames[place[0]].find(hashes[page]) == place[1])
            for page, place in enumerate(_places(runs))
        )


def _places(runs: tuple[TargetRun, ...]) -> Iterator[tuple[int, int]]:
    for run in runs:
        for index in range(run.num_pages):
            yield run.instance, run.frame + index
