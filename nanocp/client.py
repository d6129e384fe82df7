"""Python clients of a NanoCP service: `Client` for threads, `AsyncClient` for asyncio.

Enters: a service's host:port, prompts, sampling options. Leaves: chunks as the service streams
them, or a ServiceError with the service's own sentence. Does not know: how the service works.

    with Client("127.0.0.1:50051") as client:
        for chunk in client.generate("Once upon a time", max_tokens=64):
            print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

import grpc

from nanocp.plan import ClusterLoad, FinishReason, InstanceLoad
from nanocp.sampling import TokenLogprobs
from nanocp.wire.v1 import inference_pb2 as pb
from nanocp.wire.v1 import inference_pb2_grpc as rpc

# A dead network is noticed within 40 s, also while the service has nothing to say.
_CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # One answer may hold the log probabilities of a long prompt.
    ("grpc.max_receive_message_length", 64 << 20),
)

_LISTS_OF_STRINGS = ("bad_words", "stop")


class Sampling(TypedDict, total=False):
    """Options of `generate`. What is absent takes the service's default (inference.proto)."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    bad_words: str | Sequence[str]
    stop: str | Sequence[str]
    include_stop_str_in_output: bool
    logprobs: int
    n: int
    prompt_logprobs: int


@dataclass(frozen=True, slots=True)
class Finish:
    """How a request ended and where it lived at the end."""

    reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    cp_degree: int
    moe_binding: int
    kv_split: tuple[tuple[int, int], ...]
    """(instance, pages of 64 tokens), ascending by instance."""
    stop_reason: int | str | None = None
    """The stop token's id or the stop string; None if max_tokens or the model's own end of sequence
    ended it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is new of one choice since the chunk before."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    """Empty if the service has no tokenizer."""
    finish: Finish | None
    """Set in the choice's last chunk only."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of token_ids, if the request asks for them."""
    index: int = 0
    """Of the choice, from 0 to n - 1."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's tokens from the second on, if the request asks for them: in order, before any
    token."""


@dataclass(frozen=True, slots=True)
class Generated:
    """All of one choice."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish: Finish
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """What `generate_unary` returns."""

    request_id: str
    choices: tuple[Generated, ...]
    """n of them, by index."""
    prompt_logprobs: tuple[TokenLogprobs, ...]
    """One for each token of the prompt but the first, if the request asks for them."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What is served; fields as in inference.proto."""

    version: str
    model: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    has_tokenizer: bool
    has_prefill: bool
    num_instances: int
    num_frames: int
    page_size: int
    dtype: str
    policy: str
    front_ends: tuple[str, ...]
    uptime_s: float
    closed_because: str


class ServiceError(RuntimeError):
    """The service did not do it, or could not be asked; the message is its own sentence.

    InvalidArgument, ResourceExhausted, Unavailable, Aborted, NotFound, DeadlineExceeded,
    Unauthenticated; this class for anything else.
    """


class InvalidArgument(ServiceError, ValueError):
    """The request can never be served as it is; the message names the field."""


class ResourceExhausted(ServiceError):
    """The service has no room, or the client reads too slowly; the message names the cap."""


class Unavailable(ServiceError):
    """The service cannot be reached, is starting or draining, or lost an instance."""


class Aborted(ServiceError):
    """The request was aborted."""


class NotFound(ServiceError):
    """No such request is running or waiting."""


class Unauthenticated(ServiceError):
    """The service asks for an API key, and this is none of its own."""


class DeadlineExceeded(ServiceError):
    """The request did not end within timeout_s, or was not placed within queue_timeout_s; it was
    aborted."""


_ERRORS = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.CANCELLED: Aborted,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
}


class Chunks:
    """The chunks of one request, as they come. Ends when each choice has had `finish`, or raises
    ServiceError."""

    def __init__(self, target: str, call: Any) -> None:
        self._target = target
        self._call = call

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        try:
            return _chunk(next(self._call))
        except grpc.RpcError as error:
            raise _service_error(self._target, error) from error

    def close(self) -> None:
        """Abort the request if it has not ended. Idempotent."""
        self._call.cancel()


class AsyncChunks:
    """As Chunks, for `async for`."""

    def __init__(self, target: str, call: Any) -> None:
        self._target = target
        self._call = call
        self._responses = aiter(call)

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        try:
            return _chunk(await anext(self._responses))
        except grpc.RpcError as error:
            raise _service_error(self._target, error) from error

    def close(self) -> None:
        """As Chunks.close."""
        self._call.cancel()


class Client:
    """A connection for threads. It may be shared by them."""

    def __init__(self, target: str, api_key: str = "") -> None:
        """target: host:port; api_key: for a service that asks for one. Nothing is sent before the
        first call."""
        self._target = target
        self._metadata = _metadata(api_key)
        self._channel = grpc.insecure_channel(target, options=_CHANNEL_OPTIONS)
        self._inference = rpc.InferenceStub(self._channel)
        self._control = rpc.ControlStub(self._channel)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        request_id: str = "",
        timeout_s: float | None = None,
        priority: int = 0,
        queue_timeout_s: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Chunks:
        """Decode one prompt (text or token ids). The request starts now; iterating raises
        ServiceError if it fails.

        timeout_s limits the whole request, queue_timeout_s only how long it waits to be placed.
        Requests of a lower priority number are placed first. Raises ValueError, naming it, if the
        prompt or an option has no place in the message.
        """
        message = _request(prompt, request_id, sampling, priority, queue_timeout_s)
        return Chunks(
            self._target,
            self._inference.Generate(message, timeout=timeout_s, metadata=self._metadata),
        )

    def generate_unary(
        self,
        prompt: str | Sequence[int],
        *,
        request_id: str = "",
        timeout_s: float | None = None,
        priority: int = 0,
        queue_timeout_s: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generation:
        """As generate, and wait for all of it. Raises ServiceError if it fails."""
        message = _request(prompt, request_id, sampling, priority, queue_timeout_s)
        with _errors_of(self._target):
            return _generation(
                self._inference.GenerateUnary(message, timeout=timeout_s, metadata=self._metadata)
            )

    def abort(self, *request_ids: str, timeout_s: float = 10.0) -> tuple[str, ...]:
        """Abort requests; returns those that were running or waiting. Raises NotFound if there are
        none."""
        with _errors_of(self._target):
            response = self._control.Abort(
                pb.AbortRequest(request_ids=request_ids), timeout=timeout_s, metadata=self._metadata
            )
        return tuple(response.aborted)

    def server_info(self, *, timeout_s: float = 10.0) -> ServerInfo:
        """What is served, and within which limits."""
        with _errors_of(self._target):
            return _server_info(
                self._control.GetServerInfo(
                    pb.GetServerInfoRequest(), timeout=timeout_s, metadata=self._metadata
                )
            )

    def loads(self, *, timeout_s: float = 10.0) -> ClusterLoad:
        """What is decided for each instance now. Raises Unavailable until the cluster has started."""
        with _errors_of(self._target):
            return _cluster_load(
                self._control.GetLoads(
                    pb.GetLoadsRequest(), timeout=timeout_s, metadata=self._metadata
                )
            )

    def close(self) -> None:
        """Close the connection; running requests are aborted."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """A connection for one asyncio event loop, inside which it must be made."""

    def __init__(self, target: str, api_key: str = "") -> None:
        """target: host:port; api_key: for a service that asks for one. Nothing is sent before the
        first call.

        Raises RuntimeError outside an event loop: the connection would belong to another than its
        calls, and hang.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                "AsyncClient must be made inside the event loop that uses it: in an async def"
            ) from None
        self._target = target
        self._metadata = _metadata(api_key)
        self._channel = grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
        self._inference = rpc.InferenceStub(self._channel)
        self._control = rpc.ControlStub(self._channel)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        request_id: str = "",
        timeout_s: float | None = None,
        priority: int = 0,
        queue_timeout_s: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> AsyncChunks:
        """As Client.generate."""
        message = _request(prompt, request_id, sampling, priority, queue_timeout_s)
        return AsyncChunks(
            self._target,
            self._inference.Generate(message, timeout=timeout_s, metadata=self._metadata),
        )

    async def generate_unary(
        self,
        prompt: str | Sequence[int],
        *,
        request_id: str = "",
        timeout_s: float | None = None,
        priority: int = 0,
        queue_timeout_s: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generation:
        """As Client.generate_unary."""
        message = _request(prompt, request_id, sampling, priority, queue_timeout_s)
        with _errors_of(self._target):
            return _generation(
                await self._inference.GenerateUnary(
                    message, timeout=timeout_s, metadata=self._metadata
                )
            )

    async def abort(self, *request_ids: str, timeout_s: float = 10.0) -> tuple[str, ...]:
        """As Client.abort."""
        with _errors_of(self._target):
            response = await self._control.Abort(
                pb.AbortRequest(request_ids=request_ids), timeout=timeout_s, metadata=self._metadata
            )
        return tuple(response.aborted)

    async def server_info(self, *, timeout_s: float = 10.0) -> ServerInfo:
        """As Client.server_info."""
        with _errors_of(self._target):
            return _server_info(
                await self._control.GetServerInfo(
                    pb.GetServerInfoRequest(), timeout=timeout_s, metadata=self._metadata
                )
            )

    async def loads(self, *, timeout_s: float = 10.0) -> ClusterLoad:
        """As Client.loads."""
        with _errors_of(self._target):
            return _cluster_load(
                await self._control.GetLoads(
                    pb.GetLoadsRequest(), timeout=timeout_s, metadata=self._metadata
                )
            )

    async def close(self) -> None:
        """As Client.close."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def _metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def _request(
    prompt: str | Sequence[int],
    request_id: str,
    sampling: Sampling,
    priority: int,
    queue_timeout_s: float | None,
) -> pb.GenerateRequest:
    parameters = pb.SamplingParameters()
    for name, value in sampling.items():
        if name in _LISTS_OF_STRINGS and isinstance(
            value, str
        ):  # It would be taken for a list of characters.
            value = [value]
        with _sending(name, value):
            parameters.MergeFrom(pb.SamplingParameters(**{name: value}))  # type: ignore[arg-type]
    request = pb.GenerateRequest(sampling=parameters)
    for name, value in (("request_id", request_id), ("priority", priority)):
        with _sending(name, value):
            setattr(request, name, value)
    with _sending("queue_timeout_s", queue_timeout_s):
        if queue_timeout_s is not None:
            request.queue_timeout_ms = math.ceil(queue_timeout_s * 1000)
    with _sending("prompt", prompt):
        if isinstance(prompt, str):
            request.text = prompt
        elif isinstance(prompt, bytes):  # They would be taken for token ids.
            raise TypeError("it must be a str or token ids")
        else:
            request.token_ids.ids.extend(prompt)
    return request


@contextmanager
def _sending(name: str, value: object) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} is {value!r:.200}, which cannot be sent: {error}") from None


def _chunk(response: pb.GenerateResponse) -> Chunk:
    finish = _finish(response.finish) if response.HasField("finish") else None
    return Chunk(
        response.request_id,
        tuple(response.token_ids),
        response.text,
        finish,
        _logprobs(response.logprobs),
        response.index,
        _logprobs(response.prompt_logprobs),
    )


def _generation(response: pb.GenerateUnaryResponse) -> Generation:
    choices = (
        Generated(
            choice.index,
            tuple(choice.token_ids),
            choice.text,
            _finish(choice.finish),
            _logprobs(choice.logprobs),
        )
        for choice in response.choices
    )
    return Generation(response.request_id, tuple(choices), _logprobs(response.prompt_logprobs))


def _finish(finish: pb.Finish) -> Finish:
    which = finish.WhichOneof("stop_reason")
    return Finish(
        reason=FinishReason[pb.Finish.Reason.Name(finish.reason)],
        stop_reason=getattr(finish, which) if which else None,
        prompt_tokens=finish.prompt_tokens,
        generated_tokens=finish.generated_tokens,
        cp_degree=finish.cp_degree,
        moe_binding=finish.moe_binding,
        kv_split=tuple((share.instance, share.pages) for share in finish.kv_split),
    )


def _logprobs(tokens: Iterable[pb.Logprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            token.logprob, tuple(zip(token.top_token_ids, token.top_logprobs, strict=True))
        )
        for token in tokens
    )


def _server_info(response: pb.GetServerInfoResponse) -> ServerInfo:
    values = {field.name: getattr(response, field.name) for field in fields(ServerInfo)}
    values |= {name: tuple(values[name]) for name in ("eos_token_ids", "front_ends")}
    return ServerInfo(**values)


def _cluster_load(response: pb.GetLoadsResponse) -> ClusterLoad:
    loads = (
        InstanceLoad(*(getattr(load, name) for name in InstanceLoad._fields))
        for load in response.instances
    )
    return ClusterLoad(response.num_requests_running, response.num_requests_waiting, tuple(loads))


@contextmanager
def _errors_of(target: str) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise _service_error(target, error) from error


def _service_error(target: str, error: Any) -> ServiceError:
    code, details = error.code(), error.details() or ""
    absences = ("failed to connect", "DNS resolution failed", "errors resolving")
    if code is grpc.StatusCode.UNAVAILABLE and any(absence in details for absence in absences):
        return Unavailable(f"no service answers at {target} ({details})")
    if "Deadline Exceeded" in details:  # gRPC's own, on this side or on the other.
        return DeadlineExceeded("timeout_s ran out before the end")
    return _ERRORS.get(code, ServiceError)(details or code.name)
