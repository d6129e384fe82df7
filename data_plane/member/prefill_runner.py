"""The process around the prefill: one prompt at a time, page by page into the instances' rings.

Enters: prefill requests and cancellations from the controller. Leaves: pages, each under its
ticket; failures; to the front ends, log probabilities of prompts. Does not know: the kind of
`PrefillModel`, frames, when a transfer is complete, which its receivers report.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from queue import Empty
from typing import Any, Protocol

import numpy as np

from data_plane.kv.page_ring import PageRingWriter
from data_plane.member.controller_link import ControllerLink, ControllerLost
from data_plane.member.heartbeat import Heartbeat
from data_plane.member.lifetime import (
    MemberSpec,
    ShutdownRequested,
    meet,
    run_under_controllers,
    running,
    segments_of,
    sentence,
    whole_percents,
)
from data_plane.member.token_streams import TokenStreams
from data_plane.transport.exchange import ExchangeError, ExchangeTimeout, PeerLost, TermOver
from data_plane.transport.segments import Segments
from nanocp.config import LimitsConfig
from nanocp.plan import PAGE_SIZE, Transfer
from nanocp.sampling import PromptLogprobs
from nanocp.wire import convert
from nanocp.wire.v1 import cluster_pb2 as pb

logger = logging.getLogger(__name__)

MAX_QUEUED_PROMPTS = 4096
"""Transfers that may wait for the prefill; more are given up at once."""


class PrefillModel(Protocol):
    """Computes the KV of prompts."""

    def pages(
        self,
        token_ids: Sequence[int],
        num_tokens: int,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (page, payload) of the first num_tokens positions, by ascending page.

        A payload is what the instances' rings take. With `prompt_logprobs`, the log probabilities
        of token ids 1 .. num_tokens are reported, each before the page of the token before it. The
        generator does a bounded piece of work between two pages, so that its caller can stop it.
        """


def run_prefill(spec: MemberSpec) -> None:
    """Run the prefill until the controller asks for a shutdown.

    `spec.factory` names a callable(config, checkpoint, progress) that makes a PrefillModel. Raises
    FailureReported or ControllerLost if the prefill failed.
    """
    limits = spec.config.limits
    with running(spec) as (link, held):
        loading = whole_percents(lambda percent: link.send(pb.FromPrefill(loading_percent=percent)))
        model: PrefillModel = spec.make(spec.config, spec.checkpoint, loading)
        beat = pb.FromPrefill(heartbeat=pb.Heartbeat())
        held.callback(Heartbeat(lambda: link.send(beat), limits).close)
        streams = TokenStreams(0, limits, spec.metadata)
        held.callback(streams.close)
        num_instances = spec.config.cluster.num_instances
        segments = segments_of(spec, link.term)
        loop = PrefillLoop(model, link, segments, num_instances, streams, limits)
        held.callback(loop.close)
        run_under_controllers(spec, link, loop)


class TicketLoop(ABC):
    """Takes the controller's messages to a prefill that computes prompts itself."""

    def __init__(self, link: ControllerLink) -> None:
        self._link = link

    @abstractmethod
    def run(self) -> None:
        """Prefill until the controller asks for a shutdown, which raises ShutdownRequested.

        Any other exception is a failure of the prefill, or ControllerLost.
        """

    @abstractmethod
    def forget_term(self) -> None:
        """Drop every prompt of a term that is over."""

    @property
    @abstractmethod
    def _term(self) -> int:
        """The number of the present term."""

    @abstractmethod
    def _join(self, message: pb.ToPrefill) -> None:
        """Join another term."""

    @abstractmethod
    def _queue(self, transfer: Transfer, request: pb.PrefillRequest) -> None:
        """Prefill this prompt after those that came before."""

    @abstractmethod
    def _cancel(self, ticket: int) -> None:
        """Send no page of the ticket any more."""

    @abstractmethod
    def _num_queued(self) -> int:
        """Prompts that wait."""

    def _take(self, message: Any) -> None:
        if message is None:
            raise ControllerLost("the controller's stream ended")
        match message.WhichOneof("message"):
            case "prefill":
                transfer = convert.transfer_from_wire(message.prefill.transfer)
                if self._num_queued() >= MAX_QUEUED_PROMPTS:
                    reason = f"{MAX_QUEUED_PROMPTS} prompts wait for the prefill"
                    self._give_up(transfer.ticket, reason)
                else:
                    self._queue(transfer, message.prefill)
            case "cancel":
                self._cancel(message.cancel)
            case "arrived":
                pass  # There is no attempt to repeat.
            case "join":
                self.forget_term()
                self._join(message)
            case "shutdown":
                raise ShutdownRequested(message.shutdown.reason)
            case kind:
                raise AssertionError(f"the controller sent {kind} to a running prefill")

    def _send(self, **message: Any) -> None:
        self._link.send(pb.FromPrefill(term=self._term, **message))

    def _give_up(self, ticket: int, message: str) -> None:
        self._send(failed=pb.PrefillFailure(ticket=ticket, message=message))


class PrefillLoop(TicketLoop):
    """Prefills one prompt after the other, in one thread.

    It takes messages when it is idle, between two pages, and while a ring is full.
    """

    def __init__(
        self,
        model: PrefillModel,
        link: ControllerLink,
        segments: Segments,
        num_instances: int,
        streams: TokenStreams,
        limits: LimitsConfig,
    ) -> None:
        """segments: the way to the instances' rings, whose term this loop sets."""
        super().__init__(link)
        self._model = model
        self._segments = segments
        self._num_instances = num_instances
        self._writers: dict[int, PageRingWriter] = {}
        """By instance: the rings of the present term."""
        self._next_term: pb.ToPrefill | None = None
        """A term to join as soon as nothing writes into the last one's rings."""
        self._streams = streams
        self._limits = limits
        self._waiting: deque[tuple[Transfer, pb.PrefillRequest]] = deque()
        self._running: int | None = None
        """The ticket of the running prompt; None if there is none or it was cancelled."""

    def run(self) -> None:
        """See TicketLoop."""
        while True:
            if self._next_term is not None:
                message, self._next_term = self._next_term, None
                self._attach(message)
            elif self._waiting:
                self._run(*self._waiting.popleft())
            else:
                # Unbounded on purpose: an idle prefill waits as long as its stream is open, which
                # keepalive proves.
                self._take(self._link.inbox.get())

    def forget_term(self) -> None:
        """See TicketLoop."""
        self._waiting.clear()
        self._running = self._next_term = None

    def close(self) -> None:
        """Give up the rings; pages that were written stay in them. Idempotent."""
        while self._writers:
            self._writers.popitem()[1].close()

    @property
    def _term(self) -> int:
        return self._segments.term.number

    def _join(self, message: pb.ToPrefill) -> None:
        self._next_term = message

    def _attach(self, message: pb.ToPrefill) -> None:
        """Attach to the rings of a term. They are new: nothing of an earlier term gets there."""
        self.close()
        self._segments.term.number = message.term
        meet(self._segments, message.join)
        try:
            for instance in filter(self._segments.is_there, range(self._num_instances)):
                self._writers[instance] = PageRingWriter(self._segments, instance, self._limits)
        except TermOver as over:
            logger.info("%s", over)
        except (PeerLost, ExchangeTimeout) as error:
            self._suspect(error)
        else:
            self._send(ready=pb.PrefillReady(pid=os.getpid()))

    def _suspect(self, error: ExchangeError) -> None:
        """Report that an instance takes no pages; if it is lost, the term and its tickets end."""
        is_gone = isinstance(error, PeerLost)
        message = f"{type(error).__name__}: {error}"
        logger.info("%s", message)
        self._send(suspect=pb.Suspect(instance=error.peer, is_gone=is_gone, message=message))

    def _run(self, transfer: Transfer, request: pb.PrefillRequest) -> None:
        self._running = transfer.ticket
        target_of = transfer.instances()
        try:
            for page, payload in self._model.pages(
                request.token_ids, transfer.num_tokens, self._asked(request)
            ):
                if self._is_cancelled():
                    return
                if page not in target_of:
                    continue  # a shared page, which is there already
                num_tokens = min(PAGE_SIZE, transfer.num_tokens - page * PAGE_SIZE)
                writer = self._writers[target_of[page]]
                limit_ms = self._limits.exchange_timeout_ms
                if not writer.write(
                    ticket=transfer.ticket,
                    page=page,
                    num_tokens=num_tokens,
                    payload=payload,
                    timeout_ms=limit_ms,
                    is_cancelled=self._is_cancelled,
                ):
                    return
        except ControllerLost:
            raise
        except (PeerLost, ExchangeTimeout) as error:
            self._suspect(error)
        except (ValueError, RuntimeError, MemoryError) as error:
            logger.error("the prefill of request %d failed", transfer.request_id, exc_info=error)
            self._give_up(transfer.ticket, f"prefill failed: {sentence(error)}")
        finally:
            self._running = None

    def _asked(self, request: pb.PrefillRequest) -> PromptLogprobs | None:
        if not request.HasField("prompt_logprobs"):
            return None

        def lost(reason: str) -> None:
            raise RuntimeError(reason)

        return self._streams.prompt_logprobs(
            request.transfer.request_id, request.prompt_logprobs, request.front_end, lost
        )

    def _is_cancelled(self) -> bool:
        """Take the messages that came meanwhile; whether the running ticket was cancelled."""
        while True:
            try:
                self._take(self._link.inbox.get_nowait())
            except Empty:
                return self._running is None

    def _queue(self, transfer: Transfer, request: pb.PrefillRequest) -> None:
        self._waiting.append((transfer, request))

    def _num_queued(self) -> int:
        return len(self._waiting)

    def _cancel(self, ticket: int) -> None:
        if self._running == ticket:
            self._running = None
        self._waiting = deque(entry for entry in self._waiting if entry[0].ticket != ticket)
