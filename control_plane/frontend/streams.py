"""The open requests: tokens enter in any order, the output in order and the end of each leave.

Used from the front end's event loop only. A stop string in the text ends a request here, before its
row stops; the controller is then asked to abort it.
"""

from __future__ import annotations

import asyncio
import itertools
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
from nanocp.values.remote_blocks import RemoteBlocks
from nanocp.values.sampling import RowInput, Token, TokenLogprobs, penalized_prompt_ids
from nanocp.wire.rows import encode_row_input

_MAX_UNPLACED = 1024
"""Tokens of a request that wait for its placement."""
_MAX_LOSSES = 3
"""Attempts in a row that may lose tokens on the way here, without a new token in order."""


class Submissions:
    """The way of requests to the controller: their numbers, attempts and aborts."""

    def __init__(self, front_end: str, id_step: int, hashes_output: bool) -> None:
        """front_end and hashes_output: see ClientStreams."""
        self._front_end = front_end
        self._hashes_output = hashes_output
        self._id_step = id_step
        self.request_ids = itertools.count(1, id_step)
        """Numbers of the next requests."""
        self._controller: ControllerInterface | None = None

    def connect(self, controller: ControllerInterface, first_id: int = 0) -> None:
        """Send requests to this controller from now on, numbered from first_id on or later."""
        self._controller = controller
        # Some may have come since the controller was told the newest number.
        self.request_ids = itertools.count(max(first_id, next(self.request_ids)), self._id_step)

    @property
    def controller(self) -> ControllerInterface:
        """The controller of the latest `connect`."""
        assert self._controller is not None, "requests come only after connect"
        return self._controller

    def submit(
        self,
        stream: ClientStream,
        queue_timeout_us: int | None = None,
        hashes: tuple[bytes, ...] | None = None,
    ) -> None:
        """Submit an attempt. Output that is there is prompt for the prefill, output for the row.

        hashes: of the prompt, if there is no output. Missing prompt_logprobs are asked for.
        """
        received, params = stream.prompt_logprobs, stream.choice.params
        salt = stream.origin.salt
        is_asking = received is not None and len(received) < stream.prompt_len - 1
        known_ids = (*stream.prompt_ids, *stream.output.ids)
        penalized_ids = penalized_prompt_ids(stream.prompt_ids, params)
        if hashes is None:
            # Log probabilities of the prompt come from its prefill, so nothing may be shared.
            hashes = () if is_asking else page_hashes(known_ids, salt)
        row = RowInput(
            known_ids[-1],
            params,
            self._front_end,
            tuple(stream.output.ids),
            penalized_ids,
            stream.attempts.number,
            *(page_state(known_ids, hashes, salt) if self._hashes_output else ()),
        )
        submission = Submission(
            stream.arrival(encode_row_input(row), () if is_asking else hashes),
            known_ids,
            queue_timeout_us,
            self._front_end,
            stream.choice.prompt_logprobs if is_asking else None,
            salt,
            None if stream.output.ids else stream.origin.remote,
        )
        self.controller.submit(submission)


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
        self._max_undelivered_tokens = max_undelivered_tokens
        self._observer = observer
        self._steps_per_window = steps_per_window
        self._submissions = Submissions(front_end, id_step, hashes_output)
        self.connect = self._submissions.connect
        self._by_request: dict[int, ClientStream] = {}
        self._by_client: dict[str, list[ClientStream]] = {}
        """Choices that have not ended, at least one, by the client's id."""
        self._asking: dict[int, ClientStream] = {}
        """Requests that asked for log probabilities of their prompt, which may come after the last
        token."""

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
        if any(stream.choice.attempt >= choices[0].attempt for stream in running):
            raise ValueError(
                f"request_id {client_id!r} is running; it must be unique among running requests"
            )
        for stream in list(running):
            self._abort(stream, FinishReason.ABORTED, "the client has resumed the request")
        changed, ids, steps = asyncio.Event(), self._submissions.request_ids, self._steps_per_window
        streams = [
            ClientStream(next(ids), client_id, prompt_ids, choice, origin, changed, steps)
            for choice in choices
        ]
        self._observer.on_request(len(choices))
        hashes = page_hashes(prompt_ids, origin.salt)
        for stream in streams:
            self._open(stream, queue_timeout_us, None if stream.output.ids else hashes)
        return streams

    def deliver(self, instance: int, tokens: Iterable[Token]) -> None:
        """Take tokens from an instance. Never waits: a slow client loses its request instead.

        Raises PermissionError at the first token that another instance generates.
        """
        for token in tokens:
            stream = self._by_request.get(token.request_id)
            if stream is None or token.attempt != stream.attempts.number:
                continue
            if not stream.attempts.owners.may_generate(token.index, instance):
                self._keep_unplaced(stream, instance, token)
                continue
            if num_new := stream.output.add(token):
                stream.changed.set()
                stream.times.add_tokens(num_new, self._observer)
            self._settle(stream)

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
        asked = stream.choice
        params = replace(asked.params, max_tokens=1, min_tokens=0)
        asking = ClientStream(
            next(self._submissions.request_ids),
            stream.client_id,
            stream.prompt_ids,
            Choice(params, prompt_logprobs=asked.prompt_logprobs, attempt=asked.attempt),
            stream.origin,
            stream.changed,
            self._steps_per_window,
        )
        asking.prompt_logprobs, asking.attempts.number = stream.prompt_logprobs, 1
        self._open(asking)
        return asking

    def placed(self, placement: Placement, num_cached: int | None = None) -> None:
        """The request was placed, or its placement changed."""
        if stream := self._by_request.get(placement.request_id):
            attempts = stream.attempts
            if num_cached is not None and attempts.number == 0:
                remote = stream.origin.remote
                stream.num_cached = max(num_cached, remote.num_cached if remote else 0)
            stream.placement = placement
            attempts.owners.placed(placement)
            stream.times.placed()
            unplaced, attempts.unplaced = attempts.unplaced, []
            for instance, token in unplaced:
                self.deliver(instance, [token])

    def preempted(self, preempted: Preempted) -> None:
        """Submit the request again when every token that it has generated is here."""
        if stream := self._by_request.get(preempted.request_id):
            stream.attempts.was_preempted = True
            stream.attempts.resumes_after = preempted.num_tokens - stream.prompt_len
            if len(stream.output.ids) == stream.attempts.resumes_after:
                self._begin_attempt(stream, "preempted")

    def interrupted(self, cause: str = "term") -> None:
        """Submit every open request again, from its tokens in order: a term has ended.

        cause: see Observer.on_token.
        """
        for stream in list(self._by_request.values()):
            self._begin_attempt(stream, cause)
        self._submissions.controller.resubmitted()

    def tokens_lost(self, request_id: int, sentence: str) -> None:
        """Tokens were lost on their way: submit the request again, from those in order.

        It fails with the sentence if that happens again and again, and no token comes.
        """
        if stream := self._by_request.get(request_id):
            if stream.attempts.may_lose_tokens(len(stream.output.ids), _MAX_LOSSES):
                self._begin_attempt(stream, "tokens_lost")
            else:
                self._abort(stream, FinishReason.FAILED, sentence)

    def ended(self, ended: Ended) -> None:
        """The scheduler ended the request."""
        if stream := self._by_request.get(ended.request_id):
            if stream.attempts.number:
                # The end may be of an attempt before the one that is on its way.
                self._submissions.controller.abort(stream.request_id)
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
        self._observer.on_request_over(max(len(stream.output.ids) for stream in choices))

    def give_up(self, stream: ClientStream) -> None:
        """Abort one request if it has not ended: nobody reads it."""
        self._asking.pop(stream.request_id, None)
        if stream.request_id in self._by_request:
            self._abort(stream, FinishReason.ABORTED, "the client went away")

    def refuse_blocks(self, blocks: RemoteBlocks) -> None:
        """Let an engine free blocks, unless a request that was submitted holds them."""
        self._submissions.controller.refuse_blocks(blocks)

    def end_all(self, sentence: str) -> None:
        """End every request with UNAVAILABLE."""
        for stream in list(self._by_request.values()):
            self._abort(stream, FinishReason.FAILED, sentence)

    def _open(
        self,
        stream: ClientStream,
        queue_timeout_us: int | None = None,
        hashes: tuple[bytes, ...] | None = None,
    ) -> None:
        self._by_client.setdefault(stream.client_id, []).append(stream)
        self._by_request[stream.request_id] = stream
        if stream.prompt_logprobs is not None:
            self._asking[stream.request_id] = stream
        self._observer.on_submitted(stream.prompt_len)
        self._submissions.submit(stream, queue_timeout_us, hashes)

    def _keep_unplaced(self, stream: ClientStream, instance: int, token: Token) -> None:
        attempts = stream.attempts
        if not self._is_remote or len(attempts.unplaced) >= _MAX_UNPLACED:
            owner = attempts.owners.of(token.index)
            raise PermissionError(
                f"instance {instance} delivered token {token.index} of request "
                f"{token.request_id}, which is at "
                + ("no instance" if owner is None else f"instance {owner} then")
            )
        attempts.unplaced.append((instance, token))

    def _settle(self, stream: ClientStream) -> None:
        """End, resubmit or refuse the request if its output so far calls for it."""
        output = stream.output
        if output.finish_reason is not None:
            if output.row_runs_on:
                self._submissions.controller.abort(stream.request_id)
            self._forget(stream, output.finish_reason)
        elif len(output.ids) == stream.attempts.resumes_after:
            self._begin_attempt(stream, "preempted")
        elif output.num_undelivered > self._max_undelivered_tokens:
            limit = f"max_undelivered_tokens ({self._max_undelivered_tokens})"
            sentence = f"the client is too slow: more than {limit} tokens were not read"
            self._abort(stream, FinishReason.REFUSED, sentence)

    def _begin_attempt(self, stream: ClientStream, cause: str) -> None:
        stream.begin_attempt(cause)
        self._submissions.submit(stream)

    def _abort(self, stream: ClientStream, reason: FinishReason, sentence: str) -> None:
        self._submissions.controller.abort(stream.request_id)
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
        ended = stream.summary()
        self._observer.on_finished(reason, ended)
        log_ended(reason, ended)
