"""Lowering of decisions to table changes and digests for each instance (4.2.4).

See protocol.md, table digests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from control_plane.scheduler.state.request import PageMove, Request
from control_plane.scheduler.windows.lanes import Lanes
from control_plane.scheduler.windows.routing import Routes
from nanocp.values.plan import PAGE_SIZE, HandOff, InstancePlan, RowStart, TargetRun
from nanocp.values.table import DIGEST_MASK, HOLDER, PAGE, entry_digest, parts_outside
from nanocp.values.table_changes import HolderChange, PageClear, PageRun, TableChanges

# Every window makes some for each instance; this way they cost half.
_instance_plan: Callable[[tuple[Any, ...]], InstancePlan] = partial(tuple.__new__, InstancePlan)
_table_changes: Callable[[Iterator[tuple[Any, ...]]], TableChanges] = partial(
    tuple.__new__, TableChanges
)
_page_run: Callable[[tuple[int, int, int, int]], PageRun] = partial(tuple.__new__, PageRun)
_NO_CHANGES = TableChanges()


class _Pending:
    __slots__ = (
        "cleared",
        "ends",
        "forgotten",
        "hand_offs_in",
        "hand_offs_out",
        "holders",
        "holders_forgotten",
        "pages",
        "starts",
    )

    def __init__(self) -> None:
        self.forgotten: list[int] = []
        self.cleared: list[PageClear] = []
        self.pages: list[PageRun] = []
        self.holders_forgotten: list[int] = []
        self.holders: list[HolderChange] = []
        self.starts: list[RowStart] = []
        self.hand_offs_out: list[HandOff] = []
        self.hand_offs_in: list[HandOff] = []
        self.ends: list[int] = []


_NOTHING = _Pending()


class Lowering:
    """Changes since the last window, and digests by which both ends compare their tables."""

    def __init__(self, num_instances: int, lanes: Lanes | None = None) -> None:
        """lanes: the lane of each row; None for one lane."""
        self._lanes = lanes or Lanes(num_instances)
        self.routes = Routes(num_instances)
        self.seats: Sequence[int] = range(num_instances)
        """Instances of the term: each gets a plan with every window."""
        self.digests = [0] * num_instances
        """The digest of each instance's table, as sent."""
        self._told = [0] * num_instances
        """Digests of pages and holders, with those of the next window."""
        self._pending: defaultdict[int, _Pending] = defaultdict(_Pending)

    def end_term(self) -> None:
        """Empty every table, without sending a change."""
        num_instances = len(self.digests)
        self._lanes.end_term()
        self.routes = Routes(num_instances)
        self.digests = [0] * num_instances
        self._told = [0] * num_instances
        self._pending.clear()

    def serve(self, seats: Sequence[int]) -> None:
        """Set the instances that get plans; the table of a new one is empty."""
        for instance in range(len(self.digests)):
            if instance not in seats or instance not in self.seats:
                assert not self.digests[instance], f"the table of instance {instance} is not empty"
        self.seats = seats

    @property
    def has_pending(self) -> bool:
        """Return whether anything changed since the last window."""
        return bool(self._pending) or self.routes.has_changes

    def start(self, request: Request, window: int) -> None:
        """Start the row in this window, with its pages, holders and recurrent state."""
        moe_binding = request.moe_binding
        request.ever_bound = dict.fromkeys((*request.pages_on, moe_binding), 0)
        request.first_window = window
        self._tell_pages(request, request.runs)
        if request.carry is not None:
            self._tell_pages(request, [request.carry])
        self._tell_holders(request, request.position)
        asked = request.arrival
        start = RowStart(asked.request_id, request.position, asked.max_tokens, asked.row_start)
        self._pending[moe_binding].starts.append(start)
        self.resume(request)

    def resume(self, request: Request) -> None:
        """Put the row back into the windows, with its recurrent state in place."""
        lane = self._lanes.enter(request)
        self.routes.add(request.request_id, request.moe_binding, request.pages_on, lane)

    def suspend(self, request: Request) -> None:
        """Take the row out of the windows from the next one on."""
        lane = self._lanes.leave(request.request_id)
        self.routes.remove(request.request_id, request.moe_binding, request.pages_on, lane)

    def level_lanes(self, requests: Mapping[int, Request]) -> None:
        """Let rows change their lane where the lanes have come to differ."""
        for request_id in self._lanes.drifted():
            request = requests[request_id]
            lane = self._lanes.update(request)
            self.routes.remove(request_id, request.moe_binding, request.pages_on, lane)
            self._lanes.switch(request_id)
            self.routes.add(request_id, request.moe_binding, request.pages_on, 1 - lane)

    def append_pages(
        self, request: Request, runs: list[TargetRun], is_new: bool, is_running: bool
    ) -> None:
        """Add a started request's new runs on one instance.

        is_new: the instance was outside the KV binding, so a running row needs a link.
        """
        holder = runs[0].instance
        if is_new:
            request.ever_bound.setdefault(holder, 0)
            if is_running:
                lane = self._lanes.update(request)
                self.routes.add_links(request.request_id, request.moe_binding, (holder,), lane)
        self._tell_pages(request, runs)
        if request.told_holder != holder:
            self._tell_holder(request, runs[0].first_page, holder)

    def finish_move(
        self, request: Request, move: PageMove, cut: TargetRun, is_new: bool, is_running: bool
    ) -> None:
        """Read the pages of a move at their new place. cut: the run that they were part of.

        is_new: the destination was outside the KV binding.
        """
        source, destination = move.source, move.destination
        moe_binding, request_id = request.moe_binding, request.request_id
        ever_bound = request.ever_bound
        self._pending[source].cleared.append(PageClear(request_id, move.first_page, move.num_pages))
        told = PageRun(request_id, cut.first_page, cut.num_pages, cut.frame)
        kept = parts_outside(told, move.first_page, move.first_page + move.num_pages)
        digest = sum(entry_digest(PAGE, *part) for part in kept) - entry_digest(PAGE, *told)
        ever_bound[source] += digest
        self._told[source] += digest
        if is_new:
            ever_bound.setdefault(destination, 0)
        self._tell_pages(request, move.targets)
        if move.is_stopped:
            # Pages that the row appends to may have moved.
            self._forget_holders(request, moe_binding)
            self._pending[moe_binding].holders_forgotten.append(request_id)
            self._tell_holders(request, request.position)
        lane = self._lanes.update(request) if is_running else 0
        if is_running and is_new:
            self.routes.add_links(request_id, moe_binding, (destination,), lane)
        if is_running and source not in request.pages_on:
            self.routes.remove_links(request_id, moe_binding, (source,), lane)

    def rebind(self, request: Request, old: int, position: int, is_running: bool = True) -> None:
        """Move the row from MoE binding `old`, with the position of its next input token."""
        new = request.moe_binding
        request_id = request.request_id
        if is_running:
            self.routes.remove(request_id, old, request.pages_on, self._lanes.leave(request_id))
            self.routes.add(request_id, new, request.pages_on, self._lanes.enter(request))
        self._forget_holders(request, old)
        told = self._pending[old]
        told.holders_forgotten.append(request_id)
        told.hand_offs_out.append(HandOff(request_id, new))
        self._pending[new].hand_offs_in.append(HandOff(request_id, old))
        self._tell_holders(request, position)

    def carry_arrived(self, request: Request, source: TargetRun) -> None:
        """Forget the recurrent state at its source, since it has arrived."""
        assert request.carry is not None
        request_id, first_page, num_pages = request.request_id, source.first_page, source.num_pages
        clear = PageClear(request_id, first_page, num_pages)
        self._pending[source.instance].cleared.append(clear)
        digest = entry_digest(PAGE, request_id, first_page, num_pages, source.frame)
        request.ever_bound[source.instance] -= digest
        self._told[source.instance] -= digest
        self._tell_pages(request, [request.carry])

    def end(self, request: Request) -> None:
        """End a started request that is in no window any more."""
        request_id = request.request_id
        bound = dict.fromkeys([*request.pages_on, request.moe_binding])
        if request.carry_source is not None:
            bound[request.carry_source.instance] = None
        for instance in bound:
            told = self._pending[instance]
            if (
                told.pages
            ):  # a parked row may have got some of the pages that it needs, and no window since
                told.pages = [run for run in told.pages if run.request_id != request_id]
            if told.cleared:
                told.cleared = [clear for clear in told.cleared if clear.request_id != request_id]
            told.forgotten.append(request_id)
            self._told[instance] -= request.ever_bound[instance]
        self._forget_holders(request, request.moe_binding)
        self._pending[self._row_at(request)].ends.append(request_id)

    def _row_at(self, request: Request) -> int:
        """A row that stands still is handed over in the next window, unless it ends before."""
        told = self._pending[request.moe_binding]
        for hand_off in told.hand_offs_in:
            if hand_off.request_id == request.request_id:
                told.hand_offs_in.remove(hand_off)
                out = self._pending[hand_off.peer].hand_offs_out
                out.remove(HandOff(request.request_id, request.moe_binding))
                return hand_off.peer
        return request.moe_binding

    def emit(
        self,
        window: int,
        first_step: int,
        num_steps: int,
        two_lanes: int = 0,
        num_drafts: int = 0,
    ) -> tuple[InstancePlan, ...]:
        """Return the window's plans, one for each instance of the term."""
        routes = self.routes
        rows = routes.take_row_changes()
        q_route, res_route = routes.take_route_changes()
        pending, self._pending = self._pending, defaultdict(_Pending)
        changed = pending.keys() | rows.keys() | q_route.keys() | res_route.keys()
        last = two_lanes, num_drafts, 0  # the coordinator names the expert table
        unchanged: tuple[Any, ...] = (False, _NO_CHANGES, (), (), (), (), *last)
        digests, plans = self.digests, []
        for instance in self.seats:
            before = after = digests[instance]
            told = unchanged
            if instance in changed:
                of = pending.get(instance, _NOTHING)
                after = (routes.digests[instance] + self._told[instance]) & DIGEST_MASK
                digests[instance] = after
                changes: tuple[Sequence[Any], ...] = (
                    of.forgotten,
                    rows.get(instance, ()),
                    q_route.get(instance, ()),
                    res_route.get(instance, ()),
                    of.cleared,
                    of.pages,
                    of.holders_forgotten,
                    of.holders,
                )
                told = (
                    False,
                    _table_changes(map(tuple, changes)),
                    tuple(of.starts),
                    tuple(of.hand_offs_out),
                    tuple(of.hand_offs_in),
                    tuple(of.ends),
                    *last,
                )
            header = (instance, window, first_step, num_steps, before, after)
            plans.append(_instance_plan(header + told))
        return tuple(plans)

    def _forget_holders(self, request: Request, moe_binding: int) -> None:
        """Drop unsent changes: tables forget holders before they take new ones."""
        told = self._pending[moe_binding]
        if told.holders:
            told.holders = [
                change for change in told.holders if change.request_id != request.request_id
            ]
        self._told[moe_binding] -= request.holder_digest
        request.holder_digest = 0

    def _tell_pages(self, request: Request, runs: Sequence[TargetRun]) -> None:
        request_id, ever_bound = request.request_id, request.ever_bound
        for first_page, num_pages, instance, frame in runs:
            run = _page_run((request_id, first_page, num_pages, frame))
            self._pending[instance].pages.append(run)
            digest = entry_digest(PAGE, *run)
            ever_bound[instance] += digest
            self._told[instance] += digest

    def _tell_holders(self, request: Request, position: int) -> None:
        request.told_holder = request.moe_binding
        page = position // PAGE_SIZE
        for run in request.runs[request.run_of(position) :]:
            # A parked row may have no page at its position: nobody holds it yet.
            is_written = run.first_page + run.num_pages > page
            if is_written and run.instance != request.told_holder:
                self._tell_holder(request, max(run.first_page, page), run.instance)

    def _tell_holder(self, request: Request, first_page: int, holder: int) -> None:
        request.told_holder = holder
        self._pending[request.moe_binding].holders.append(
            HolderChange(request.request_id, first_page, holder)
        )
        digest = entry_digest(HOLDER, request.request_id, first_page, holder, 0)
        request.holder_digest += digest
        self._told[request.moe_binding] += digest
