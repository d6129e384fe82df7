"""A decode instance: receives a plan, stages it, replays steps, samples, and says what happened.

Enters: plans and tickets, through the door (door.py). Leaves: events and tokens. Does not know:
sockets, Ray, other instances' state. One thread drives it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from data_plane.graph.engine import GraphEngine
from data_plane.graph.pool_cpu import StepTables
from data_plane.instance.interface import Polled, ResyncNeeded
from data_plane.instance.page_transfers import PageTransfers
from data_plane.instance.rows import Row, finished_of
from data_plane.instance.sampler import sample_rows, token_logprobs
from data_plane.kv.frame_pool import FramePool
from data_plane.kv.page_ring import PageRing
from data_plane.kv.peer_rings import PeerRings
from data_plane.transport.exchange import Channel
from data_plane.transport.regions import TensorExchange
from nanocp.config import Config
from nanocp.plan import PAGE_SIZE, InstancePlan, Transfer, TransferDone, WindowDone
from nanocp.sampling import Token
from nanocp.table import InstanceTable
from nanocp.wire.convert import decode_hand_off_state, encode_hand_off_state

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Window:
    """The window that is running."""

    plan: InstancePlan
    rows: list[Row]
    """By row index."""
    steps_done: int = 0
    step_ns: int = 0
    waited_ns: int = 0
    num_tokens: int = 0
    finished: list[Token] = field(default_factory=list)


class Step(Protocol):
    """What runs a step: step.CpuStep, device_step.GpuStep."""

    def check(self) -> None:
        """Raise what ended the last step, if something did."""

    def logits_of(self, rows: list[int]) -> Tensor:
        """[rows, vocabulary] fp32: of the last step."""


class DecodeInstance(PageTransfers):
    """The torch instance; see door.Instance for the contract of each call."""

    ring: PageRing | None
    _moves: PeerRings

    def __init__(
        self,
        config: Config,
        instance: int,
        step: Step,
        frames: FramePool,
        engine: GraphEngine,
        exchange: TensorExchange,
        ring: PageRing | None,
        moves: PeerRings,
        choices: list[str],
        meet: Callable[[], None] = lambda: None,
        graphs_report: Callable[[], list[str]] = list,
    ) -> None:
        """`ring` is None with synthetic KV. exchange: what the host puts. meet: what else `connect`
        does, together with all peers, before the graphs are prepared. graphs_report: what there is
        to say of them then."""
        super().__init__(instance, config.cluster.num_instances, ring, moves)
        self.choices = choices
        """What was chosen at start-up and why, one sentence each."""
        self._config = config
        self._frames = frames
        self._meet, self._graphs_report = meet, graphs_report
        self._step = step
        self._tensors = exchange
        self._exchange = exchange.exchange
        self.engine = engine
        self._rows: dict[int, Row] = {}
        self._window: _Window | None = None
        self._told_bytes = 0, 0
        """By routes, by dispatch and combine: told in the windows so far."""
        self._tokens: list[Token] = []

    def connect(self) -> int:
        """Attach the exchange to every peer and prepare every graph; returns their number.

        Raises ExchangeTimeout if a peer does not appear.
        """
        self._exchange.connect(self._config.limits.start_timeout_ms)
        self._moves.connect()
        self._meet()
        num_graphs = self.engine.prepare(
            lambda done, total: logger.info("graphs: %d of %d prepared", done, total)
        )
        # On a GPU a wait of the steps before the captures may have ended in its error word.
        self._step.check()
        self.choices += self._graphs_report()
        return num_graphs

    # --- windows ---

    def begin(self, plan: InstancePlan) -> ResyncNeeded | None:
        """See door.Instance.begin."""
        mismatch = self._apply(plan)
        if mismatch:
            return ResyncNeeded(plan.window, mismatch)
        for request_id in plan.ends:
            del self._rows[request_id]
        self._exchange_hand_offs(plan)
        for start in plan.starts:
            self._rows[start.request_id] = Row.start(start)
        rows = [self._rows[request_id] for request_id in self._table.rows]
        self._window = _Window(plan, rows)
        self._stage(self.engine.stage(plan.window), rows, plan.num_steps)
        self.engine.staged()
        return None

    def run_step(self) -> None:
        """See door.Instance.run_step."""
        window = self._window
        assert window is not None, "run_step without begin"
        started_ns, waited_ns = time.perf_counter_ns(), self._exchange.waited_ns
        self._load_row_state(window.rows)
        self.engine.replay()
        self._step.check()
        self._sample(window)
        window.step_ns += time.perf_counter_ns() - started_ns
        window.waited_ns += self._exchange.waited_ns - waited_ns
        window.steps_done += 1
        if window.steps_done == window.plan.num_steps:
            self._events.append(self._window_done(window))
            self._window = None

    def _window_done(self, window: _Window) -> WindowDone:
        sent_bytes, bucket = self._tensors.sent_bytes, self.engine.bucket
        route_bytes = sent_bytes[Channel.Q] + sent_bytes[Channel.RES]
        expert_bytes = sent_bytes[Channel.DISPATCH] + sent_bytes[Channel.COMBINE]
        done = WindowDone(
            self._instance,
            window.plan.window,
            finished_of(window.finished),
            step_us=window.step_ns // window.steps_done // 1000,
            exchange_us=window.waited_ns // window.steps_done // 1000,
            num_tokens=window.num_tokens,
            num_rows=len(window.rows),
            num_received=sum(map(len, self._table.res_route)),
            bucket_rows=bucket.num_rows,
            bucket_received=bucket.num_received,
            route_bytes=route_bytes - self._told_bytes[0],
            expert_bytes=expert_bytes - self._told_bytes[1],
        )
        self._told_bytes = route_bytes, expert_bytes
        return done

    def _apply(self, plan: InstancePlan) -> str:
        """Bring the table to the plan's; returns what differed, or an empty string."""
        if plan.is_full:
            self._table = InstanceTable(self._instance, self._config.cluster.num_instances)
        elif self._table.digest != plan.base_digest:
            return f"the table's digest is {self._table.digest:#x}, the plan's base is {plan.base_digest:#x}"
        self._table.apply(plan.changes)
        if self._table.digest != plan.result_digest:
            return f"the changed table's digest is {self._table.digest:#x}, the plan's is {plan.result_digest:#x}"
        return ""

    def _exchange_hand_offs(self, plan: InstancePlan) -> None:
        """Hand-offs (docs/protocol.md): post all before awaiting any."""
        outgoing: dict[int, list[bytes]] = {}
        for request_id, peer in plan.hand_offs_out:
            state = self._rows.pop(request_id).handed_over()
            outgoing.setdefault(peer, []).append(encode_hand_off_state(state))
        for peer, payloads in outgoing.items():
            region = self._exchange.outgoing(Channel.MAILBOX, peer, plan.window)
            region["count"][0] = len(payloads)
            for number, payload in enumerate(payloads):
                region["length"][number] = len(payload)
                region["payload"][number, : len(payload)] = np.frombuffer(payload, np.uint8)
            self._exchange.put(Channel.MAILBOX, peer, plan.window, len(payloads))
        for peer in sorted({peer for _, peer in plan.hand_offs_in}):
            region = self._exchange.wait(Channel.MAILBOX, peer, plan.window)
            for number in range(int(region["count"][0])):
                payload = region["payload"][number, : region["length"][number]].tobytes()
                row = Row.received(decode_hand_off_state(payload))
                self._rows[row.request_id] = row

    def _stage(self, tables: StepTables, rows: list[Row], num_steps: int) -> None:
        table = self._table
        row_of = {row.request_id: index for index, row in enumerate(rows)}
        tables.num_rows[0] = len(rows)
        tables.own.num_pages[:] = 0
        tables.received.num_pages[:] = 0
        for index, row in enumerate(rows):
            page = row.position // PAGE_SIZE
            tables.tail_page[index] = page
            # The page after the tail is appended to only if the window reaches it.
            tables.tail_holder[index] = [
                table.holder(row.request_id, number) for number in (page, page + 1)
            ]
            tables.own.fill(index, table.pages.get(row.request_id, ()))
        for peer, requests in enumerate(table.q_route):
            tables.num_sent[peer] = len(requests)
            tables.send_row[peer, : len(requests)] = [row_of[request_id] for request_id in requests]
        received = 0
        for peer, requests in enumerate(table.res_route):
            tables.num_received[peer] = len(requests)
            for request_id in requests:
                tables.received.fill(received, table.pages.get(request_id, ()))
                received += 1

    def _load_row_state(self, rows: list[Row]) -> None:
        state = self.engine.rows
        state.live[:] = False
        for index, row in enumerate(rows):
            state.token[index] = row.token
            state.position[index] = row.position
            state.live[index] = not row.finished

    def _sample(self, window: _Window) -> None:
        live = [(index, row) for index, row in enumerate(window.rows) if not row.finished]
        if not live:
            return
        logits = self._step.logits_of([index for index, _ in live])
        rows = [row for _, row in live]
        params, outputs = [row.params for row in rows], [row.output_ids for row in rows]
        token_ids = sample_rows(logits, params, outputs, [row.prompt_ids for row in rows])
        tokens = []
        for row, token_id, logits_V in zip(rows, token_ids, logits, strict=True):
            num_top = row.params.logprobs
            logprobs = (
                None
                if num_top is None
                else token_logprobs(logits_V[None].cpu(), [token_id], num_top)[0]
            )
            tokens.append(row.commit(token_id, logprobs))
        self._tokens += tokens
        window.num_tokens += len(tokens)
        window.finished += [token for token in tokens if token.finish_reason is not None]

    # --- transfers ---

    def expect(self, transfer: Transfer) -> None:
        """See door.Instance.expect. With synthetic KV the pages are filled here, at once."""
        if transfer.source is not None or not self._config.prefill.synthetic_kv:
            return super().expect(transfer)
        self._newest_ticket = transfer.ticket
        for page, frame in transfer.frames_at(self._instance).items():
            num_tokens = min(PAGE_SIZE, transfer.num_tokens - page * PAGE_SIZE)
            self._frames.fill_synthetic(frame, num_tokens, transfer.request_id, page)
        self._events.append(TransferDone(transfer.ticket, self._instance))

    def _read_page(self, frame: int) -> Any:
        return self._frames.read_payload(frame)

    def _write_page(self, frame: int, num_tokens: int, payload: Any) -> None:
        self._frames.write_payload(frame, num_tokens, payload)

    def poll(self) -> Polled:
        """See door.Instance.poll."""
        polled = Polled(tuple(self._events), tuple(self._tokens))
        self._events.clear()
        self._tokens.clear()
        return polled

    def close(self) -> None:
        """See door.Instance.close."""
        self._tensors.close()
        self._moves.close()
        if self.ring is not None:
            self.ring.close()
