"""The puller: a member without a model that reads KV from engines which a router has asked.

Blocks stay at their engine until all receivers have the pages, or the request ends.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from data_plane.kv.page_ring import PULL_RING, PageRingWriter
from data_plane.member.controller_link import ControllerLink, ControllerLost
from data_plane.member.heartbeat import Heartbeat
from data_plane.member.lifetime import (
    MemberLoop,
    MemberSpec,
    ShutdownRequested,
    meet,
    run_under_controllers,
    running,
    segments_of,
)
from data_plane.member.term_loop import LOOK, wake
from data_plane.prefill.pull.connections import REST_S, Connections, PulledEngine
from data_plane.prefill.pull.holds import BlocksInUse, Holds, KvChanged
from data_plane.transport.exchange import PeerLost, TermOver
from data_plane.transport.segments import Segments
from nanocp.config.limits import LimitsConfig
from nanocp.values.commands import (
    CancelPrefill,
    HoldBlocks,
    Join,
    PagesArrived,
    PrefillRequest,
    RefuseBlocks,
    ReleaseBlocks,
    Shutdown,
)
from nanocp.values.members import Beat, BlocksRefused, EnginesNow, Ready, Said
from nanocp.values.plan import Transfer, TransferFailed

_REPORT_S = 0.5
_LEAVE_S = 5.0
_ATTACH_MS = 2_000
"""The rings are there before a term's first ticket."""
_EXPIRED = "the engine may have freed the blocks: no heartbeat reached it in time"
_NEVER = float("inf")


@dataclass(slots=True, eq=False)
class _Pull:
    transfer: Transfer
    token_ids: Sequence[int]
    held: BlocksInUse
    engine: PulledEngine
    remote: Any = None
    """The connection that is read."""
    begun_at: float | None = None
    written_at: float | None = None
    is_over: bool = False


def run_puller(spec: MemberSpec) -> None:
    """Read KV from engines until the controller asks for a shutdown.

    `spec.factory` names a callable(config, checkpoint, progress) -> EngineReader. Raises
    FailureReported or ControllerLost if the puller failed.
    """
    config = spec.config
    with running(spec) as (link, held):
        reader = spec.make(config, spec.checkpoint, lambda done, total: None)
        held.callback(reader.close)
        held.callback(Heartbeat(lambda: link.send(Beat()), config.limits).close)
        segments = segments_of(spec, link.term)
        held.callback(segments.close)
        loop = PullerLoop(link, reader, segments, config.limits, config.prefill.pull.lease_s)
        held.callback(loop.close)
        run_under_controllers(spec, link, loop)


class PullerLoop(MemberLoop):
    """Holds blocks and reads them, in threads that go on while there is no controller."""

    def __init__(
        self,
        link: ControllerLink,
        reader: Any,
        segments: Segments,
        limits: LimitsConfig,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """reader: an EngineReader. segments: the member's own, whose term this object sets."""
        self._link, self._segments, self._clock = link, segments, clock
        self._limits = replace(limits, start_timeout_ms=_ATTACH_MS)
        self._arrive_s = limits.exchange_timeout_ms / 1000
        self._inbox: SimpleQueue[Callable[[float], None]] = SimpleQueue()
        """What the loop's thread calls, with the time."""
        self._reads = ThreadPoolExecutor(1, "pull pages")
        """Reads one pull after the other."""
        self._rings: dict[int, PageRingWriter] = {}
        """By instance, opened at first use; for the thread of reads."""
        self._holds = Holds(lease_s)
        self._connections = Connections(reader, self._holds, self._inbox.put)
        self._pulls: dict[int, _Pull] = {}
        """By ticket, in order of arrival."""
        self._reading: _Pull | None = None
        """It may be over, and not yet out of its thread."""
        self._term = 0
        self._reported: EnginesNow | None = None
        self._report_at = 0.0
        self._left_at = _NEVER
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="puller", daemon=True)
        self._thread.start()

    def run(self) -> None:
        while True:
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            message = self._link.inbox.get()
            if message is LOOK:
                continue
            if message is None:
                raise ControllerLost("the controller's stream ended")
            if isinstance(message.message, Shutdown):
                raise ShutdownRequested(message.message.reason)
            self._inbox.put(partial(self._take, message.message, message.term))

    def forget_term(self) -> None:
        self._inbox.put(self._orphan)

    def close(self) -> None:
        """Free every block at its engine, in bounded time. Idempotent."""
        self._inbox.put(self._leave)
        self._thread.join(2 * _LEAVE_S)

    # --- the thread that holds blocks

    def _serve(self) -> None:
        try:
            while not self._has_left(self._clock()):
                with contextlib.suppress(Empty):
                    call = self._inbox.get(timeout=self._idle_s(self._clock()))
                    while True:
                        call(self._clock())
                        call = self._inbox.get_nowait()
                self._tend()
            self._connections.close()
            self._reads.submit(self._close_rings)
            self._reads.shutdown(wait=False)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        wake(self._link)

    def _leave(self, now: float) -> None:
        self._orphan(now)
        self._holds.expire(_NEVER)
        self._left_at = now

    def _has_left(self, now: float) -> bool:
        is_busy = self._reading or self._holds.notices
        return now >= self._left_at + (_LEAVE_S if is_busy else 0.0)

    def _orphan(self, now: float) -> None:
        self._begin_term(0)
        self._holds.orphan(now)

    def _begin_term(self, term: int) -> None:
        for pull in list(self._pulls.values()):
            self._end(pull)
        self._term, self._reported = term, None

    def _idle_s(self, now: float) -> float | None:
        times = [self._holds.next_change(), self._left_at + _LEAVE_S]
        times += [p.written_at + self._arrive_s for p in self._pulls.values() if p.written_at]
        if self._term and self._reported != self._connections.state():
            times.append(self._report_at)
        return max(0.0, min(times) - now) if min(times) < _NEVER else None

    def _tend(self) -> None:
        now = self._clock()
        self._holds.expire(now)
        self._connections.tend(now)
        for pull in list(self._pulls.values()):
            self._go_on(pull, now)
        state = self._connections.state()
        if self._term and state != self._reported and now >= self._report_at:
            self._reported, self._report_at = state, now + _REPORT_S
            self._say(state)

    # --- messages

    def _say(self, message: Said) -> None:
        try:
            self._link.send(message, self._term)
        except ControllerLost as error:
            self._fail(error)

    def _take(self, message: Any, term: int, now: float) -> None:
        match message:
            case Join():
                self._begin_term(term)
                self._reads.submit(self._join, message, term)
                self._say(Ready((f"process {os.getpid()}",)))
            case HoldBlocks(request_id, blocks):
                self._holds.hold(request_id, blocks, now)
                self._connections.meet(blocks, now)
            case ReleaseBlocks(request_id):
                for pull in list(self._pulls.values()):
                    if pull.transfer.request_id == request_id:
                        self._end(pull, num_cancelled=1)
                self._holds.release(request_id)
            case RefuseBlocks(blocks):
                self._holds.refuse(blocks)
            case PrefillRequest():
                self._queue(message)
            case CancelPrefill(ticket):
                if ticket in self._pulls:
                    self._end(self._pulls[ticket], num_cancelled=1)
            case PagesArrived(ticket):
                if ticket in self._pulls:
                    self._arrived(self._pulls[ticket], now)
            case other:
                raise AssertionError(f"the controller sent {other} to a running puller")

    # --- pulls

    def _queue(self, request: PrefillRequest) -> None:
        transfer = request.transfer
        held = self._holds.of(transfer.request_id)
        if held is None:
            problem = "the request holds no blocks"
        elif held.blocks.num_tokens < transfer.num_tokens:
            problem = (
                f"the engine has computed {held.blocks.num_tokens} tokens of the prompt's "
                f"{transfer.num_tokens + 1}: its tokenizer or chat template differs"
            )
        else:
            engine = self._connections.of(held.blocks)
            engine.count(tokens_in_flight=transfer.num_tokens)
            token_ids = request.token_ids[: transfer.num_tokens]
            self._pulls[transfer.ticket] = _Pull(transfer, token_ids, held, engine)
            return
        self._say(TransferFailed(transfer.ticket, f"prefill failed: {problem}"))

    def _go_on(self, pull: _Pull, now: float) -> None:
        if pull.begun_at is not None:
            if pull.written_at is not None and now >= pull.written_at + self._arrive_s:
                self._give_up(pull, f"its pages did not arrive in {self._arrive_s:.0f} s")
        elif now >= pull.held.deadline:
            self._give_up(pull, _EXPIRED)
        elif (engine := self._connections.meet(pull.held.blocks, now)).is_met(pull.held.blocks):
            if self._reading is None:
                self._begin(pull, now)
        elif not engine.is_being_met:
            self._give_up(pull, engine.now.problem, engine.is_refused)

    def _begin(self, pull: _Pull, now: float) -> None:
        pull.remote = pull.engine.remote
        try:
            pull.remote.check(pull.held.blocks)
        except ValueError as error:
            self._give_up(pull, str(error), is_refused=True)
            return
        self._holds.hold(pull, pull.held.blocks, now)
        self._reading, pull.begun_at = pull, now
        self._reads.submit(self._read, pull)

    def _arrived(self, pull: _Pull, now: float) -> None:
        begun_at, written_at = pull.begun_at or now, pull.written_at or now
        self._end(
            pull,
            num_done=1,
            num_pages=len(pull.transfer.instances()),
            answer_s=written_at - begun_at,
            arrive_s=now - written_at,
        )
        self._holds.release(pull.transfer.request_id)

    def _give_up(self, pull: _Pull, problem: str, is_refused: bool = False) -> None:
        self._end(pull, num_failed=1)
        if is_refused:
            self._say(BlocksRefused(pull.transfer.request_id, problem))
            return
        message = f"prefill failed: {pull.engine.now.url}: {problem}"
        self._say(TransferFailed(pull.transfer.ticket, message))

    def _end(self, pull: _Pull, **more: float) -> None:
        del self._pulls[pull.transfer.ticket]
        pull.is_over = True
        pull.engine.count(tokens_in_flight=-pull.transfer.num_tokens, **more)

    def _has_read(self, pull: _Pull, error: Exception | None, now: float) -> None:
        self._reading = None
        self._holds.release(pull)
        if pull.engine.remote is not pull.remote:
            pass  # It was met again.
        elif isinstance(error, ConnectionError):
            self._connections.lose(pull.engine, error, now)
        elif isinstance(error, KvChanged) and not pull.is_over:
            self._connections.doubt(pull.engine, error, now)
        elif error is None:
            pull.engine.rest_s = REST_S
        if pull.is_over:
            return
        if error is None or isinstance(error, PeerLost | TermOver):
            pull.written_at = now  # A lost instance ends the term; if not, the pull is given up.
        else:
            self._give_up(pull, str(error))

    # --- the thread of reads

    def _join(self, join: Join, term: int) -> None:
        self._close_rings()
        self._segments.term.number = term
        meet(self._segments, join)

    def _close_rings(self) -> None:
        while self._rings:
            self._rings.popitem()[1].close()

    def _read(self, pull: _Pull) -> None:
        error = None
        try:
            self._copy_pages(pull)
        except Exception as caught:
            error = caught
        self._inbox.put(partial(self._has_read, pull, error))

    def _copy_pages(self, pull: _Pull) -> None:
        transfer, target_of = pull.transfer, pull.transfer.instances()
        wanted = pull.held.blocks, pull.token_ids, transfer.num_tokens, tuple(target_of)

        def obstacle() -> str:
            if pull.is_over:
                return "the transfer is over"
            return _EXPIRED if self._clock() >= pull.held.deadline else ""

        with contextlib.closing(pull.remote.pages(*wanted, obstacle)) as pages:
            for page, num_tokens, payload in pages:
                instance = target_of[page]
                if instance not in self._rings:
                    self._rings[instance] = PageRingWriter(
                        self._segments, instance, self._limits, PULL_RING
                    )
                self._rings[instance].write(
                    ticket=transfer.ticket,
                    page=page,
                    num_tokens=num_tokens,
                    payload=payload,
                    timeout_ms=self._limits.exchange_timeout_ms,
                    is_cancelled=lambda: pull.is_over,
                )
                if pull.is_over:
                    return
