"""A stage of a pipeline, but for its arithmetic: passes in order, the page table, tokens."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from data_plane.instance.interface import PageMover
from data_plane.instance.rows import Row
from data_plane.instance.stage_layers import LayerStore, StageLayers
from data_plane.transport.stage_links import HiddenRows, PassTokens, StageLinks
from nanocp.config.pipeline import PipelineConfig
from nanocp.values.passes import LayerMoves, LayersMoved, PassDone, PassPlan, Span
from nanocp.values.plan import PAGE_SIZE, Finished
from nanocp.values.sampling import PromptLogprobs, Token, TokenLogprobs
from nanocp.values.table import InstanceTable

Waits = Generator[str, None, None]


class StagePolled(NamedTuple):
    """What happened in a stage since the last poll."""

    events: tuple[PassDone | LayersMoved, ...]
    tokens: tuple[Token, ...]


class StageRequests:
    """The requests of a term at one stage: page table, known tokens, rows that sample."""

    def __init__(self, is_first: bool, is_last: bool) -> None:
        self._is_first, self._is_last = is_first, is_last
        self.table = InstanceTable(0, 1)
        self._ids: dict[int, list[int]] = {}
        """Request -> the tokens that are known: at the first stage, and where KV for drafts is."""
        self._first_pass: dict[int, int] = {}
        """At the first stage: request -> the pass in which its present attempt starts."""
        self.rows: dict[int, Row] = {}
        """At the last stage, which samples."""
        self.asked: dict[int, tuple[Sequence[int], PromptLogprobs]] = {}
        """At the last stage: request -> (known tokens, who gets their log probabilities)."""
        self._asked_next: dict[int, tuple[Sequence[int], PromptLogprobs]] = {}
        """Those of attempts that have not started: an earlier one of the request may still run."""
        self._tokens_until = -1
        """The last pass whose tokens are here."""

    def take_prompt(self, request_id: int, token_ids: Sequence[int]) -> None:
        """Before the pass in which the request starts, for a stage that needs its known tokens."""
        self._ids[request_id] = list(token_ids)

    def ask_logprobs(
        self, request_id: int, token_ids: Sequence[int], wanted: PromptLogprobs
    ) -> None:
        """Before the request starts, ask for those of its known tokens, but the first."""
        self._asked_next[request_id] = token_ids, wanted

    def apply(self, plan: PassPlan) -> None:
        """Bring the table to the pass; raises RuntimeError if it is for another one."""
        table = plan.table
        if self.table.digest != table.base_digest:
            raise RuntimeError(f"pass {plan.number} was planned for another page table")
        self.table.apply(table.changes)
        if self.table.digest != table.result_digest:
            raise RuntimeError(f"pass {plan.number} makes another page table than was planned")
        started = {start.request_id for start in table.starts}
        for request_id in table.ends:
            self.rows.pop(request_id, None)
            self.asked.pop(request_id, None)
            if request_id not in started:
                self._ids.pop(request_id, None)
                self._first_pass.pop(request_id, None)
        if self._is_first:
            self._first_pass |= dict.fromkeys(started, plan.number)
        if self._is_last:
            for start in table.starts:
                if start.request_id in self._asked_next:
                    self.asked[start.request_id] = self._asked_next.pop(start.request_id)
                if start.row_start:  # else no span of it samples
                    self.rows[start.request_id] = Row.start(start)

    def take_tokens(self, links: StageLinks, until: int) -> bool:
        """Take the tokens that are here; whether those of pass `until` are among them."""
        while self._tokens_until < until:
            if (tokens := links.receive_tokens()) is None:
                return False
            if tokens.number != self._tokens_until + 1:
                raise RuntimeError(f"tokens of pass {tokens.number} after {self._tokens_until}")
            self._tokens_until = tokens.number
            for request_id, token_id in tokens.tokens:
                # Else it has ended meanwhile, or goes on as another attempt, whose prompt has
                # what counts of them.
                if tokens.number >= self._first_pass.get(request_id, tokens.number + 1):
                    self._ids[request_id].append(token_id)
        return True

    def inputs(self, span: Span, ahead: int = 0) -> list[int]:
        """The span's token ids, or those so far ahead. A row that has stopped runs on over any."""
        first = span.first + ahead
        ids = self._ids[span.request_id][first : first + span.num_tokens]
        return ids + [0] * (span.num_tokens - len(ids))

    def frames_of(self, span: Span) -> list[int]:
        """The frames of the request's pages, from page 0 to that of the span's last token."""
        frames = self.table.frames(span.request_id)
        last_page = (span.first + span.num_tokens - 1) // PAGE_SIZE
        return [frames[page] for page in range(last_page + 1)]


class StageModel(LayerStore, Protocol):
    """The arithmetic of a stage, with weights and KV of its layers."""

    def begin_term(self, layers: StageLayers, requests: StageRequests) -> None:
        """A term begins, without a request: these have the places, and the requests to come."""

    def load(self, layers: Sequence[int]) -> None:
        """Wait until the weights of these layers are here."""

    def ended(self, request_ids: Sequence[int]) -> None:
        """These requests have ended; one may begin again in the same pass."""

    def embed(self, spans: Sequence[tuple[Span, Sequence[int]]]) -> Any:
        """Rows of the spans before the first layer. Each span comes with its token ids."""

    def run_layer(
        self, layer: int, place: int, spans: Sequence[tuple[Span, Sequence[int]]], rows: Any
    ) -> Any:
        """The rows after one layer, whose KV of the spans is written to the spans' frames."""

    def sample(
        self, spans: Sequence[Span], samplers: Sequence[Row | None], rows: Any
    ) -> list[tuple[int, TokenLogprobs | None]]:
        """The token after each span that has a sampler. Before that it reports what is asked."""

    def close(self) -> None:
        """Release all. Idempotent."""


Model = TypeVar("Model", bound=StageModel)


class StageEdge(Generic[Model]):
    """A stage: its model runs the passes that come, over its layers and requests."""

    def __init__(
        self,
        stage: int,
        pipeline: PipelineConfig,
        num_frames: int,
        model: Model,
        links: StageLinks,
        mover: PageMover,
    ) -> None:
        """mover: takes KV of layers to other stages, one frame of one layer a page."""
        self.number, self._pipeline, self._num_frames = stage, pipeline, num_frames
        self.model = model
        self.selected: list[str] = []
        """What was selected at start-up and why, one sentence each."""
        self.make_ends: Callable[[], tuple[StageLinks, PageMover]] | None = None
        """Makes links and a mover for another term; None if there is one term only."""
        self._begin_term(links, mover)

    def _begin_term(self, links: StageLinks, mover: PageMover) -> None:
        self._links, self._mover = links, mover
        self._has_left = False
        self.layers = StageLayers(self.number, self._pipeline, self._num_frames, mover, self.model)
        self.requests = StageRequests(self.number == 0, self._is_last)
        self.model.begin_term(self.layers, self.requests)
        self._done: list[PassDone] = []
        self._tokens: list[Token] = []
        self.awaited: int | None = None
        """The stage that `run` waits for now; None if none. Any thread may read it."""
        self.waits_for = ""
        """The cause of the latest wait: one of passes.WAIT_CAUSES."""

    @property
    def _is_last(self) -> bool:
        return self.number == self._pipeline.num_stages - 1

    # --- calls

    def leave(self) -> None:
        """Forget the term: a run that has not ended is abandoned. Idempotent."""
        self._has_left, self.awaited = True, None
        self.close_ends()

    def enter(self, links: StageLinks, mover: PageMover) -> None:
        """Begin another term after `leave`, as at the start, with ends that are not connected."""
        self._begin_term(links, mover)
        for layer, place in self.layers.place_of.items():
            self.model.new_layer(layer, place)

    def connect(self) -> None:
        """Attach to the other stages, and load all own layers. Raises PeerLost and others."""
        if self._has_left:
            assert self.make_ends is not None, "there is one term only"
            self.enter(*self.make_ends())
        self._links.connect()
        self._mover.connect()
        self.model.load(self.layers.own)

    def wait(self, timeout_ms: float) -> None:
        """Wait for hidden rows or tokens; `run` then goes on. KV that comes does not end it."""
        self._links.wait(timeout_ms)

    def close(self) -> None:
        """Release all. Idempotent."""
        self.close_ends()
        self.model.close()

    def close_ends(self) -> None:
        """Release both ends of links and mover. Idempotent."""
        self._links.close()
        self._mover.close()

    def progress(self) -> None:
        """Take KV that arrived, and send what finds a place (StageLayers.progress)."""
        self.layers.progress()

    def run(self, item: PassPlan | LayerMoves) -> Waits:
        """Run what comes next; yields what it waits for. Raises RuntimeError if it cannot be."""
        if isinstance(item, LayerMoves):
            self.layers.begin_moves(item)
        else:
            yield from self._run_pass(item)
        self.progress()

    def skip(self, plan: PassPlan) -> None:
        """Pass over a pass that may have failed, in a pipeline of one stage; its requests end."""
        if self.requests.table.digest != plan.table.result_digest:
            self._apply(plan)
        for span in plan.spans:
            self.layers.filled[:, self.requests.frames_of(span)[span.first // PAGE_SIZE :]] = 0
        self._links.send_tokens(PassTokens(plan.number, ()))

    def poll(self) -> StagePolled:
        """What happened since the last call."""
        polled = StagePolled((*self._done, *self.layers.moved), tuple(self._tokens))
        self._done, self.layers.moved, self._tokens = [], [], []
        return polled

    # --- a pass

    def _run_pass(self, plan: PassPlan) -> Waits:
        self._apply(plan)
        layers, requests = self.layers, self.requests
        if plan.layout != layers.layout:
            raise RuntimeError(
                f"pass {plan.number} is for layout {plan.layout}, not {layers.layout}"
            )
        if self.number == 0:
            is_here = partial(requests.take_tokens, self._links, plan.after)
            what, last = f"tokens of pass {plan.after}", self._pipeline.num_stages - 1
            yield from self._until(is_here, what, last, "tail")
            rows = self.model.embed([(span, requests.inputs(span)) for span in plan.spans])
        else:
            rows = yield from self._receive_rows(plan)
        spans = [(span, requests.frames_of(span)) for span in plan.spans]
        for layer in layers.own:
            source = layers.source_of.get(layer, self.number)
            yield from self._until(
                partial(layers.is_complete, layer), f"KV of layer {layer}", source, "kv"
            )
            place = layers.place_of[layer]
            layers.fill(layer, place, spans)
            rows = self.model.run_layer(layer, place, spans, rows)
            if layers.is_moving:  # a stage that never waits would else send a ring's worth a pass
                self.progress()
        if self._is_last:
            self._done.append(PassDone(plan.number, self._commit(plan, rows)))
        else:
            self._links.send_hidden(HiddenRows(plan.number, plan.layout, layers.own.stop, rows))

    def _apply(self, plan: PassPlan) -> None:
        self.requests.apply(plan)
        self.layers.empty_frames(plan.table, plan.spans)
        self.model.ended(plan.table.ends)

    def _until(self, is_here: Callable[[], bool], what: str, stage: int, cause: str) -> Waits:
        """Wait for a stage. KV must flow meanwhile, or two stages could wait for each other."""
        while not is_here():
            self.progress()
            if is_here():
                break
            self.awaited = None if stage == self.number else stage
            self.waits_for = cause
            yield f"stage {self.number} waits for {what}"
        self.awaited = None

    def _receive_rows(self, plan: PassPlan) -> Generator[str, None, Any]:
        received: list[HiddenRows] = []

        def is_here() -> bool:
            if not received and (rows := self._links.receive_hidden()) is not None:
                received.append(rows)
            return bool(received)

        what = f"hidden rows of pass {plan.number}"
        yield from self._until(is_here, what, self.number - 1, "fill")
        expected = plan.number, plan.layout, self.layers.own.start
        if received[0][:3] != expected:
            raise RuntimeError(
                f"stage {self.number} got (pass, layout, next layer) {received[0][:3]}, and would "
                f"run {expected}"
            )
        return received[0].rows

    def _commit(self, plan: PassPlan, rows: Any) -> tuple[Finished, ...]:
        """Sample, and send the tokens to the first stage; returns the rows that stopped."""
        samplers = [
            None if row is None or row.finished else row
            for row in (
                self.requests.rows[span.request_id] if span.samples else None for span in plan.spans
            )
        ]
        sampled = iter(self.model.sample(plan.spans, samplers, rows))
        finished, tokens = [], []
        for row in (row for row in samplers if row is not None):
            token = row.commit(*next(sampled))
            self._tokens.append(token)
            tokens.append((token.request_id, token.token_id))
            if token.finish_reason is not None:
                finished.append(Finished(token.request_id, token.index + 1, token.finish_reason))
        self._links.send_tokens(PassTokens(plan.number, tuple(tokens)))
        return tuple(finished)
