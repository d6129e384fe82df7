"""All decisions about every instance: placed requests, loads, frames, and the room left.

Costs and WaterFill use `loads.kv_tokens`, which attention reads; frames only say what fits.
Policies balance `loads.num_rows`; max_rows also bounds parked rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from control_plane.scheduler.state.commitments import Commitments
from control_plane.scheduler.state.frame_ledger import FrameLedger, FrameRun, cut_runs, frame_run
from control_plane.scheduler.state.linked_rows import LinkedRows
from control_plane.scheduler.state.loads import ClusterLoads
from control_plane.scheduler.state.proposal import Layout
from control_plane.scheduler.state.request import (
    HELD,
    PARKED,
    RUNNING,
    PageMove,
    Request,
    holders_of,
    runs_in,
)
from nanocp.config.cluster import ClusterConfig
from nanocp.values.plan import PAGE_SIZE, Arrival, InstanceLoad, TargetRun

_CLOSED = 1 << 40
"""Load added to a closed instance, so that every policy takes it last."""


class ClusterState:
    """Placed requests and loads of all instances.

    Policies read it; only the scheduler changes it.
    """

    def __init__(self, cluster: ClusterConfig, steps_in_flight: int = 2) -> None:
        """steps_in_flight: most planned steps that some instance may not have run."""
        num = cluster.num_instances
        self.cluster = cluster
        self.bounds = cluster.bounds
        self.nodes = tuple(
            range(first, min(first + cluster.instances_per_node, num))
            for first in range(0, num, cluster.instances_per_node)
        )
        self.requests: dict[int, Request] = {}
        """Placed requests that have not ended."""
        self.committed = Commitments(cluster)
        self.linked = LinkedRows(num)
        self.loads = ClusterLoads(self.nodes)
        self._steps_in_flight = steps_in_flight
        self.frames = [FrameLedger(cluster) for _ in range(num)]
        self.open = list(range(num))
        """Instances that accept placements, ascending."""

    @property
    def step(self) -> int:
        """First step of the next window."""
        return self.loads.step

    @property
    def first_unknown_step(self) -> int:
        """The first step that some instance may not have run."""
        return self.loads.step - self._steps_in_flight

    def close(self, instance: int) -> None:
        """Place nothing more on the instance. Its requests may stay."""
        if instance in self.open:
            self.open.remove(instance)
            self.frames[instance].close()
            self.loads.weigh(instance, _CLOSED)

    def reopen(self, instance: int) -> None:
        """Allow placements on the instance again."""
        if instance not in self.open:
            self.open = sorted([*self.open, instance])
            self.frames[instance].reopen()
            self.loads.weigh(instance, -_CLOSED)

    def load(self, instance: int) -> InstanceLoad:
        """Return the instance's load. A closed instance has nothing free."""
        pool, weight = self.frames[instance], self.loads.weights[instance]
        return InstanceLoad(
            kv_tokens=self.loads.kv_tokens(instance) - weight,
            num_rows=self.loads.num_rows[instance] - weight,
            frames_free=pool.num_free,
            frames_quarantined=pool.num_quarantined,
            frames_committed=pool.num_committed,
        )

    # --- can it be carried? (can_allocate)

    def can_allocate(self, moe_binding: int, pages_on: Mapping[int, int]) -> bool:
        """Return whether frames and every bound have room for a row with its pages and links.

        pages_on: pages by instance, without shared pages whose frames are in use.
        """
        frames = self.frames
        for instance, count in pages_on.items():
            if count > frames[instance].num_free:
                return False
        if self.cluster.carry_pages and not frames[moe_binding].carries.has_free:
            return False
        return self.committed.bound_reached(moe_binding, pages_on) is None

    def can_move(
        self, request: Request, pages: range, destination: int, is_stopped: bool = False
    ) -> bool:
        """Return whether pages of one run could be copied to another instance now.

        is_stopped: the row is in no window that some instance has not run.
        """
        if request.ticket is not None or request.move is not None:
            return False
        run = request.runs[request.run_of(pages.start * PAGE_SIZE)]
        movable = request.movable_pages(run, self.first_unknown_step)
        if request.state is not RUNNING:
            if not is_stopped:
                return False
            movable = range(run.first_page, run.first_page + run.num_pages)
        return (
            pages.start in movable
            and pages.stop <= movable.stop
            and run.instance != destination
            and self.frames[destination].num_free >= len(pages)
            and self.committed.can_reach(request.moe_binding, request.span, destination)
        )

    # --- changes

    def place(self, request: Request, layout: Layout) -> None:
        """Commit frames, the row and its links as laid out, after a check."""
        request.pages_on = layout.pages_on
        if self.cluster.carry_pages:
            request.carry = self.frames[request.moe_binding].carries.take(request.moe_binding)
        for run in layout.shared.runs:
            request.add_runs(run.instance, [FrameRun(run.frame, run.num_pages)])
            for index in range(run.num_pages):
                self.frames[run.instance].share(run.frame + index)
        request.num_shared = request.num_pages
        if len(layout.pages) == 1:
            instance, count = layout.pages[0]
            request.add_runs(instance, self.frames[instance].take(count))
        else:
            counts: dict[int, int] = {}
            for instance, count in layout.pages:
                counts[instance] = counts.get(instance, 0) + count
            taken = {i: self.frames[i].take(count) for i, count in counts.items()}
            for instance, count in layout.pages:
                request.add_runs(instance, cut_runs(taken[instance], count))
        self.loads.count_row(request.moe_binding, +1)
        self._enter(request)

    def adopt(self, request: Request, runs: Iterable[TargetRun]) -> None:
        """Park a request over pages that it has, after a check."""
        for run in runs:
            request.add_runs(run.instance, [FrameRun(run.frame, run.num_pages)])
        request.state = PARKED
        self._enter(request)

    def append_pages(self, request: Request, holder: int, count: int) -> list[TargetRun]:
        """Commit the request's next `count` pages on the holder; return the new runs."""
        pages_on = request.pages_on
        is_new = holder not in pages_on
        if holder not in request.span:
            self.committed.count_links(request.moe_binding, (holder,), +1)
        frames = self.frames[holder].take(
            count, after=None if is_new else request.last_frame(holder)
        )
        runs = request.add_runs(holder, frames)
        pages_on[holder] = pages_on.get(holder, 0) + count
        if request.state is RUNNING:
            self.linked.update(request, added=runs)
        return runs

    def run(self, request: Request) -> None:
        """Run the row from the next window on, with a page for its position."""
        if request.state is PARKED:
            self.loads.count_row(request.moe_binding, +1)
        request.state = RUNNING
        request.since_step = self.step
        self.linked.update(request)
        request.tail = request.run_of(request.position)
        self.loads.count_growing(request, self.step, +1)

    def enter_next_run(self, request: Request) -> None:
        """Append to the next run from its first position on."""
        run = request.runs[request.tail + 1]
        step = request.since_step + run.first_page * PAGE_SIZE - request.position
        self.loads.num_falls += 1
        self.loads.count_growing(request, step, -1)
        request.tail += 1
        self.loads.count_growing(request, step, +1)

    def start_move(self, request: Request, pages: range, destination: int) -> PageMove:
        """Commit frames for full pages of one run at another instance, after `can_move`.

        They count in its load from now on.
        """
        run = request.runs[request.run_of(pages.start * PAGE_SIZE)]
        if destination not in request.pages_on:
            self.committed.count_links(request.moe_binding, (destination,), +1)
        targets = runs_in(pages.start, destination, self.frames[destination].take(len(pages)))
        self.loads.num_falls += 1
        is_stopped = request.state is PARKED
        request.move = PageMove(
            pages.start, len(pages), run.instance, destination, tuple(targets), is_stopped
        )
        self.loads.count_move(request.move, +1)
        return request.move

    def finish_move(self, request: Request) -> dict[int, list[FrameRun]]:
        """Read the arrived pages at their new place from the next window on.

        Returns the frames they leave, by instance, quarantined.
        """
        assert request.move is not None
        is_stopped = request.move.is_stopped
        if is_stopped:
            self.loads.count_kv(request, -1)
        request.moved_step = self.step
        move, request.move = request.move, None
        source, destination, num_pages = move.source, move.destination, move.num_pages
        index = request.run_of(move.first_page * PAGE_SIZE)
        run = request.runs[index]
        num_before = move.first_page - run.first_page
        parts = [run._replace(num_pages=num_before)] if num_before else []
        parts += move.targets
        num_until = num_before + num_pages
        if num_after := run.num_pages - num_until:
            first_page, frame = run.first_page + num_until, run.frame + num_until
            parts.append(TargetRun(first_page, num_after, source, frame))
        request.runs[index : index + 1] = parts
        request.holders = tuple(holders_of(request.runs))
        if is_stopped:
            request.tail = request.run_of(request.position)
            self.loads.count_kv(request, +1)
        elif request.tail >= index:
            request.tail += len(parts) - 1
        request.pages_on[destination] = request.pages_on.get(destination, 0) + num_pages
        request.pages_on[source] -= num_pages
        if not request.pages_on[source]:
            del request.pages_on[source]
            self.committed.count_links(request.moe_binding, (source,), -1)
        if request.state is RUNNING:
            self.linked.update(request, cut=(run,), added=parts)
        frames = [FrameRun(run.frame + num_before, num_pages)]
        self.frames[source].quarantine(frames)
        return {source: frames}

    def advance(self, request: Request, position: int) -> None:
        """Set a row's position after a pass, or after accepted drafts.

        position: the one at `since_step`, if the row is running.
        """
        if request.state is RUNNING:
            self.loads.jump(request, position - request.position)
            request.position = position
            end = min(request.position_at(self.step), request.kv_len_max)
            while request.tail_end < end:
                self.enter_next_run(request)
            return
        self.loads.count_kv(request, -1)
        request.position = position
        request.tail = request.run_of(position)
        self.loads.count_kv(request, +1)

    def park(self, request: Request) -> None:
        """Take the row out of the next windows; bounds still count it."""
        if request.state is RUNNING:
            self._halt(request)
        request.state = PARKED
        self.loads.num_falls += 1
        self.loads.count_row(request.moe_binding, -1)

    # --- a term ends and the next begins

    def cancel_move(self, request: Request) -> None:
        """Free the frames that the request's pages were moving to; the pages stay."""
        move, request.move = request.move, None
        assert move is not None
        self.loads.count_move(move, -1)
        if move.destination not in request.pages_on:
            self.committed.count_links(request.moe_binding, (move.destination,), -1)
        frames = [FrameRun(run.frame, run.num_pages) for run in move.targets]
        self.frames[move.destination].quarantine(frames)
        self.frames[move.destination].free(frames)

    def hold(self, request: Request) -> None:
        """Take the request's row away; it keeps its frames, and bounds count it."""
        if request.state not in (PARKED, HELD):
            self.park(request)
        # Steps may be planned beyond its last token.
        self.loads.count_kv(request, -1)
        request.position = min(request.position, request.kv_len_max)
        self.loads.count_kv(request, +1)
        request.lose_row()
        request.state = HELD

    def begin_attempt(self, request: Request, arrival: Arrival) -> None:
        """Park a held request whose new row starts at another position."""
        self.loads.count_kv(request, -1)
        request.begin_attempt(arrival)
        request.tail = request.run_of(request.position)
        self.loads.count_kv(request, +1)
        request.state = PARKED
        self.loads.num_falls += 1

    def lose(self, instance: int) -> None:
        """Empty the frames of a seat that another process took."""
        assert not self.frames[instance].num_committed, f"instance {instance} still holds pages"
        self.frames[instance] = FrameLedger(self.cluster)
        if instance not in self.open:
            self.frames[instance].close()
        self.loads.num_falls += 1

    def rebind(self, request: Request, moe_binding: int) -> None:
        """Move the row to another instance with room, where its recurrent state gets a frame."""
        old = request.moe_binding
        if request.carry is not None:
            request.carry_source, request.ran_at = request.carry, old
            request.carry = self.frames[moe_binding].carries.take(moe_binding)
        self.loads.num_falls += 1
        self.committed.rebind(request.pages_on, old, moe_binding)
        request.moe_binding = moe_binding
        if request.state not in (PARKED, HELD):
            self.loads.count_row(old, -1)
            self.loads.count_row(moe_binding, +1)
            self.linked.update(request)

    def remove(self, request: Request) -> dict[int, list[FrameRun]]:
        """Give up all of an ended request; return its quarantined frames, by instance."""
        self.loads.num_falls += 1
        if request.state is RUNNING:
            self._halt(request)
        if request.state not in (PARKED, HELD):
            self.loads.count_row(request.moe_binding, -1)
        self.committed.count_row(request.moe_binding, request.span, -1)
        self.loads.count_kv(request, -1)
        if request.move is not None:
            self.loads.count_move(request.move, -1)
        held: dict[int, list[FrameRun]] = {}
        for run in request.held_runs:
            if run.instance not in held:
                held[run.instance] = []
            held[run.instance].append(frame_run((run.frame, run.num_pages)))
        for instance, frames in held.items():
            self.frames[instance].quarantine(frames)
        del self.requests[request.request_id]
        return held

    # --- inside

    def _enter(self, request: Request) -> None:
        self.committed.count_row(request.moe_binding, request.pages_on, +1)
        request.tail = request.run_of(request.position)
        self.loads.count_kv(request, +1)
        self.requests[request.request_id] = request

    def _halt(self, request: Request) -> None:
        self.loads.count_growing(request, self.step, -1)
        request.position = request.position_at(self.step)
        self.linked.remove(request)
