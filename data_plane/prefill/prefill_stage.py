"""A stage of the prefill: `python -m data_plane.prefill.prefill_stage`, or a thread of the prefill.

It sends KV of its layers to instances, and log probabilities of prompts to front ends. As a process
it ends with the pipe to the prefill.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import Empty, Queue
from typing import Any, NamedTuple, Protocol

from data_plane.instance.stage_edge import StageEdge
from data_plane.kv.page_ring import PageRingWriter, prefill_ring
from data_plane.member.lifetime import segments_of, sentence, whole_percents
from data_plane.member.token_streams import TokenStreams
from data_plane.prefill.stage_messages import (
    BeginPrompt,
    CancelPrompt,
    JoinTerm,
    StageEnded,
    StageGaveUp,
    StageJoined,
    StageLoaded,
    StageLoading,
    StageRan,
    StageSpec,
    StageSuspects,
)
from data_plane.transport.exchange import ExchangeError, PeerLost, Term, TermOver
from data_plane.transport.segments import Segments
from nanocp.logs import configure
from nanocp.values.passes import PassPlan, Span
from nanocp.values.plan import PAGE_SIZE, Transfer

logger = logging.getLogger(__name__)

_WAIT_MS = 2.0


class PrefillEnds(Exception):
    """The prefill lets its stage end."""


class StageEnd(NamedTuple):
    """A stage's end of its connection to the prefill."""

    recv: Callable[[], Any]
    """Waits for the next message; None is the last. Raises EOFError if the prefill is gone."""
    send: Callable[[Any], None]


class PagesOfStage(Protocol):
    """A stage, and its computed pages."""

    @property
    def stage(self) -> StageEdge[Any]:
        """What runs passes."""

    def part(self, ticket: int, page: int) -> tuple[int, Any]:
        """Return the stage's part of a computed page: the bytes before it, and its bytes."""


class PrefillStageLoop:
    """Drives one stage, in one thread."""

    def __init__(
        self,
        built: PagesOfStage,
        spec: StageSpec,
        pipe: StageEnd,
        segments: Segments,
        streams: TokenStreams,
    ) -> None:
        """segments: the way to the instances' rings, whose term this loop sets."""
        self._built = built
        self._pipe = pipe
        self._segments = segments
        self._streams = streams
        self._limits = spec.member.config.limits
        self._num_instances = spec.member.config.cluster.num_instances
        self._ring = prefill_ring(spec.stage)
        self._is_alone = spec.member.config.prefill.stages == 1
        """If so, a failed pass costs its prompts; else the whole prefill."""
        self._inbox: Queue[Any] = Queue()
        self._writers: dict[int, PageRingWriter] = {}
        self._next_term: JoinTerm | None = None
        self._plans: deque[PassPlan] = deque()
        self._tickets: dict[int, tuple[Transfer, dict[int, int]]] = {}
        """Ticket -> (transfer, {page: instance}) of pages to be sent."""
        self._failed: set[int] = set()
        """Later passes hold more of them until their table ends."""

    def run(self) -> None:
        """Work until the prefill ends it, which raises PrefillEnds."""
        threading.Thread(target=self._read, name="from the prefill", daemon=True).start()
        while True:
            if self._next_term is not None:
                term, self._next_term = self._next_term, None
                self._join(term)
            elif self._plans:
                self._run(self._plans.popleft())
            else:
                # Unbounded on purpose: an idle stage waits as long as the prefill's process lives.
                self._take(self._inbox.get())

    def close(self) -> None:
        """Close the rings; written pages stay in them. Idempotent."""
        while self._writers:
            self._writers.popitem()[1].close()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while (message := self._pipe.recv()) is not None:
                if isinstance(message, JoinTerm):
                    self._segments.term.end(message.number - 1)
                self._inbox.put(message)
            self._segments.term.end(math.inf)
            self._inbox.put(None)
            return
        # The process of the prefill is gone. Its successor's stages need the rings, so nothing may
        # be finished.
        os._exit(1)

    def _run(self, plan: PassPlan) -> None:
        self._failed -= set(plan.table.ends)
        kept = tuple(span for span in plan.spans if span.request_id not in self._failed)
        plan, has_failed = plan._replace(spans=kept), False
        try:
            if kept:
                for _ in self._built.stage.run(plan):
                    # Unbounded on purpose: the prefill bounds how long a pass takes.
                    self._built.stage.wait(_WAIT_MS)
                    self._take_all()
            else:
                self._built.stage.skip(plan)
        except (ValueError, RuntimeError, MemoryError) as error:
            if not self._is_alone:
                raise
            logger.error("pass %d failed", plan.number, exc_info=error)
            self._built.stage.skip(plan)
            has_failed = True
            for span in plan.spans:
                self._failed.add(span.request_id)
                self._give_up(span.request_id, sentence(error))
        self._take_all()
        for span in plan.spans:
            self._send_pages(span)
        self._built.stage.poll()  # the prefill counts passes by this loop's report
        self._pipe.send(StageRan(plan.number, has_failed))

    def _send_pages(self, span: Span) -> None:
        """Send the span's finished pages; a full ring blocks the pipeline."""
        ticket = span.request_id
        if ticket not in self._tickets:
            return
        transfer, target_of = self._tickets[ticket]
        end = span.first + span.num_tokens
        is_last = end >= transfer.num_tokens
        finished = [page for page in target_of if is_last or (page + 1) * PAGE_SIZE <= end]
        try:
            for page in finished:
                instance, (offset, payload) = target_of.pop(page), self._built.part(ticket, page)
                if payload.nbytes and not self._writers[instance].write(
                    ticket=ticket,
                    page=page,
                    num_tokens=transfer.tokens_in(page),
                    payload=payload,
                    timeout_ms=self._limits.exchange_timeout_ms,
                    is_cancelled=lambda: self._is_cancelled(ticket),
                    offset=offset,
                ):
                    return
        except ExchangeError as error:
            self._suspect(error)
            is_last = True
        except (ValueError, RuntimeError, MemoryError) as error:
            if not self._is_alone:
                raise
            logger.error("pages of ticket %d failed", ticket, exc_info=error)
            self._give_up(ticket, sentence(error))
        if is_last:
            self._tickets.pop(ticket, None)

    def _give_up(self, ticket: int, reason: str) -> None:
        if self._tickets.pop(ticket, None) is not None:
            self._pipe.send(StageGaveUp(ticket, reason))

    def _is_cancelled(self, ticket: int) -> bool:
        self._take_all()
        return ticket not in self._tickets

    def _join(self, term: JoinTerm) -> None:
        self.close()
        self._segments.term.number = term.number
        self._segments.meet(term.places)
        try:
            for instance in filter(self._segments.is_there, range(self._num_instances)):
                self._writers[instance] = PageRingWriter(
                    self._segments,
                    instance,
                    self._limits,
                    self._ring,
                    may_be_short=not self._is_alone,
                )
        except TermOver:
            return
        except ExchangeError as error:
            self._suspect(error)
        else:
            self._pipe.send(StageJoined(term.number))

    def _suspect(self, error: ExchangeError) -> None:
        message = f"{type(error).__name__}: {error}"
        is_gone = isinstance(error, PeerLost)
        self._pipe.send(StageSuspects(self._segments.term.number, error.peer, is_gone, message))

    def _take_all(self) -> None:
        while True:
            try:
                self._take(self._inbox.get_nowait())
            except Empty:
                return

    def _take(self, message: Any) -> None:
        match message:
            case PassPlan():
                self._plans.append(message)
            case BeginPrompt(transfer, token_ids, num_top, front_end):
                ticket, stage = transfer.ticket, self._built.stage
                if token_ids:
                    stage.requests.take_prompt(ticket, token_ids)
                if num_top is not None:
                    wanted = self._streams.prompt_logprobs(
                        transfer.request_id,
                        num_top,
                        front_end,
                        lambda reason: self._give_up(ticket, reason),
                    )
                    stage.requests.ask_logprobs(ticket, token_ids, wanted)
                self._tickets[ticket] = transfer, transfer.instances()
            case CancelPrompt(ticket):
                self._tickets.pop(ticket, None)
            case JoinTerm():
                self._tickets.clear()
                self._next_term = message
            case None:
                raise PrefillEnds


def serve_stage(end: StageEnd, spec: StageSpec) -> bool:
    """Make the member's stage, and run it until the prefill ends it.

    Returns False after a failure, which it reports.
    """
    member = spec.member
    loading = whole_percents(lambda percent: end.send(StageLoading(percent)))
    try:
        with contextlib.ExitStack() as held:
            links = Segments(spec.links_id)
            built = member.make(member.config, spec.stage, links, member.checkpoint, loading)
            held.callback(built.stage.close)
            built.stage.connect()
            end.send(StageLoaded())
            term = Term(member.term)
            streams = TokenStreams(0, member.config.limits, member.metadata)
            held.callback(streams.close)
            segments = segments_of(member, term)
            loop = PrefillStageLoop(built, spec, end, segments, streams)
            held.callback(loop.close)
            loop.run()
    except PrefillEnds:
        return True
    except Exception as error:
        logger.debug("the stage failed", exc_info=True)
        end.send(StageEnded(sentence(error)))
    return False


def main() -> int:
    """Read the spec and run the stage; returns the exit status."""
    pipe = Connection(int(sys.argv[1]))
    spec: StageSpec = pipe.recv()
    service = spec.member.config.service
    configure(service.log_format, service.log_level, f"prefill stage {spec.stage}")
    return 0 if serve_stage(StageEnd(pipe.recv, pipe.send), spec) else 1


if __name__ == "__main__":
    sys.exit(main())
