"""The open requests: their tokens in order, their placements, and how each one ends.

Enters: tokens in any order and any number of times (protocol.md, ordered tokens), placements,
preemptions, ends. Leaves: output ids in order, which are the authority, also for a later attempt;
the end of each request. Does not know: gRPC, tokenizers, where tokens come from.

Used from the front end's event loop only. A stop string in the text ends a request here, before its
row stops; the controller is then asked to abort it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from control_plane.frontend.client_request import NOWHERE, Origin
from control_plane.frontend.client_stream import Choice, ClientStream
from control_plane.frontend.text.page_hashes import page_state
from control_plane.observe.observer import Observer
from control_plane.observe.request_log import log_ended
from control_plane.ports.controller_interface import ControllerInterface, Submission
from nanocp.values.offload import page_hashes
from nanocp.values.plan import Ended, FinishReason, Placement, Preempted
from nanocp.values.sampling import RowInput, Token, TokenLogprobs, penalized_prompt_ids
from nanocp.wire.rows import encode_row_input

_MAX_UNPLACED = 1024
"""Tokens of a request that wait for its placement."""
_MAX_LOSSES = 3
"""Attempts in a row that may lose tokens on the way here, without a new token in order."""


class ClientStreams:
    """All requests that have not ended, by number and by the client's id."""

    def __init__(
        self,
        front_end: str,
        max_undelivered_tokens: int,
        observer: Observer,
        id_step: int = 1,
        steps_per_window: int = 1,
        is_remote: bool = False,
        hashes_output: bool = False,
    ) -> None:
        """Requests are numbered from 1, or what `connect` says, in steps of id_step.

        front_end: host:port at which instances deliver tokens. is_remote: the controller is another
        process, so a token may be here before the placement that allows it. hashes_output: whether
        rows hash the pages that they write (kv_offload).
        """
        self._is_remote = is_remote
        self._hashes_output = hashes_output
        self._front_end = front_end
        self._max_undelivered_tokens = max_undelivered_tokens
        self._observer = observer
        self._steps_per_window = steps_per_window
        self._controller: ControllerInterface | None = None
        self._id_step = id_step
        self._request_ids = itertools.count(1, id_step)
        self._by_request: dict[int, ClientStream] = {}
        self._by_client: dict[str, list[ClientStream]] = {}
        """Choices that have not ended, at least one, by the client's id."""
        self._asking: dict[int, ClientStream] = {}
        """Requests that asked for log probabilities of their prompt, which may come after the last
        token."""

    def connect(self, controller: ControllerInterface, first_id: int = 0) -> None:
        """Send requests to this controller from now on, numbered from first_id on or later."""
        self._controller = controller
        # Some may have come since the controller was told the newest number.
        self._request_ids = itertools.count(max(first_id, next(self._request_ids)), self._id_step)

    def submit(
        self,
        client_id: str,
        prompt_ids: Sequence[int],
        choices: Sequence[Choice],
        origin: Origin = NOWHERE,
        queue_timeout_us: int | None = None,
        joins: bool = False,
    ) -> list[ClientStream]:
        """Send a validated request's choices to the controller.

        joins: whether it is a further prompt of a call that runs under the client's id. A client
        that resumes its request takes it over from its own earlier attempt. Raises ValueError if a
        request with the client's id is running otherwise.
        """
        running = () if joins else self._by_client.get(client_id, ())
        if any(stream.resumed >= choices[0].attempt for stream in running):
            raise ValueError(
                f"request_id {client_id!r} is running; it must be unique among running requests"
            )
        for stream in list(running):
            self._abort(stream, FinishReason.ABORTED, "the client has resumed the request")
        changed = asyncio.Event()
        streams = [
            ClientStream(
                next(self._request_ids),
                client_id,
                prompt_ids,
                choice,
                origin,
                changed,
                self._steps_per_window,
            )
            for choice in choices
        ]
        self._by_client.setdefault(client_id, []).extend(streams)
        self._by_request |= {stream.request_id: stream for stream in streams}
        self._observer.on_request(len(choices))
        hashes = page_hashes(prompt_ids)
        for stream in streams:
            if stream.num_top is not None:
                self._asking[stream.request_id] = stream
            self._observer.on_submitted(stream.prompt_len)
            self._submit(stream, queue_timeout_us, None if stream.output_ids else hashes)
        return streams

    def deliver(self, instance: int, tokens: Iterable[Token]) -> None:
        """Take tokens from an instance. Never waits: a slow client loses its request instead.

        Raises PermissionError at the first token that another instance generates.
        """
        for token in tokens:
            stream = self._by_request.get(token.request_id)
            if stream is None or token.attempt != stream.attempt:
                continue
            if not stream.owners.may_generate(token.index, instance):
                if self._is_remote and len(stream.unplaced) < _MAX_UNPLACED:
                    stream.unplaced.append((instance, token))
                    continue
                owner = stream.owners.of(token.index)
                raise PermissionError(
                    f"instance {instance} delivered token {token.index} of request "
                    f"{token.request_id}, which is at "
                    + ("no instance" if owner is None else f"instance {owner} then")
                )
            self._observe(stream, stream.add(token))
            if stream.finish_reason is not None:
                if stream.row_runs_on:
                    self._connected_controller.abort(stream.request_id)
                self._forget(stream, stream.finish_reason)
            elif len(stream.output_ids) == stream.resumes_after:
                self._begin_attempt(stream, "preempted")
            elif stream.num_undelivered > self._max_undelivered_tokens:
                limit = f"max_undelivered_tokens ({self._max_undelivered_tokens})"
                sentence = f"the client is too slow: more than {limit} tokens were not read"
                self._abort(stream, FinishReason.REFUSED, sentence)

    def add_prompt_logprobs(
        self, request_id: int, first: int, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """Append log probabilities of the prompt's tokens, from token `first` on.

        What a prefill that was started again repeats, and what would leave a gap, is dropped.
        """
        stream = self._asking.get(request_id)
        if stream is None or stream.prompt_logprobs is None:
            return
        num_known = 1 + len(stream.prompt_logprobs) - first
        if num_known >= 0:
            # The prefill of a later attempt goes on with those of the output.
            stream.prompt_logprobs += logprobs[num_known : stream.prompt_len - first]
            stream.changed.set()

    def ask_again(self, stream: ClientStream) -> ClientStream:
        """Ask for log probabilities of the prompt that were lost on their way, by another request.

        Returns that request, which fills the list of `stream`; nobody reads the token that it
        generates. It was admitted before, so the queue's caps do not refuse it.
        """
        params = replace(stream.params, max_tokens=1, min_tokens=0)
        asking = ClientStream(
            next(self._request_ids),
            stream.client_id,
            stream.prompt_ids,
            Choice(params, prompt_logprobs=stream.num_top, attempt=1),
            stream.origin,
            stream.changed,
            self._steps_per_window,
        )
        asking.prompt_logprobs, asking.resumed = stream.prompt_logprobs, stream.resumed
        self._by_client.setdefault(stream.client_id, []).append(asking)
        self._by_request[asking.request_id] = self._asking[asking.request_id] = asking
        self._observer.on_submitted(asking.prompt_len)
        self._submit(asking)
        return asking

    def placed(self, placement: Placement, num_cached: int | None = None) -> None:
        """The request was placed, or its placement changed."""
        if stream := self._by_request.get(placement.request_id):
            if num_cached is not None and stream.attempt == 0:
                stream.num_cached = num_cached
            stream.placement = placement
            stream.owners.placed(placement)
            stream.placed_s = stream.placed_s or time.monotonic()
            unplaced, stream.unplaced = stream.unplaced, []
            for instance, token in unplaced:
                self.deliver(instance, [token])

    def preempted(self, preempted: Preempted) -> None:
        """Submit the request again when every token that it has generated is here."""
        if stream := self._by_request.get(preempted.request_id):
            stream.was_preempted = True
            stream.resumes_after = preempted.num_tokens - stream.prompt_len
            if len(stream.output_ids) == stream.resumes_after:
                self._begin_attempt(stream, "preempted")

    def interrupted(self, cause: str = "term") -> None:
        """Submit every open request again, from its tokens in order: a term has ended.

        cause: see Observer.on_token.
        """
        for stream in list(self._by_request.values()):
            self._begin_attempt(stream, cause)
        self._connected_controller.resubmitted()

    def tokens_lost(self, request_id: int, sentence: str) -> None:
        """Tokens were lost on their way: submit the request again, from those in order.

        It fails with the sentence if that happens again and again, and no token comes.
        """
        if stream := self._by_request.get(request_id):
            if stream.may_lose_tokens(_MAX_LOSSES):
                self._begin_attempt(stream, "tokens_lost")
            else:
                self._abort(stream, FinishReason.FAILED, sentence)

    def ended(self, ended: Ended) -> None:
        """The scheduler ended the request."""
        if stream := self._by_request.get(ended.request_id):
            if stream.attempt:
                # The end may be of an attempt before the one that is on its way.
                self._connected_controller.abort(stream.request_id)
            self._end(stream, ended)

    def abort(self, client_id: str) -> bool:
        """Abort a request by the client's id; False if none runs under it."""
        choices = list(self._by_client.get(client_id, ()))
        for stream in choices:
            self._abort(stream, FinishReason.ABORTED, "the request was aborted")
        return bool(choices)

    def client_gone(self, choices: Sequence[ClientStream]) -> None:
        """Abort the choices that have not ended: their client is gone."""
        for stream in choices:
            self.give_up(stream)
        self._observer.on_request_over(max(len(stream.output_ids) for stream in choices))

    def give_up(self, stream: ClientStream) -> None:
        """Abort one request if it has not ended: nobody reads it."""
        self._asking.pop(stream.request_id, None)
        if stream.request_id in self._by_request:
            self._abort(stream, FinishReason.ABORTED, "the client went away")

    def end_all(self, sentence: str) -> None:
        """End every request with UNAVAILABLE."""
        for stream in list(self._by_request.values()):
            self._abort(stream, FinishReason.FAILED, sentence)

    @property
    def _connected_controller(self) -> ControllerInterface:
        assert self._controller is not None, "requests come only after connect"
        return self._controller

    def _begin_attempt(self, stream: ClientStream, cause: str) -> None:
        """Submit the request again, with the tokens that are in order."""
        stream.begin_attempt(cause)
        self._submit(stream)

    def _submit(
        self,
        stream: ClientStream,
        queue_timeout_us: int | None = None,
        hashes: tuple[bytes, ...] | None = None,
    ) -> None:
        """Submit an attempt. Output that is there is prompt for the prefill, output for the row.

        hashes: of the prompt, if there is no output. Missing prompt_logprobs are asked for.
        """
        received = stream.prompt_logprobs
        is_asking = received is not None and len(received) < stream.prompt_len - 1
        known_ids = (*stream.prompt_ids, *stream.output_ids)
        penalized_ids = penalized_prompt_ids(stream.prompt_ids, stream.params)
        if hashes is None:
            # Log probabilities of the prompt come from its prefill, so nothing may be shared.
            hashes = () if is_asking else page_hashes(known_ids)
        row = RowInput(
            known_ids[-1],
            stream.params,
            self._front_end,
            tuple(stream.output_ids),
            penalized_ids,
            stream.attempt,
            *(page_state(known_ids, hashes) if self._hashes_output else ()),
        )
        submission = Submission(
            stream.arrival(encode_row_input(row), () if is_asking else hashes),
            known_ids,
            queue_timeout_us,
            self._front_end,
            stream.num_top if is_asking else None,
        )
        self._connected_controller.submit(submission)

    def _abort(self, stream: ClientStream, reason: FinishReason, sentence: str) -> None:
        self._connected_controller.abort(stream.request_id)
        self._end(stream, Ended(stream.request_id, reason, sentence))

    def _end(self, stream: ClientStream, ended: Ended) -> None:
        stream.ended = ended
        stream.changed.set()
        self._forget(stream, ended.reason)

    def _forget(self, stream: ClientStream, reason: FinishReason) -> None:
        del self._by_request[stream.request_id]
        choices = self._by_client[stream.client_id]
        choices.remove(stream)
        if not choices:
            del self._by_client[stream.client_id]
        ended = stream.times()
        self._observer.on_finished(reason, ended)
        log_ended(reason, ended)

    def _observe(self, stream: ClientStream, num_new: int) -> None:
        now_s = time.monotonic()
        for _ in range(num_new):
            if stream.first_token_s is None:
                stream.first_token_s = now_s
                self._observer.on_first_token(now_s - stream.arrived_s)
            else:
                self._observer.on_token(now_s - stream.last_token_s, stream.paused_by)
            stream.last_token_s, stream.paused_by = now_s, ""
