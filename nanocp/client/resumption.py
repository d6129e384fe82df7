"""State of a request that resumes at another endpoint when its stream breaks.

Resumed chunks have no gaps and no repeated tokens.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Sequence
from typing import Any

import grpc

from nanocp.client.errors import service_error
from nanocp.client.messages import Chunk, RequestOptions, chunk_of, request_message
from nanocp.wire.v1 import inference_pb2 as pb

RESUME_TIMEOUT_S = 30.0
"""A service replaces a front end or an instance in seconds."""

_REQUEST_ID_METADATA = "x-request-id"
_FIRST_PAUSE_S = 0.1
_MAX_DOUBLINGS = 4
"""A pause is at most 1.6 s."""


class Resumption:
    """Received tokens of one request, and its next attempt.

    With one endpoint a failed call is final.
    """

    def __init__(
        self,
        prompt: str | Sequence[int],
        options: RequestOptions,
        num_targets: int,
        resume_timeout_s: float,
    ) -> None:
        """resume_timeout_s: limit without a new token.

        Removes options that are not of sampling. Raises ValueError for unsendable ones.
        """
        timeout_s = options.pop("timeout_s", None)
        self._request = request = request_message(
            prompt,
            options.pop("request_id", ""),
            priority=options.pop("priority", 0),
            queue_timeout_s=options.pop("queue_timeout_s", None),
            user=options.pop("user", ""),
            cache_salt=options.pop("cache_salt", None),
            sampling=options,
        )
        self._num_targets = num_targets
        self._resume_timeout_s = resume_timeout_s
        self._until_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._num_failures = 0
        """Since the latest response."""
        self._failing_since_s = 0.0
        self._attempt = 0
        self._output_ids: dict[int, list[int]] = {
            index: [] for index in range(request.sampling.n or 1)
        }
        self._num_prompt_logprobs = 0
        self._num_repeated = 0
        """Prompt log probabilities that the present call repeats."""
        if num_targets > 1:
            # Another front end would draw another id and another seed.
            request.request_id = request.request_id or uuid.uuid4().hex
            sampling = request.sampling
            if sampling.temperature > 0 and not sampling.HasField("seed"):
                sampling.seed = secrets.randbits(63)

    @property
    def is_over(self) -> bool:
        """Whether every choice has ended."""
        return not self._output_ids

    @property
    def timeout_s(self) -> float | None:
        """Remaining time of the whole request."""
        return None if self._until_s is None else max(0.0, self._until_s - time.monotonic())

    def message(self) -> pb.GenerateRequest:
        """The message of the next call."""
        self._num_repeated = self._num_prompt_logprobs
        if not self._attempt:
            return self._request
        choices = [
            pb.ResumedChoice(index=index, output_ids=ids) for index, ids in self._output_ids.items()
        ]
        message = pb.GenerateRequest()
        message.CopyFrom(self._request)
        message.resume.CopyFrom(pb.Resume(choices=choices, attempt=self._attempt))
        return message

    def chunk(self, response: pb.GenerateResponse) -> Chunk | None:
        """The chunk in a response; None if it has nothing new."""
        self._num_failures = 0
        if response.prompt_logprobs:
            num_repeated = min(self._num_repeated, len(response.prompt_logprobs))
            self._num_repeated -= num_repeated
            del response.prompt_logprobs[:num_repeated]
            if not response.prompt_logprobs:
                return None
            self._num_prompt_logprobs += len(response.prompt_logprobs)
        elif response.HasField("finish"):
            self._output_ids.pop(response.index, None)
        elif response.index in self._output_ids:
            # All log probabilities of the prompt come before.
            self._request.sampling.ClearField("prompt_logprobs")
            self._output_ids[response.index].extend(response.token_ids)
        return chunk_of(response)

    def pause_s(self, target: str, error: Any) -> float:
        """Pause before the next call, after this failure of one to the target.

        Raises ServiceError if there is to be no other call.
        """
        now_s = time.monotonic()
        if not self._num_failures:
            self._failing_since_s = now_s
        self._num_failures += 1
        may_go_on = error.code() is grpc.StatusCode.UNAVAILABLE and self._num_targets > 1
        is_late = now_s - self._failing_since_s > self._resume_timeout_s
        if not may_go_on or is_late:
            raise service_error(target, error) from error
        if any(key == _REQUEST_ID_METADATA for key, _ in error.initial_metadata() or ()):
            self._attempt += 1
        num_rounds = self._num_failures // self._num_targets
        if not num_rounds:
            return 0.0
        return _FIRST_PAUSE_S * (1 << min(num_rounds - 1, _MAX_DOUBLINGS))
