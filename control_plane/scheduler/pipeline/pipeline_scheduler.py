"""The scheduler of a pipeline: a plan follows from state, events and time alone."""

from __future__ import annotations

from collections.abc import Sequence

from control_plane.scheduler.base import SchedulerBase
from control_plane.scheduler.pages.prefix_sharing import PrefixSharing
from control_plane.scheduler.pages.quarantine import Quarantine
from control_plane.scheduler.pipeline.layer_places import frames_in
from control_plane.scheduler.pipeline.layout_changes import LayoutChanges
from control_plane.scheduler.pipeline.pass_rows import PassRow, PassRows
from control_plane.scheduler.pipeline.predictor import predict_pass
from control_plane.scheduler.policies.layout import num_growth_pages
from control_plane.scheduler.queue.deferral import Deferral, TokensRead
from control_plane.scheduler.queue.known_requests import KnownRequests
from control_plane.scheduler.state.answer import Answer
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.proposal import Proposal
from control_plane.scheduler.state.request import Request, num_pages
from control_plane.scheduler.windows.lowering import Lowering
from nanocp.config.cluster import ClusterConfig
from nanocp.config.pipeline import PipelineConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.passes import (
    LayersMoved,
    LayoutWanted,
    PassDone,
    PassPlan,
    PipelinePlan,
    Span,
    StageWorked,
)
from nanocp.values.plan import (
    PAGE_SIZE,
    AbortRequested,
    Arrival,
    ClusterLost,
    InstanceLoad,
    InstanceLost,
    Regrouped,
    Resubmitted,
    TermEnded,
)

PipelineEvent = (
    Arrival
    | AbortRequested
    | PassDone
    | StageWorked
    | LayersMoved
    | LayoutWanted
    | InstanceLost
    | TermEnded
    | Regrouped
    | Resubmitted
    | ClusterLost
)


class PipelineScheduler(SchedulerBase):
    """The one scheduler of a pipeline of stages."""

    def __init__(
        self,
        cluster: ClusterConfig,
        scheduler: SchedulerConfig,
        pipeline: PipelineConfig,
        rows: PassRows | None = None,
    ) -> None:
        """cluster: of one instance, whose frames are those of every stage.

        rows: choose a pass's tokens; None: as the pipeline says. Raises ValueError for more
        instances, or an unknown layer policy.
        """
        if cluster.num_instances != 1:
            raise ValueError(
                f"num_instances is {cluster.num_instances}; a pipeline has one page table for all "
                "its stages, so it must be 1"
            )
        # No pass is a window, so nobody is deferred.
        deferral = Deferral(scheduler, lambda: TokensRead(0, 0))
        super().__init__(cluster, scheduler, Answer(), deferral)
        self._pipeline = pipeline
        self._rows = rows or PassRows(pipeline.num_stages, pipeline.max_pass_tokens)
        self.layouts = LayoutChanges(pipeline)
        self._begin_term(cluster)
        self._until_us: int | None = None
        """When front ends are waited for no longer; None if all have submitted."""
        self._handlers |= {
            PassDone: self._pass_done,
            StageWorked: lambda event: self.layouts.speeds.ran(event.stage, event.number, event.us),
            LayersMoved: lambda event: self.layouts.reported(event.number),
            LayoutWanted: lambda event: self.layouts.ask(event.split),
            Regrouped: self._regrouped,
        }

    @property
    def _waits_until_us(self) -> int | None:
        return self._until_us

    def _begin_term(self, cluster: ClusterConfig) -> None:
        self._state = ClusterState(cluster)
        self._lowering = Lowering(1)
        self._quarantine = Quarantine(1)
        self.requests = KnownRequests(self._state, self._admission, self._quarantine)
        self.prefix_sharing = PrefixSharing(self._state, self._config.prefix_sharing)
        self._next_pass = 0
        self._oldest = 0
        """The oldest pass in flight: the first that the last stage has not reported."""
        self._prompts_in: dict[int, int] = {}
        """Request id -> the newest pass in flight with tokens of its prompt."""
        self._starved: dict[int, None] = {}
        """Ids of rows that wait for a frame (an ordered set): they go before new requests."""

    def plan_pass(self, events: Sequence[PipelineEvent], now_us: int) -> PipelinePlan:
        """Take events in order and decide.

        The plan has a pass if a row can go on and at most `PassRows.max_in_flight` passes are in
        flight: the one that comes on top waits at the first stage.
        """
        self._admission.begin_call(now_us)
        for event in events:
            self._handlers[type(event)](event)
        self._expire()
        pass_plan = moves = None
        if self._term.is_over:
            decided = self._answer.take(None, (), 0)
            return PipelinePlan(None, None, decided.ended, decided.preempted)
        self._place_waiting()
        if self._admission.failure is None:
            moves = self.layouts.next_moves(len(self._rows.by_id), self._full_and_live)
        if self._admission.failure is None and self.num_in_flight <= self._rows.max_in_flight:
            # The first stage waits for the oldest pass if as many are in flight as may be. Else it
            # would keep others from going on: then a row that waits for it goes alone.
            is_full = self.num_in_flight == self._rows.max_in_flight
            spans, sampled = self._form(self._oldest if is_full else self._oldest - 1)
            if not spans:
                spans, sampled = self._form(self._oldest)
            while not spans and self._break_deadlock():
                spans, sampled = self._form(self._oldest)
            if spans:
                pass_plan = self._issue(spans, sampled)
        decided = self._answer.take(None, (), 0)
        return PipelinePlan(pass_plan, moves, decided.ended, decided.preempted)

    @property
    def num_in_flight(self) -> int:
        """Passes that were sent and that the last stage has not reported."""
        return self._next_pass - self._oldest

    @property
    def load(self) -> InstanceLoad:
        """What is decided for every stage alike: rows, tokens and frames."""
        return self._state.load(0)

    # --- events

    def _pass_done(self, event: PassDone) -> None:
        if self._admission.failure is not None:
            return
        for request_id, num_tokens, _ in event.finished:
            self._promise.ended(num_tokens)
            # Else it was aborted, all its tokens were planned, or another attempt has its row.
            row = self._rows.by_id.get(request_id)
            if row and row.request.is_row_of(event.number):
                self._release(row.request)
        assert event.number == self._oldest, f"pass {event.number} was reported out of order"
        self._prompts_in = {i: n for i, n in self._prompts_in.items() if n > event.number}
        self.requests.free(*self._quarantine.windows_reported([(0, event.number)]))
        self._oldest += 1

    def _regrouped(self, event: Regrouped) -> None:
        """Every stage begins anew, with the layers of the start: all requests come back."""
        rows = self._rows.by_id
        if self._term.lost_seats and self.num_in_flight:
            self._admission.first_windows.lost(self._prompts_in.keys())
        for row in rows.values():
            self._admission.fair_share.row_stops(row.request.arrival)
        rows.clear()
        sharing = self.prefix_sharing
        self._begin_term(self._state.cluster)
        self.prefix_sharing.num_queried_tokens = sharing.num_queried_tokens
        self.prefix_sharing.num_hit_tokens = sharing.num_hit_tokens
        self.layouts.begin_term()
        self._term.begin()
        self._until_us = self._admission.now_us + self._config.held_timeout_us

    def _resubmitted(self, event: Resubmitted) -> None:
        self._until_us = None
        self._admission.should_walk = True

    # --- ends

    def _release(self, request: Request) -> None:
        """Give up the row now, and its frames when the last stage has run the row's last pass.

        Until then a stage that got a layer may not have its KV, and the one that gave it, which
        runs ahead, must not see the frames written again.
        """
        row = self._rows.by_id.pop(request.request_id)
        self._admission.fair_share.row_stops(request.arrival)
        self._starved.pop(request.request_id, None)
        if request.is_started:
            self._lowering.suspend(request)
            self._lowering.end(request)
        frames = self._state.remove(request)
        self.requests.free(self._quarantine.hold(frames, row.last_pass, (0,), None, ()))

    # --- placement

    def _place_waiting(self) -> None:
        # A row that waits for a frame goes before a new one: it has tokens to continue. So does a
        # request that the end of a term has interrupted.
        if not self._starved and self._until_us is None:
            self._admission.walk(self._place)

    def _place(self, arrival: Arrival) -> bool:
        # A request that was preempted once is promised all, and waits for no frame again.
        num_promised = (
            arrival.max_tokens if arrival.resumes else self._promise.num_tokens(arrival.max_tokens)
        )
        num_growth = num_growth_pages(arrival.prompt_len, num_promised)
        proposal = Proposal(0, {0: num_pages(arrival.prompt_len)})
        layout = self.prefix_sharing.layout(proposal, arrival, num_growth)
        if layout is None:
            return False
        request = Request.from_arrival(arrival, 0)
        self._state.place(request, layout)
        self.prefix_sharing.placed(request, arrival)
        for run in request.runs:
            if run.first_page >= request.num_shared:
                self.layouts.places.write(run.frame, run.num_pages)
        row = PassRow(request, request.num_shared * PAGE_SIZE, sampler_work=arrival.sampler_work)
        self._rows.by_id[request.request_id] = row
        self._admission.fair_share.row_starts(request.arrival)
        return True

    # --- passes

    def _form(self, newest: int) -> tuple[list[Span], int]:
        """Plan the spans of the next pass, those of rows that decode first; commit their pages.

        newest: the last pass whose tokens spans may begin with. Returns the spans, and the last
        pass whose tokens they do begin with.
        """
        rows, number = self._rows, self._next_pass
        spans: list[Span] = []
        sampled, num_share = -1, rows.num_share
        for row in rows.decoding(newest):
            if len(spans) < num_share and self._has_page(row):
                sampled = max(sampled, row.last_sample)
                spans.append(rows.plan(row, number, 1))
        spans += [rows.plan(row, number, count) for row, count in rows.chunks(len(spans))]
        return spans, sampled

    def _has_page(self, row: PassRow) -> bool:
        """Whether the row's next token has a frame; commits one if it can."""
        request = row.request
        position = request.num_pages * PAGE_SIZE
        if row.next >= position:
            num_free = self._state.frames[0].num_free
            if not num_free:
                self._starved[request.request_id] = None
                return False
            num_promised = self._promise.num_tokens(request.kv_len_max - position + 1)
            wanted = max(num_growth_pages(position, num_promised), 1)
            runs = self._state.append_pages(request, 0, min(wanted, num_free))
            self._lowering.append_pages(request, runs, False, True)
            for run in runs:
                self.layouts.places.write(run.frame, run.num_pages)
        self._starved.pop(request.request_id, None)
        return True

    def _break_deadlock(self) -> bool:
        """Preempt the newest row of the lowest class, if rows starve and nothing will free a frame.

        No pass is in flight, so no row can have stopped meanwhile, and its tokens are known.
        """
        if not self._starved or self.num_in_flight:
            return False
        rows = [self._rows.by_id[request_id].request for request_id in self._starved]
        newest = max(rows, key=lambda request: request.order)
        num_tokens = self._rows.by_id[newest.request_id].next + 1
        self._release(newest)
        self._admission.preempted(newest.request_id, num_tokens)
        return True

    def _issue(self, spans: list[Span], sampled: int) -> PassPlan:
        number, by_id = self._next_pass, self._rows.by_id
        works = [by_id[span.request_id].sampler_work for span in spans]
        for span in spans:
            request = by_id[span.request_id].request
            if not request.is_started:
                self._lowering.start(request, number)
            self._state.advance(request, max(span.first, request.position))
        (table,) = self._lowering.emit(number, number, 1)
        for span in spans:
            row = by_id[span.request_id]
            # Stages run passes in their order: who is planned later reads what this one writes.
            self.prefix_sharing.written(row.request, row.next)
            if span.first < row.request.arrival.prompt_len:
                self._prompts_in[span.request_id] = number
            if span.samples:
                self._admission.fair_share.generated(row.request.arrival, 1)
            if row.is_planned:
                self._release(row.request)
        self._next_pass += 1
        after = max(sampled, number - self._rows.max_in_flight, -1)
        plan = PassPlan(number, self.layouts.layout, after, table, tuple(spans))
        num_frames = self._state.frames[0].num_committed
        times = predict_pass(spans, self._pipeline.costs, works)
        self.layouts.consider(times, number, num_frames)
        return plan

    # --- layers

    def _full_and_live(self) -> tuple[int, int]:
        """Frames whose page will not be written again, and all with KV, after the passes sent."""
        full = live = frames_in((frame, 1) for frame, *_ in self._state.frames[0].cached_pages())
        for row in self._rows.by_id.values():
            for run in row.request.runs:
                num_full = row.next // PAGE_SIZE - run.first_page
                num_live = num_pages(row.next) - run.first_page
                full |= frames_in([(run.frame, max(min(num_full, run.num_pages), 0))])
                live |= frames_in([(run.frame, max(min(num_live, run.num_pages), 0))])
        return full, live
