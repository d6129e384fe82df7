"""The edge of a window: apply a plan, resync, hand rows over, report."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from data_plane.graph.buckets import Bucket
from data_plane.instance.interface import Instance, PageFrames, Polled, TermEnds, TermStart
from data_plane.instance.lanes import Waiting, WindowLane, run_waiting, window_lanes
from data_plane.instance.page_transfers import AppliedTable, PageTransfers
from data_plane.instance.rows import Row
from data_plane.moe.expert_tables import ExpertSlots, ExpertTables
from data_plane.transport.exchange import Awaited, Channel
from data_plane.transport.mailbox import fill_mailbox, mailbox_messages
from nanocp.config.whole import Config
from nanocp.values.members import Report, Resync
from nanocp.values.plan import (
    CARRY_PAGE,
    Finished,
    InstancePlan,
    WindowDone,
    WrittenPage,
)
from nanocp.values.sampling import Token, TokenLogprobs
from nanocp.values.table_changes import PageRun
from nanocp.wire.rows import decode_hand_off_state, encode_hand_off_state


@dataclass(slots=True)
class Window:
    """A window that is running, and what its steps did so far."""

    plan: InstancePlan
    lanes: tuple[WindowLane, ...]
    """What each of the window's steps runs."""
    steps_done: int = 0
    step_ns: int = 0
    waited_ns: int = 0
    hidden_ns: int = 0
    """Time that one lane computed while the other waited; 0: one lane, or a GPU runs both."""
    mask_ns: int = 0
    """Time that the steps waited for masks of structured output; 0: no row has a grammar."""
    num_tokens: int = 0
    drafts: list[list[int]] = field(default_factory=list)
    """[checked, accepted] drafts, by their offset from 1."""
    advanced: list[int] = field(default_factory=list)
    """Requests whose drafts were accepted, each as often, also of rows that have stopped."""
    finished: list[Finished] = field(default_factory=list)
    written: list[WrittenPage] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Rows of all lanes."""
        return sum(len(lane.rows) for lane in self.lanes)

    @property
    def num_received(self) -> int:
        """Links to this instance, of all lanes."""
        return sum(len(requests) for lane in self.lanes for requests in lane.res_route)

    @property
    def width(self) -> int:
        """Step rows of a row: its known token and its drafts, next to each other."""
        return 1 + self.plan.num_drafts

    def live_rows(self) -> list[Row]:
        """The rows that have not finished, lane by lane: each step samples a token for them."""
        return [row for lane in self.lanes for row in lane.rows if not row.finished]


class StepRow(NamedTuple):
    """A row in a step, where its known token is; its drafts are behind it."""

    lane: int
    place: int
    """Index among the step rows of the lane."""
    row: Row


Sampler = Callable[[Sequence[StepRow], int], Sequence[tuple[int, TokenLogprobs | None]]]
"""Samples the tokens after the input tokens of these rows at an offset: 0 is the known one."""


class WindowEdge(Instance):
    """All of instance.interface.Instance that does not depend on what a step computes."""

    def __init__(
        self,
        config: Config,
        ends: TermEnds,
        frames: PageFrames,
        sent_bytes: dict[Channel, int],
        slots: ExpertSlots,
        new_ends: Callable[[], TermEnds] | None = None,
    ) -> None:
        """The ends are of the first term; new_ends makes those of later ones, if there are any.

        sent_bytes: bytes put by steps since the start, by channel; the caller keeps counting.
        """
        self._exchange = exchange = ends.exchange
        self._instance = exchange.instance
        self._config, self._new_ends = config, new_ends
        self._frames = frames
        self._table = AppliedTable(exchange.instance, exchange.num_instances)
        self._events: list[Report] = []
        self.pages = PageTransfers(self._table, frames, self._events, ends.rings, ends.moves)
        self.experts = ExpertTables(exchange.instance, slots, self._events)
        self._has_ends = True
        self._peers = [peer for peer in range(exchange.num_instances) if peer != self._instance]
        """The other instances of the term."""
        self._rows: dict[int, Row] = {}
        self._window: Window | None = None
        self._tokens: list[Token] = []
        self._sent_bytes = sent_bytes
        self._reported_bytes = 0, 0
        """Bytes of routes and of experts that windows have reported."""

    @abstractmethod
    def _bucket(self, window: Window) -> Bucket:
        """The bucket that the window's steps ran in; those of two lanes added up."""

    def enter(self, start: TermStart) -> int:
        """Join a term together with its peers, and connect; returns the number of graphs."""
        ends = TermEnds(self._exchange, self.pages.rings, self.pages.moves)
        if not self._has_ends:
            if self._new_ends is None:
                raise ValueError("this kind of instance joins one term only")
            ends = self._new_ends()
        self.join(ends, start)
        return self.connect()

    @property
    def awaited(self) -> int | None:
        """The instance that a wait is blocked for now; None if none is. Any thread may read it."""
        return self._exchange.awaited

    def connect(self) -> int:
        """Attach to every peer; returns the number of graphs. May raise ExchangeTimeout."""
        self._exchange.connect(self._config.limits.start_timeout_ms)
        self.pages.moves.connect()
        return 0

    def leave(self) -> None:
        # A next controller is told what slots hold.
        self.experts.slots.stop()
        self.pages.leave()
        self._exchange.close()
        self._has_ends = False
        self._events.clear()
        self._tokens.clear()
        self._window = None

    def kept_pages(self) -> list[PageRun]:
        return self._table.kept_pages()

    def restarts(self) -> list[tuple[int, int, int]]:
        if (states := self._frames.states) is None:
            return []
        # A step that was abandoned may have folded a token more in some layers than in others.
        kept = [run.request_id for run in self.kept_pages() if run.first_page == CARRY_PAGE]
        return [
            (request_id, states.num_folded(self._carry_frame(request_id)), row.position)
            for request_id in kept
            if (row := self._rows.get(request_id)) is not None
        ]

    def join(self, ends: TermEnds, start: TermStart) -> None:
        self._exchange = ends.exchange
        self.pages.join(ends.rings, ends.moves, start.newest_ticket)
        self._has_ends = True
        if not start.keeps_rows:
            self._rows.clear()
            self._table.clear()
        self._peers = [seat for seat in start.seats if seat != self._instance]
        self.experts.begin_term(start.experts)

    def _carry_frame(self, request_id: int) -> int:
        run = self._table.now.pages[request_id][-1]
        assert run.first_page == CARRY_PAGE, f"request {request_id} has no state here"
        return self._config.cluster.carry_place(run.frame)[0]

    def begin(self, plan: InstancePlan) -> Resync | None:
        return run_waiting(self.begin_steps(plan), self._exchange)

    def begin_steps(self, plan: InstancePlan) -> Waiting[Resync | None]:
        """`begin` as a generator."""
        if mismatch := self._table.apply(plan):
            return Resync(plan.window, mismatch)
        self.experts.begin_window(plan.window, plan.experts)
        for request_id in plan.ends:
            del self._rows[request_id]
        # Post every hand-off before awaiting one: two instances may hand rows to each other
        # (protocol.md, hand-offs).
        self._post_hand_offs(plan)
        yield from self._await_hand_offs(plan)
        for start in plan.starts:
            self._rows[start.request_id] = Row.start(start)
            if self._frames.states is not None and start.position == 0:
                self._frames.states.clear(self._carry_frame(start.request_id))  # none has come
        rows = [self._rows[request_id] for request_id in self._table.now.rows]
        lanes = window_lanes(self._table.now, rows, plan.two_lanes > 0)
        self._window = Window(plan, lanes, drafts=[[0, 0] for _ in range(plan.num_drafts)])
        return None

    def _post_hand_offs(self, plan: InstancePlan) -> None:
        outgoing: dict[int, list[bytes]] = {}
        for request_id, peer in plan.hand_offs_out:
            state = self._rows.pop(request_id).handed_over()
            outgoing.setdefault(peer, []).append(encode_hand_off_state(state))
        for peer, messages in outgoing.items():
            fill_mailbox(self._exchange.outgoing(Channel.MAILBOX, peer, plan.window), messages)
            self._exchange.put(Channel.MAILBOX, peer, plan.window, len(messages))

    def _await_hand_offs(self, plan: InstancePlan) -> Waiting[None]:
        for peer in sorted({peer for _, peer in plan.hand_offs_in}):
            region = yield from self._await(Awaited(Channel.MAILBOX, peer, plan.window))
            for message in mailbox_messages(region):
                row = Row.received(decode_hand_off_state(message))
                self._rows[row.request_id] = row

    def _await(self, awaited: Awaited) -> Waiting[dict[str, np.ndarray]]:
        while not self._exchange.arrived(*awaited):
            yield (awaited,)
        return self._exchange.wait(*awaited)

    @contextmanager
    def _one_step(self) -> Iterator[Window]:
        """Measure one step of the begun window; report the window after its last step."""
        window = self._window
        assert window is not None, "run_step without begin"
        begin_ns, waited_ns = time.perf_counter_ns(), self._exchange.waited_ns
        yield window
        window.step_ns += time.perf_counter_ns() - begin_ns
        window.waited_ns += self._exchange.waited_ns - waited_ns
        window.steps_done += 1
        if window.steps_done == window.plan.num_steps:
            self._events.append(self._window_done(window))
            self.experts.end_window(window.plan.window)
            self._window = None

    def _commit_step(self, window: Window, sample: Sampler) -> None:
        """Commit a step's tokens, and those of right drafts (protocol.md, checked drafts)."""
        width = window.width
        going = [
            (StepRow(lane.number, index * width, row), row.num_live(width - 1), row.drafts)
            for lane in window.lanes
            for index, row in enumerate(lane.rows)
            if not row.finished
        ]
        for step_row, _, _ in going:
            step_row.row.drafts = []
        for offset in range(width):
            if not going:
                return
            sampled = sample([step_row for step_row, _, _ in going], offset)
            still = []
            for each, (token_id, logprobs) in zip(going, sampled, strict=True):
                step_row, num_live, drafts = each
                row = step_row.row
                self._commit(window, row, token_id, logprobs, -1 if offset else num_live - 1)
                if offset + 1 < num_live and not row.finished:
                    window.drafts[offset][0] += 1
                    if drafts[offset] == token_id:
                        window.drafts[offset][1] += 1
                        window.advanced.append(row.request_id)
                        still.append(each)
            going = still

    def _commit(
        self,
        window: Window,
        row: Row,
        token_id: int,
        logprobs: TokenLogprobs | None,
        num_drafts: int,
    ) -> None:
        """Commit the token that a step sampled for a row (protocol.md, step commit)."""
        token = row.commit(token_id, logprobs, num_drafts)
        self._tokens.append(token)
        window.num_tokens += 1
        if row.written is not None:
            window.written.append(row.written)
        if token.finish_reason is not None:
            finished = Finished(token.request_id, token.index + 1, token.finish_reason)
            window.finished.append(finished)

    def _window_done(self, window: Window) -> WindowDone:
        sent = self._sent_bytes
        route_bytes = sent[Channel.Q] + sent[Channel.RES]
        expert_bytes = sent[Channel.DISPATCH] + sent[Channel.COMBINE]
        bucket = self._bucket(window)
        done = WindowDone(
            self._instance,
            window.plan.window,
            tuple(window.finished),
            advanced=tuple(each for each in window.advanced if not self._rows[each].finished),
            drafts=tuple((checked, accepted) for checked, accepted in window.drafts),
            written=tuple(window.written),
            step_us=window.step_ns // window.steps_done // 1000,
            exchange_us=window.waited_ns // window.steps_done // 1000,
            hidden_us=window.hidden_ns // window.steps_done // 1000,
            mask_us=-(-window.mask_ns // (window.steps_done * 1000)),
            num_tokens=window.num_tokens,
            num_rows=window.num_rows,
            num_received=window.num_received,
            bucket_rows=bucket.num_rows,
            bucket_received=bucket.num_received,
            route_bytes=route_bytes - self._reported_bytes[0],
            expert_bytes=expert_bytes - self._reported_bytes[1],
        )
        self._reported_bytes = route_bytes, expert_bytes
        return done

    def poll(self) -> Polled:
        self.experts.poll()
        polled = Polled(tuple(self._events), tuple(self._tokens))
        self._events.clear()
        self._tokens.clear()
        return polled

    def close(self) -> None:
        self.experts.slots.stop()
        self.pages.close()
        self._exchange.close()
