"""The prefill without a model: engines compute the prompts, and write the pages themselves.

An attempt ends when the controller reports the pages' arrival, or at its deadline. The next has the
same ticket: its pages hold the same KV, and a receiver takes each once.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from data_plane.prefill.completions import EngineAnswer, EngineCompletion, EngineOutcome
from data_plane.prefill.engine_probe import EngineProbe
from data_plane.prefill.engines import Engine, EnginePool
from data_plane.transport.exchange import Term
from nanocp.config.limits import LimitsConfig
from nanocp.config.prefill import PrefillConfig
from nanocp.values.commands import CancelPrefill, Join, PagesArrived, PrefillRequest, Shutdown
from nanocp.values.members import Beat, EngineNow, EnginesNow, Ready
from nanocp.values.plan import Transfer, TransferFailed

logger = logging.getLogger(__name__)

MAX_WAITING_PROMPTS = 4096
"""More are given up at once."""
NO_ENGINE_S = 10.0
"""Longest time without an engine before prompts are given up."""
_REPORT_S = 0.5
_SAY_S = 10.0
"""Interval of messages about the start."""
_START_SHARE = 0.75
"""Share of start_timeout_ms before a report of the obstacle."""


class _Answered(NamedTuple):
    attempt: _Attempt
    answer: EngineAnswer


class _Probed(NamedTuple):
    engine: Engine
    answer: EngineAnswer


@dataclass(slots=True, eq=False)
class _Prompt:
    transfer: Transfer
    token_ids: Sequence[int]
    salt: bytes
    since: float
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Attempt:
    prompt: _Prompt
    engine: Engine
    completion: EngineCompletion
    asked_at: float
    deadline: float
    answered_at: float | None = None


def run_external_prefill(spec: MemberSpec) -> None:
    """Have engines compute prompts until the controller asks for a shutdown.

    `spec.factory` names a callable(config, checkpoint, progress) -> Probe. Raises FailureReported
    or ControllerLost if the prefill failed.
    """
    config = spec.config
    with running(spec) as (link, held):
        probe = spec.make(config, spec.checkpoint, lambda done, total: None)
        held.callback(Heartbeat(lambda: link.send(Beat()), config.limits).close)
        segments = segments_of(spec, Term(spec.term))
        held.callback(segments.close)
        own, limits = config.cluster.num_instances, config.limits
        prober = EngineProbe(own, config.prefill, config.data_plane, limits, probe, segments)
        held.callback(prober.close)
        loop = ExternalLoop(config.prefill, limits, link, prober)
        held.callback(loop.close)
        run_under_controllers(spec, link, loop)


class ExternalLoop(MemberLoop):
    """Sends prompts to engines, several at a time, from one thread."""

    def __init__(
        self,
        prefill: PrefillConfig,
        limits: LimitsConfig,
        link: ControllerLink,
        prober: EngineProbe,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefill, self._limits = prefill, limits
        self._link = link
        self._prober = prober
        self._clock = clock
        limit_s = limits.start_timeout_ms / 1000
        self._start_deadline = clock() + _START_SHARE * limit_s
        self._say_at = clock() + _SAY_S
        self._pool = EnginePool(prefill.engines, prefill.max_tokens_in_flight)
        self._waiting: deque[_Prompt] = deque()
        self._answers: SimpleQueue[_Answered | _Probed] = SimpleQueue()
        """They outlive a controller and its inbox."""
        self._attempts: dict[int, _Attempt] = {}
        self._unprobed = {engine.index for engine in self._pool.engines}
        self._term = 0
        self._is_ready = False
        self._reported: EnginesNow | None = None
        self._report_at = 0.0

    def run(self) -> None:
        while True:
            while not self._answers.empty():
                self._take(self._answers.get())
            now = self._clock()
            for engine in self._pool.due(now):
                self._probe(engine)
            self._expire(now)
            self._dispatch(now)
            self._report(now)
            try:
                self._take(self._link.inbox.get(timeout=self._idle_s(now)))
            except Empty:
                continue

    def close(self) -> None:
        """End every connection to an engine."""
        for attempt in self._attempts.values():
            attempt.completion.cancel()

    def _idle_s(self, now: float) -> float | None:
        """Return the time until something is due; None: wait for a message."""
        times = [self._pool.next_change(now), *(a.deadline for a in self._attempts.values())]
        if not self._is_ready:
            times += [self._start_deadline, self._say_at]
        if self._waiting and self._pool.none_up_since is not None:
            times.append(now + _REPORT_S)
        if self._is_serving and self._reported != _state_of(self._pool.engines):
            times.append(self._report_at)
        soonest = min(times)
        return None if soonest == float("inf") else max(0.0, soonest - now)

    @property
    def _is_serving(self) -> bool:
        return self._is_ready and self._term > 0

    # --- messages

    def _take(self, message: Any) -> None:
        now = self._clock()
        if message is LOOK:
            return
        if message is None:
            raise ControllerLost("the controller's stream ended")
        if isinstance(message, _Answered):
            self._answered(message.attempt, message.answer, now)
            return
        if isinstance(message, _Probed):
            self._probed(message.engine, message.answer, now)
            return
        match message.message:
            case Join() as join:
                self._join(join, message.term)
            case PrefillRequest() as request:
                self._queue(request, now)
            case CancelPrefill(ticket):
                self._cancel(ticket)
            case PagesArrived(ticket):
                self._arrived(ticket, now)
            case Shutdown(reason):
                raise ShutdownRequested(reason)
            case other:
                raise AssertionError(f"the controller sent {other} to a running prefill")

    def forget_term(self) -> None:
        self._waiting.clear()
        for attempt in list(self._attempts.values()):
            self._end(attempt)
        self._term, self._reported = 0, None

    def _join(self, join: Join, term: int) -> None:
        self.forget_term()
        self._term = term
        self._prober.join(term, join.peers)
        if self._is_ready:
            self._send_ready()

    def _send_ready(self) -> None:
        self._link.send(Ready((f"process {os.getpid()}",)), self._term)

    def _queue(self, request: PrefillRequest, now: float) -> None:
        transfer = request.transfer
        if len(self._waiting) >= MAX_WAITING_PROMPTS:
            self._give_up(transfer.ticket, f"{MAX_WAITING_PROMPTS} prompts wait for an engine")
            return
        token_ids = tuple(request.token_ids[: transfer.num_tokens])
        self._waiting.append(_Prompt(transfer, token_ids, request.salt, now))

    def _cancel(self, ticket: int) -> None:
        self._waiting = deque(p for p in self._waiting if p.transfer.ticket != ticket)
        if ticket in self._attempts:
            self._end(self._attempts[ticket]).num_cancelled += 1

    def _arrived(self, ticket: int, now: float) -> None:
        self._waiting = deque(p for p in self._waiting if p.transfer.ticket != ticket)
        if (attempt := self._attempts.get(ticket)) is None:
            return
        engine = self._end(attempt)
        engine.num_done += 1
        engine.num_pages += len(attempt.prompt.transfer.instances())
        answered_at = now if attempt.answered_at is None else attempt.answered_at
        engine.answer_s += answered_at - attempt.asked_at
        engine.arrive_s += now - answered_at

    # --- attempts

    def _dispatch(self, now: float) -> None:
        while self._waiting:
            prompt = self._waiting[0]
            engine = self._pool.choose(prompt.transfer.num_tokens, now)
            if engine is None:
                return
            self._waiting.popleft()
            self._ask(prompt, engine, now)

    def _ask(self, prompt: _Prompt, engine: Engine, now: float) -> None:
        transfer = prompt.transfer
        ticket = self._prober.ticket(
            engine.index,
            engine.process,
            transfer.ticket,
            transfer.num_tokens,
            tuple((run.first_page, run.num_pages, run.instance) for run in transfer.targets),
        )
        limit_ms = self._prefill.limit_ms(transfer.num_tokens)
        completion = EngineCompletion(
            engine.url, prompt.token_ids, ticket, api_key=self._prefill.api_key, salt=prompt.salt
        )
        attempt = _Attempt(prompt, engine, completion, now, now + limit_ms / 1000)
        self._attempts[transfer.ticket] = attempt
        self._start(f"ticket {transfer.ticket}", lambda: _Answered(attempt, completion.run()))

    def _answered(self, attempt: _Attempt, answer: EngineAnswer, now: float) -> None:
        if self._attempts.get(attempt.prompt.transfer.ticket) is not attempt:
            return  # It was cancelled, or another attempt is under way.
        if answer.outcome is EngineOutcome.SENT:
            attempt.answered_at = now
            attempt.deadline = now + self._limits.exchange_timeout_ms / 1000
        elif answer.outcome is EngineOutcome.BUSY:
            self._pool.busy(self._end(attempt), now)
            self._waiting.appendleft(attempt.prompt)
        elif answer.outcome is EngineOutcome.RESTARTED:
            self._pool.restarted(self._end(attempt), now)
            self._waiting.appendleft(attempt.prompt)
        elif answer.outcome is EngineOutcome.REFUSED:
            self._end(attempt).num_failed += 1
            self._give_up(
                attempt.prompt.transfer.ticket,
                f"prefill failed: {attempt.engine.url}: {answer.message}",
            )
        else:
            self._attempt_failed(attempt, answer.message, now)

    def _expire(self, now: float) -> None:
        for attempt in [a for a in self._attempts.values() if a.deadline <= now]:
            problem = f"no answer in {now - attempt.asked_at:.0f} s"
            if attempt.answered_at is not None:
                waited_s = now - attempt.answered_at
                problem = f"it answered, and its pages did not arrive in {waited_s:.0f} s"
            self._attempt_failed(attempt, problem, now)
        if not self._is_ready and now >= self._start_deadline:
            raise ValueError(f"no engine for prefill is up: {self._pool.problems()}")
        if not self._is_ready and now >= self._say_at:
            self._say_at = now + _SAY_S
            logger.warning(
                "not ready: %s; asking again, %.0f s more (does vLLM run there, with the flags of "
                "`nanocp prefill-flags`?)",
                self._pool.problems(),
                self._start_deadline - now,
            )
        since = self._pool.none_up_since
        if since is None:
            return
        for prompt in [p for p in self._waiting if now - max(since, p.since) >= NO_ENGINE_S]:
            self._waiting.remove(prompt)
            self._give_up(
                prompt.transfer.ticket,
                f"no engine for prefill is up: {self._pool.problems()}",
            )

    def _attempt_failed(self, attempt: _Attempt, problem: str, now: float) -> None:
        engine = self._end(attempt)
        engine.num_failed += 1
        was_up = engine.is_up
        self._pool.failed(engine, problem, now)
        self._log_change(engine, was_up)
        prompt = attempt.prompt
        prompt.problems.append(f"{engine.url}: {problem}")
        if len(prompt.problems) < self._prefill.max_attempts:
            self._waiting.appendleft(prompt)
            return
        self._give_up(
            prompt.transfer.ticket,
            f"prefill failed in {len(prompt.problems)} attempts: {'; '.join(prompt.problems)}",
        )

    def _end(self, attempt: _Attempt) -> Engine:
        del self._attempts[attempt.prompt.transfer.ticket]
        attempt.completion.cancel()
        self._pool.release(attempt.engine, attempt.prompt.transfer.num_tokens)
        return attempt.engine

    def _give_up(self, ticket: int, message: str) -> None:
        self._link.send(TransferFailed(ticket, message), self._term)

    # --- engines

    def _probe(self, engine: Engine) -> None:
        # The prompts of an engine that is up come first.
        limit_ms = self._prefill.limit_ms(engine.tokens_in_flight)
        self._start(
            f"probe of {engine.url}",
            lambda: _Probed(engine, self._prober.run(engine.index, engine.url, limit_ms)),
        )

    def _probed(self, engine: Engine, answer: EngineAnswer, now: float) -> None:
        if engine.index in self._unprobed and answer.outcome is not EngineOutcome.SENT:
            self._say_at = now  # a wrong address is said at once
        self._unprobed.discard(engine.index)
        was_up = engine.is_up
        if answer.outcome is EngineOutcome.SENT:
            self._pool.passed(engine, answer.engine, now)
        else:
            is_busy = answer.outcome is EngineOutcome.BUSY
            self._pool.unpassed(engine, answer.message, now, is_busy=is_busy)
            # A process that was started since the latest probe refuses what its predecessor was
            # asked for; one that was up may have answered with other KV.
            if was_up and answer.outcome is EngineOutcome.MISMATCH:
                self._distrust(engine, answer.message)
        if self._is_ready:
            self._log_change(engine, was_up)
            return
        # What is configured wrongly is said at the start, and not by the first prompts.
        if answer.outcome in (EngineOutcome.MISMATCH, EngineOutcome.REFUSED):
            raise ValueError(f"{engine.url} cannot compute prompts: {answer.message}")
        if self._pool.is_any_up and not self._unprobed:
            self._is_ready = True
            if self._term:
                self._send_ready()

    def _distrust(self, engine: Engine, problem: str) -> None:
        for attempt in [a for a in self._attempts.values() if a.engine is engine]:
            self._end(attempt).num_failed += 1
            ticket = attempt.prompt.transfer.ticket
            self._give_up(ticket, f"prefill failed: {engine.url}: {problem}")

    def _log_change(self, engine: Engine, was_up: bool) -> None:
        if engine.is_up and not was_up:
            logger.warning("%s is up", engine.url)
        elif was_up and not engine.is_up:
            logger.warning("%s is down: %s", engine.url, engine.problem)

    def _start(self, name: str, work: Callable[[], _Answered | _Probed]) -> None:
        def run() -> None:
            self._answers.put(work())
            wake(self._link)

        threading.Thread(target=run, name=name, daemon=True).start()

    # --- reports

    def _report(self, now: float) -> None:
        state = _state_of(self._pool.engines)
        if self._is_serving and state != self._reported and now >= self._report_at:
            self._link.send(state, self._term)
            self._reported, self._report_at = state, now + _REPORT_S


def _state_of(engines: Sequence[Engine]) -> EnginesNow:
    names = EngineNow._fields
    return EnginesNow(tuple(EngineNow(*(getattr(e, name) for name in names)) for e in engines))
