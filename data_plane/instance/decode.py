"""A decode instance: receives a plan, stages it, replays steps, samples, and reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
from torch import Tensor, cat, inference_mode

from data_plane.graph.buckets import Bucket
from data_plane.graph.engine import GraphEngine, PairedEngine
from data_plane.graph.pool_cpu import RowState, StepTables
from data_plane.instance.drafting import can_draft_alone, draft, draft_alone, take_drafts
from data_plane.instance.grammar import GrammarMasks
from data_plane.instance.interface import PageFrames, TermEnds, TermStart, state_page
from data_plane.instance.lanes import WindowLane, run_in_turns
from data_plane.instance.row_sampling import begin_masks, sample, sample_drafts
from data_plane.instance.rows import Row
from data_plane.instance.sampler import DRAWS
from data_plane.instance.step_lane import StepLane
from data_plane.instance.window_edge import StepRow, Window, WindowEdge
from data_plane.kv.frame_pool import FramePool
from data_plane.kv.gpu_copies import GpuCopies
from data_plane.kv.page_copier import PageCopier
from data_plane.kv.page_ring import copy_bytes
from data_plane.kv.slots import Slots
from data_plane.moe.expert_slots import LoadedSlots
from data_plane.moe.expert_weights import ExpertWeights
from nanocp.config.whole import Config
from nanocp.overlap.ops import OverlapPolicy
from nanocp.values.members import Resync
from nanocp.values.plan import CARRY_PAGE, PAGE_SIZE, InstancePlan, Transfer
from nanocp.values.sampling import TokenLogprobs

logger = logging.getLogger(__name__)


class Meeting(Protocol):
    """What an instance does with the others of its term besides the exchange of the host."""

    def meet(self, seats: Sequence[int]) -> None:
        """Attach to these instances, the own one included; called when all have joined."""

    def part(self) -> None:
        """Let go of them, when no step runs."""


@dataclass(frozen=True, slots=True)
class Startup:
    """What an instance is made of; `DecodeInstance.connect` attaches it to the peers."""

    lanes: Sequence[StepLane]
    """One, or two where windows may have two."""
    frames: FramePool
    ends: TermEnds
    """What is shared with others in the first term."""
    selected: list[str]
    """What was selected and why, one sentence each."""
    orders: Sequence[OverlapPolicy]
    """Orders of lanes that take turns (SchedulerConfig.lane_orders)."""
    experts: ExpertWeights
    """This instance's experts."""
    new_ends: Callable[[], TermEnds] | None
    """Makes what is shared with others in another term; None: there is one term only."""
    drafts_alone: bool = False
    """Whether the step is a DeviceDraftingStep."""
    both_lanes: PairedEngine | None = None
    """What captured the steps of both lanes; None if they take turns in the instance's thread."""
    graphs_report: Callable[[], list[str]] = list
    """Sentences about the graphs once they are prepared."""
    meeting: Meeting | None = None
    """What else is done with the other instances of a term; None on a CPU."""
    copies: Callable[[np.ndarray], GpuCopies] | None = None
    """Makes what copies pages to the memory of slots and back; None on a CPU."""


class InstanceFrames(PageFrames):
    """Frames of KV, and behind them those of states, as tickets number them."""

    def __init__(self, config: Config, pool: FramePool, instance: int) -> None:
        self._instance = instance
        self.pool, self.states = pool, pool.carry
        self._cluster = config.cluster
        self._is_synthetic = config.prefill.synthetic_kv

    def read(self, frame: int) -> Any:
        state = state_page(self.states, self._cluster, frame)
        return self.pool.page_view(frame) if state is None else state

    def write(self, frame: int, num_tokens: int, payload: Any, offset: int) -> None:
        state = state_page(self.states, self._cluster, frame)
        if state is not None:
            copy_bytes(payload, state[offset : offset + len(payload)])
            return
        self.pool.write_payload(frame, num_tokens, payload, offset)

    def make(self, transfer: Transfer) -> bool:
        if transfer.source is not None or not self._is_synthetic:
            return False
        for page, frame in transfer.frames_at(self._instance).items():
            if page < CARRY_PAGE:
                num_tokens = transfer.tokens_in(page)
                self.pool.fill_synthetic(frame, num_tokens, transfer.request_id, page)
            elif page == CARRY_PAGE and self.states is not None:
                self.states.clear(self._cluster.carry_place(frame)[0], transfer.num_tokens)
        return True


class DecodeInstance(WindowEdge):
    """The instance that serves: tensors, captured steps, the model's sampler."""

    def __init__(self, config: Config, startup: Startup) -> None:
        """Everything is made; `connect` attaches it to the peers."""
        first, *others = startup.lanes
        sent_bytes = first.exchange.sent_bytes
        frames = InstanceFrames(config, startup.frames, startup.ends.exchange.instance)
        steps, mb_per_s = [lane.step for lane in startup.lanes], config.cluster.expert_load_mb_per_s
        experts = LoadedSlots(steps, startup.experts, mb_per_s)
        super().__init__(config, startup.ends, frames, sent_bytes, experts, startup.new_ends)
        self.selected = startup.selected
        """What was selected at start-up and why, one sentence each."""
        if (
            slots := Slots.of(
                config.scheduler, config.kv_offload.file_dir, startup.frames.page_bytes
            )
        ) is not None:
            gpu = startup.copies(slots.memory) if startup.copies is not None else None
            self.pages.copier = PageCopier(self._instance, slots, frames.read, frames.write, gpu)
            self.pages.copier.start()
        self.startup = startup
        """What it is made of."""
        for lane in others:
            lane.exchange.sent_bytes = first.exchange.sent_bytes  # one count for both
        self.grammar_masks: GrammarMasks | None = None
        """Masks of structured output; set at start-up, None if no row may have a grammar."""
        self._num_graphs: int | None = None

    @property
    def awaited(self) -> int | None:
        of_steps = (lane.step.awaited for lane in self.startup.lanes)
        return next((peer for peer in of_steps if peer is not None), super().awaited)

    def connect(self) -> int:
        super().connect()
        if self.startup.meeting is not None:
            self.startup.meeting.meet(sorted([self._instance, *self._peers]))
        if self._num_graphs is None:
            self.prepare()
        assert self._num_graphs is not None
        return self._num_graphs

    def prepare(self) -> None:
        """Prepare every graph, which outlives every term; all peers are needed only with DeepEP."""
        engines: list[GraphEngine | PairedEngine] = [lane.engine for lane in self.startup.lanes]
        if self.startup.both_lanes is not None:
            engines[1:] = [self.startup.both_lanes]  # lane 1 never runs alone
        self._num_graphs = sum(
            engine.prepare(
                lambda done, total: logger.debug("graphs: %d of %d prepared", done, total)
            )
            for engine in engines
        )
        for lane in self.startup.lanes:
            lane.step.check()
            lane.step.meet(self._peers)  # forget epochs of steps that no peer has run
        self.selected += self.startup.graphs_report()

    # --- terms ---

    def leave(self) -> None:
        if self.startup.meeting is not None:
            self.startup.meeting.part()
        self._close_tensors()
        super().leave()

    def join(self, ends: TermEnds, start: TermStart) -> None:
        super().join(ends, start)
        for lane in self.startup.lanes:
            lane.exchange.begin_term(ends.exchange)
            lane.step.meet(self._peers)

    # --- windows ---

    def begin(self, plan: InstancePlan) -> Resync | None:
        needed = super().begin(plan)
        if self._window is not None:
            for lane in self._window.lanes:
                engine = self.startup.lanes[lane.number].engine
                width = self._window.width
                self._stage(engine.stage(plan.window, width), lane, width)
                engine.staged()
        return needed

    def run_step(self) -> None:
        with self._one_step() as window:
            is_drafting = window.plan.num_drafts > 0
            order = self.startup.orders[window.plan.two_lanes - 1]  # any, of one lane
            is_alone = is_drafting and self.startup.drafts_alone and can_draft_alone(window)
            masks = begin_masks(self.grammar_masks, window.live_rows())
            for lane in window.lanes:
                _load_row_state(
                    self.startup.lanes[lane.number].engine.rows, lane.rows, window.width
                )
            if len(window.lanes) == 1:
                self.startup.lanes[0].engine.replay()
            elif self.startup.both_lanes is not None:
                self.startup.both_lanes.replay(window.plan.two_lanes - 1)
            else:
                window.hidden_ns += self._run_in_turns(order)
            if is_alone:
                of_step, *of_turns = draft_alone(window, self.startup.lanes[0])
                self._commit_step(window, partial(_highest, of_step))
                take_drafts(window, self.startup.lanes[0], of_turns)
                return
            for lane in window.lanes:
                self.startup.lanes[lane.number].step.check()
            self._commit_step(window, partial(self._sample, window, masks))
            if is_drafting:
                draft(window, self.startup.lanes, self._exchange, self._guess, order)

    @inference_mode()
    def _run_in_turns(self, order: OverlapPolicy) -> int:
        steps: list[Any] = [lane.engine.next_step() for lane in self.startup.lanes]
        return run_in_turns([step.phases() for step in steps], self._exchange, order)

    def _bucket(self, window: Window) -> Bucket:
        buckets = [self.startup.lanes[lane.number].engine.bucket for lane in window.lanes]
        return Bucket(
            sum(bucket.num_rows for bucket in buckets),
            sum(bucket.num_received for bucket in buckets),
        )

    def _stage(self, tables: StepTables, lane: WindowLane, width: int) -> None:
        table, rows = self._table.now, lane.rows
        first_of = {row.request_id: index * width for index, row in enumerate(rows)}
        tables.num_rows[0] = len(rows) * width
        tables.own.num_pages[:] = 0
        tables.received.num_pages[:] = 0
        for index, row in enumerate(rows):
            page = row.position // PAGE_SIZE
            # The page after the tail is appended to only if the window reaches it.
            holders = [table.holder(row.request_id, number) for number in (page, page + 1)]
            runs = table.pages.get(row.request_id, ())
            if self._frames.states is not None:
                runs = [run for run in runs if run.first_page < CARRY_PAGE]
                tables.carry_frame[index] = self._carry_frame(row.request_id)
            for place in range(index * width, (index + 1) * width):
                tables.tail_page[place] = page
                tables.tail_holder[place] = holders
                tables.own.fill(place, runs)
        for peer, requests in enumerate(lane.q_route):
            places = [first_of[each] + offset for each in requests for offset in range(width)]
            tables.num_sent[peer] = len(places)
            tables.send_row[peer, : len(places)] = places
        received = 0
        for peer, requests in enumerate(lane.res_route):
            tables.num_received[peer] = len(requests) * width
            for request_id in requests:
                for _ in range(width):
                    tables.received.fill(received, table.pages.get(request_id, ()))
                    received += 1

    def _sample(
        self,
        window: Window,
        pending: Future[Tensor] | None,
        step_rows: Sequence[StepRow],
        offset: int,
    ) -> list[tuple[int, TokenLogprobs | None]]:
        """Sample behind the input tokens at an offset. pending: masks of offset 0, if begun."""
        parts = [
            self.startup.lanes[number].step.logits_of([each.place + offset for each in of_lane])
            for number, of_lane in groupby(step_rows, attrgetter("lane"))
        ]
        rows = [each.row for each in step_rows]
        if offset:
            pending = begin_masks(self.grammar_masks, rows)
        logits = cat(parts) if len(parts) > 1 else parts[0]
        draw = DRAWS[self._config.data_plane.sampling]
        return sample(rows, logits, self._finished_masks(window, pending), draw)

    def _guess(self, rows: Sequence[Row], logits_BV: Tensor) -> list[int | None]:
        draw = DRAWS[self._config.data_plane.sampling]
        return sample_drafts(rows, logits_BV, self.grammar_masks, draw)

    def _finished_masks(self, window: Window, pending: Future[Tensor] | None) -> Tensor | None:
        if pending is None:
            return None
        begin_ns = time.perf_counter_ns()
        allowed = pending.result()
        window.mask_ns += time.perf_counter_ns() - begin_ns
        return allowed

    def close(self) -> None:
        self._close_tensors()
        super().close()

    def _close_tensors(self) -> None:
        for lane in self.startup.lanes:
            lane.exchange.close()


def _load_row_state(state: RowState, rows: list[Row], width: int) -> None:
    state.live[:] = False
    for index, row in enumerate(rows):
        num_live = row.num_live(width - 1)
        for offset in range(width):
            place = index * width + offset
            state.token[place] = row.step_token(offset)
            state.position[place] = row.position + offset
            state.live[place] = offset < num_live


def _highest(
    ids: Sequence[int], step_rows: Sequence[StepRow], offset: int
) -> list[tuple[int, TokenLogprobs | None]]:
    """Sample by the tokens of the highest logits: of each step row."""
    return [(ids[each.place + offset], None) for each in step_rows]
