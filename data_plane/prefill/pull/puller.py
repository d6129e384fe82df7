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
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from data_plane.member.controller_link import ControllerLink, ControllerLost
from data_plane.member.heartbeat import Heartbeat
from data_plane.member.lifetime import (
    MemberLoop,
    MemberSpec,
    ShutdownRequested,
    run_under_controllers,
    running,
    segments_of,
)
from data_plane.member.term_loop import LOOK, wake
from data_plane.prefill.pull.connections import FORGET_S, Connections, Met, PulledEngine
from data_plane.prefill.pull.holds import MAX_HOLDS, BlocksInUse, Holds
from data_plane.prefill.pull.rings import PullRings
from data_plane.transport.exchange import PeerLost, TermOver
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
from nanocp.values.remote_blocks import RemoteBlocks

MAX_PULLS = 4096
"""More are given up at once."""
_REPORT_S = 0.5
_LEAVE_S = 5.0
_EXPIRED = "the engine may have freed the blocks: no heartbeat reached it in time"
_ORPHANED, _LEAVE = object(), object()


class _Read(NamedTuple):
    """All pages are in the rings, or the reason that they are not."""

    pull: _Pull
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class _Pull:
    transfer: Transfer
    token_ids: Sequence[int]
    blocks: RemoteBlocks
    held: BlocksInUse
    engine: PulledEngine
    since: float
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
        rings = PullRings(segments, config.limits)
        held.callback(rings.close)
        loop = PullerLoop(link, reader, rings, config.limits, config.prefill.pull.lease_s)
        held.callback(loop.close)
        run_under_controllers(spec, link, loop)


class PullerLoop(MemberLoop):
    """Holds blocks and reads them, in threads that go on while there is no controller."""

    def __init__(
        self,
        link: ControllerLink,
        reader: Any,
        rings: PullRings,
        limits: LimitsConfig,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """reader: an EngineReader."""
        self._link, self._rings, self._clock = link, rings, clock
        self._arrive_s = limits.exchange_timeout_ms / 1000
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._reads = ThreadPoolExecutor(1, "pull pages")
        """Reads one pull after the other."""
        self._holds = Holds(lease_s)
        self._connections = Connections(
            reader, self._holds, self._refuse, self._inbox.put, self._reads
        )
        self._pulls: dict[int, _Pull] = {}
        """By ticket, in order of arrival."""
        self._reading: _Pull | None = None
        """It may be over, and not yet out of its thread."""
        self._term = 0
        self._reported: EnginesNow | None = None
        self._report_at = 0.0
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
            self._inbox.put(message)

    def forget_term(self) -> None:
        self._inbox.put(_ORPHANED)

    def close(self) -> None:
        """Free every block at its engine, in bounded time. Idempotent."""
        self._inbox.put(_LEAVE)
        self._thread.join(2 * _LEAVE_S)

    # --- the thread that holds blocks

    def _serve(self) -> None:
        try:
            while self._take_events():
                self._tend(self._clock())
            self._leave()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        wake(self._link)

    def _take_events(self) -> bool:
        """Wait until something is due, and take all that has come; False: leave."""
        with contextlib.suppress(Empty):
            event = self._inbox.get(timeout=self._idle_s(self._clock()))
            while event is not _LEAVE:
                self._take(event, self._clock())
                event = self._inbox.get_nowait()
            return False
        return True

    def _leave(self) -> None:
        self._drop_pulls()
        self._holds.release_all()
        deadline = time.monotonic() + _LEAVE_S
        self._tend(self._clock())
        while (self._reading or self._holds.notices) and time.monotonic() < deadline:
            with contextlib.suppress(Empty):
                event = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
                self._take(event, self._clock())
            self._tend(self._clock())
        self._connections.close()
        self._reads.shutdown(wait=False)

    def _idle_s(self, now: float) -> float:
        times = [now + FORGET_S, self._holds.next_change()]
        times += [p.written_at + self._arrive_s for p in self._pulls.values() if p.written_at]
        if self._term and self._reported != self._connections.state():
            times.append(self._report_at)
        return max(0.0, min(times) - now)

    def _tend(self, now: float) -> None:
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

    def _refuse(self, request_id: int, problem: str) -> None:
        self._say(BlocksRefused(request_id, problem))

    def _take(self, event: Any, now: float) -> None:
        if isinstance(event, Met):
            self._connections.met(event, now)
        elif isinstance(event, _Read):
            self._read(event.pull, event.error, now)
        elif event is _ORPHANED:
            self._drop_pulls()
            self._term, self._reported = 0, None
            self._holds.orphan(now)
        else:
            self._take_message(event.message, event.term, now)

    def _take_message(self, message: Any, term: int, now: float) -> None:
        match message:
            case Join() as join:
                self._drop_pulls()
                self._term, self._reported = term, None
                self._reads.submit(self._rings.join, term, join)
                self._say(Ready((f"process {os.getpid()}",)))
            case HoldBlocks(request_id, blocks):
                # The transfer of one too many says so, and the lease frees its blocks.
                if self._holds.hold(request_id, blocks, now):
                    self._connections.judge(request_id, blocks, now)
            case ReleaseBlocks(request_id):
                for pull in list(self._pulls.values()):
                    if pull.transfer.request_id == request_id:
                        self._end(pull, num_cancelled=1)
                self._holds.release(request_id)
            case RefuseBlocks(blocks):
                self._holds.refuse(blocks)
            case PrefillRequest() as request:
                self._queue(request, now)
            case CancelPrefill(ticket):
                if ticket in self._pulls:
                    self._end(self._pulls[ticket], num_cancelled=1)
            case PagesArrived(ticket):
                if ticket in self._pulls:
                    self._arrived(self._pulls[ticket], now)
            case other:
                raise AssertionError(f"the controller sent {other} to a running puller")

    # --- pulls

    def _queue(self, request: PrefillRequest, now: float) -> None:
        transfer, found = request.transfer, self._holds.of(request.transfer.request_id)
        if found is None or len(self._pulls) >= MAX_PULLS:
            problem = f"{MAX_PULLS} prompts wait to be read"
            if found is None:
                problem = f"the request holds no blocks (at most {MAX_HOLDS} requests do)"
            self._say(TransferFailed(transfer.ticket, f"prefill failed: {problem}"))
            return
        blocks, held = found
        if blocks.num_tokens < transfer.num_tokens:
            problem = (
                f"the engine has computed {blocks.num_tokens} tokens of the prompt's "
                f"{transfer.num_tokens + 1}: its tokenizer or chat template differs"
            )
            self._say(TransferFailed(transfer.ticket, f"prefill failed: {problem}"))
            return
        engine = self._connections.of(blocks, now)
        token_ids = request.token_ids[: transfer.num_tokens]
        self._pulls[transfer.ticket] = _Pull(transfer, token_ids, blocks, held, engine, now)
        engine.count(tokens_in_flight=transfer.num_tokens)

    def _go_on(self, pull: _Pull, now: float) -> None:
        engine = pull.engine
        if pull.begun_at is not None:
            if pull.written_at is not None and now >= pull.written_at + self._arrive_s:
                self._give_up(pull, f"its pages did not arrive in {self._arrive_s:.0f} s")
        elif now >= pull.held.deadline:
            self._give_up(pull, _EXPIRED)
        elif engine.is_met(pull.blocks, pull.since):
            if self._reading is None:
                self._begin(pull, now)
        elif engine.is_being_met or now >= engine.rest_until:
            self._connections.meet(engine, pull.blocks, now)
        else:
            self._give_up(pull, engine.now.problem, engine.is_refused)

    def _begin(self, pull: _Pull, now: float) -> None:
        self._holds.begin_read(pull.blocks)
        self._reading, pull.begun_at, pull.remote = pull, now, pull.engine.remote

        def read() -> None:
            try:
                self._copy_pages(pull)
            except Exception as error:
                self._inbox.put(_Read(pull, error))
            else:
                self._inbox.put(_Read(pull))

        self._reads.submit(read)

    def _copy_pages(self, pull: _Pull) -> None:
        transfer, target_of = pull.transfer, pull.transfer.instances()
        obstacle = partial(self._obstacle, pull)
        pull.remote.check(pull.blocks)
        wanted = pull.blocks, pull.token_ids, transfer.num_tokens, tuple(target_of)
        with contextlib.closing(pull.remote.pages(*wanted, obstacle)) as pages:
            for page, num_tokens, payload in pages:
                if problem := obstacle():
                    raise RuntimeError(problem)
                if not self._rings.write(
                    target_of[page],
                    ticket=transfer.ticket,
                    page=page,
                    num_tokens=num_tokens,
                    payload=payload,
                    is_cancelled=lambda: pull.is_over,
                ):
                    return

    def _obstacle(self, pull: _Pull) -> str:
        if pull.is_over:
            return "the transfer is over"
        return _EXPIRED if self._clock() >= pull.held.deadline else ""

    def _read(self, pull: _Pull, error: Exception | None, now: float) -> None:
        self._reading = None
        self._holds.end_read(pull.blocks)
        if isinstance(error, ConnectionError) and pull.engine.remote is pull.remote:
            self._connections.lose(pull.engine, error, now)
        if pull.is_over:
            return
        if error is None or isinstance(error, PeerLost | TermOver):
            pull.written_at = now  # A lost instance ends the term; if not, the pull is given up.
        else:
            self._give_up(pull, str(error), isinstance(error, ValueError))

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
            self._refuse(pull.transfer.request_id, problem)
            return
        message = f"prefill failed: {pull.engine.now.url}: {problem}"
        self._say(TransferFailed(pull.transfer.ticket, message))

    def _end(self, pull: _Pull, **more: float) -> None:
        del self._pulls[pull.transfer.ticket]
        pull.is_over = True
        pull.engine.count(tokens_in_flight=-pull.transfer.num_tokens, **more)

    def _drop_pulls(self) -> None:
        for pull in list(self._pulls.values()):
            self._end(pull)
