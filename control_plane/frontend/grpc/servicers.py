"""The front end's gRPC services: Inference and Control for clients, TokenSink for members."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from control_plane.frontend.access.api_keys import ApiKeys
from control_plane.frontend.client_request import (
    UNREAD_TIMEOUT_S,
    ClientRequest,
    Resume,
    ResumedChoice,
    header_of,
    origin_of,
)
from control_plane.frontend.open_requests import (
    ChoiceFinish,
    ChoiceOutput,
    OpenRequest,
    OpenRequests,
    RequestError,
)
from control_plane.frontend.streams import ClientStreams
from control_plane.frontend.validation import check_request_id
from control_plane.ports.members_port import caller
from nanocp.config.cluster import ClusterConfig
from nanocp.values.members import PREFILL, Member
from nanocp.values.plan import PAGE_SIZE, ClusterLoad, FinishReason
from nanocp.values.sampling import TokenBatch, TokenLogprobs
from nanocp.values.sampling_fields import SamplingRequest
from nanocp.wire.members import TOKEN_SINK, TOKENS
from nanocp.wire.v1 import inference_pb2 as pb
from nanocp.wire.v1 import inference_pb2_grpc

logger = logging.getLogger(__name__)

_STATUS = {
    FinishReason.REFUSED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    FinishReason.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    FinishReason.FAILED: grpc.StatusCode.UNAVAILABLE,
    FinishReason.FATAL: grpc.StatusCode.INTERNAL,
    FinishReason.EXPIRED: grpc.StatusCode.DEADLINE_EXCEEDED,
    FinishReason.ABORTED: grpc.StatusCode.CANCELLED,
}
_REASON = {FinishReason.STOP: pb.Finish.STOP, FinishReason.LENGTH: pb.Finish.LENGTH}

REQUEST_ID_METADATA = "x-request-id"
_PROMPT_LOGPROBS_PER_MESSAGE = 1024
"""Keeps a message far below the 4 MiB that a gRPC client accepts by default."""


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Generate and GenerateUnary: an answer as a stream or at once."""

    def __init__(self, open_requests: OpenRequests, keys: ApiKeys) -> None:
        self._open_requests = open_requests
        self._keys = keys

    @asynccontextmanager
    async def _begun(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext, endpoint: str
    ) -> AsyncIterator[OpenRequest]:
        """Send the id before any message; abort the call if the request fails."""
        defaults = self._open_requests.limits.default_sampling
        try:
            asked = _client_request(request, context, endpoint, self._keys, defaults)
            async with self._open_requests.begin(asked) as open_request:
                name = header_of(open_request.request_id)
                await context.send_initial_metadata(((REQUEST_ID_METADATA, name),))
                yield open_request
        except RequestError as error:
            await context.abort(_STATUS[error.reason], str(error))

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Stream an answer. Cancellation reaches this frame, because it does not yield."""
        async with self._begun(request, context, "Generate") as open_request:
            request_id = open_request.request_id
            prompt_logprobs = [*map(_logprobs, await open_request.prompt_logprobs())]
            for first in range(0, len(prompt_logprobs), _PROMPT_LOGPROBS_PER_MESSAGE):
                some = prompt_logprobs[first : first + _PROMPT_LOGPROBS_PER_MESSAGE]
                await _write(
                    context, pb.GenerateResponse(request_id=request_id, prompt_logprobs=some)
                )
            async for output in open_request:
                fields = _fields(open_request, output)
                await _write(context, pb.GenerateResponse(request_id=request_id, **fields))

    async def GenerateUnary(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> pb.GenerateUnaryResponse:
        async with self._begun(request, context, "GenerateUnary") as open_request:
            prompt_logprobs = map(_logprobs, await open_request.prompt_logprobs())
            choices = {index: pb.Choice(index=index) for index in open_request.texts_before}
            texts: dict[int, list[str]] = {index: [] for index in choices}
            async for output in open_request:
                choices[output.index].MergeFrom(pb.Choice(**_fields(open_request, output)))
                texts[output.index].append(output.text)
            for index, pieces in texts.items():
                choices[index].text = "".join(pieces)
            return pb.GenerateUnaryResponse(
                request_id=open_request.request_id,
                choices=[choice for _, choice in sorted(choices.items())],
                prompt_logprobs=prompt_logprobs,
            )
        raise AssertionError("abort raises")


async def _write(context: grpc.aio.ServicerContext, response: pb.GenerateResponse) -> None:
    """Raises RequestError if the client reads nothing for UNREAD_TIMEOUT_S.

    Keepalive proves only that the client's connection is alive.
    """
    try:
        async with asyncio.timeout(UNREAD_TIMEOUT_S):
            await context.write(response)
    except TimeoutError:
        raise RequestError(
            FinishReason.REFUSED, f"the client has read nothing for {UNREAD_TIMEOUT_S} s"
        ) from None


def _client_request(
    message: pb.GenerateRequest,
    context: grpc.aio.ServicerContext,
    endpoint: str,
    keys: ApiKeys,
    defaults: Mapping[str, Any],
) -> ClientRequest:
    """defaults: of sampling fields. Raises RequestError without a prompt, or for a long id."""
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise RequestError(FinishReason.INVALID, "prompt is absent; give either text or token_ids")
    queue_timeout_ms = message.queue_timeout_ms if message.HasField("queue_timeout_ms") else None
    # The call's own deadline limits the request too: no response could be read after it.
    if (left_s := context.time_remaining()) is not None:
        left_ms = max(1, math.ceil(left_s * 1000))
        queue_timeout_ms = left_ms if queue_timeout_ms is None else min(queue_timeout_ms, left_ms)
    metadata = dict(context.invocation_metadata() or ())
    # The message goes first: a proxy may add an id to the metadata, and the client aborts by its
    # own.
    request_id = message.request_id or metadata.get(REQUEST_ID_METADATA, "")
    try:
        check_request_id(request_id)
    except ValueError as error:
        raise RequestError(FinishReason.INVALID, str(error)) from error
    salt = message.cache_salt if message.HasField("cache_salt") else None
    given = {field.name: value for field, value in message.sampling.ListFields()}
    return ClientRequest(
        prompt=message.text if kind == "text" else tuple(message.token_ids.ids),
        prompt_field=kind,
        origin=origin_of(metadata, keys, endpoint, message.user, message.priority, salt),
        request_id=request_id,
        queue_timeout_ms=queue_timeout_ms,
        resume=_resume(message.resume) if message.HasField("resume") else None,
        **{**defaults, "max_tokens": SamplingRequest().max_tokens, **given},
    )


def _resume(message: pb.Resume) -> Resume:
    choices = tuple(
        ResumedChoice(choice.index, tuple(choice.output_ids)) for choice in message.choices
    )
    return Resume(choices, message.attempt if message.HasField("attempt") else 1)


def _fields(open_request: OpenRequest, output: ChoiceOutput) -> dict[str, Any]:
    return {
        "index": output.index,
        "token_ids": output.token_ids,
        "text": output.text,
        "finish": output.finish and _finish(len(open_request.prompt_ids), output.finish),
        "logprobs": map(_logprobs, output.logprobs),
    }


def _finish(prompt_len: int, finish: ChoiceFinish) -> pb.Finish:
    stop_reason = finish.stop_reason
    return pb.Finish(
        reason=_REASON[finish.reason],
        stop_token_id=stop_reason if isinstance(stop_reason, int) else None,
        stop_string=stop_reason if isinstance(stop_reason, str) else None,
        prompt_tokens=prompt_len,
        generated_tokens=finish.generated_tokens,
        cp_degree=finish.cp_degree,
        moe_binding=finish.moe_binding,
        kv_split=[
            pb.KvShare(instance=instance, pages=pages) for instance, pages in finish.kv_split
        ],
    )


def _logprobs(logprobs: TokenLogprobs) -> pb.Logprobs:
    return pb.Logprobs(
        logprob=logprobs.logprob,
        top_token_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


class ControlServicer(inference_pb2_grpc.ControlServicer):
    """Aborts by the clients' request ids, and facts about the service."""

    def __init__(
        self,
        cluster: ClusterConfig,
        dtype: str,
        policy: str,
        open_requests: OpenRequests,
        streams: ClientStreams,
    ) -> None:
        self._cluster, self._dtype, self._policy = cluster, dtype, policy
        self._open_requests = open_requests
        self._streams = streams
        self._load: Callable[[], ClusterLoad] | None = None
        self._front_ends: Sequence[str] = ()
        self._began_s = time.monotonic()

    def opened(self, load: Callable[[], ClusterLoad], front_ends: Sequence[str]) -> None:
        """Record that the cluster has started, with these front ends."""
        self._load, self._front_ends = load, front_ends

    async def Abort(
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbortResponse:
        if not request.request_ids:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "request_ids is empty; name at least one request"
            )
        aborted = [client_id for client_id in request.request_ids if self._streams.abort(client_id)]
        if not aborted:
            named = ", ".join(map(repr, request.request_ids[:3]))
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"no request is running or waiting as {named}"
            )
        return pb.AbortResponse(aborted=aborted)

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        limits, cluster = self._open_requests.limits, self._cluster
        return pb.GetServerInfoResponse(
            version=importlib.metadata.version("nanocp"),
            model=limits.model,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            eos_token_ids=limits.end_token_ids,
            has_tokenizer=self._open_requests.tokenizer is not None,
            has_prefill=limits.has_prefill,
            num_instances=cluster.num_instances,
            num_frames=cluster.num_frames,
            page_size=PAGE_SIZE,
            dtype=self._dtype,
            policy=self._policy,
            front_ends=self._front_ends,
            uptime_s=time.monotonic() - self._began_s,
            closed_because=self._open_requests.closed_because,
        )

    async def GetLoads(
        self, request: pb.GetLoadsRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetLoadsResponse:
        if self._load is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the cluster is starting")
            raise AssertionError("abort raises")
        load = self._load()
        return pb.GetLoadsResponse(
            num_requests_running=load.num_running,
            num_requests_waiting=load.num_waiting,
            num_requests_prefilling=load.num_prefilling,
            instances=[
                pb.InstanceLoad(instance=instance, **of_instance._asdict())
                for instance, of_instance in enumerate(load.instances)
            ],
        )


class TokenSinkServicer:
    """Takes tokens from instances and never makes one wait for a client."""

    def __init__(self, streams: ClientStreams, cluster: ClusterConfig) -> None:
        self._streams = streams
        is_pipeline, last = cluster.layout == "pipeline", cluster.num_instances - 1
        self._prompt_sender = str(Member("instance", last) if is_pipeline else PREFILL)
        """The member that computes the log probabilities of prompts."""

    def methods(self) -> grpc.GenericRpcHandler:
        """Return the method that members dial."""
        deliver = grpc.stream_unary_rpc_method_handler(self._deliver)
        return grpc.method_handlers_generic_handler(TOKEN_SINK, {"Deliver": deliver})

    async def _deliver(
        self, batches: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> bytes:
        sender = caller(context)
        async for batch in batches:
            try:
                self._take(sender, TOKENS.decode(batch))
            except ValueError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            except PermissionError as error:
                logger.error("a delivery of tokens is refused: %s", error)
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        return b""

    def _take(self, sender: str, batch: TokenBatch) -> None:
        """Raises PermissionError for tokens that are not the sender's."""
        if batch.tokens:
            if sender != str(Member("instance", batch.instance)):
                raise PermissionError(f"{sender} delivered tokens of instance {batch.instance}")
            self._streams.deliver(batch.instance, batch.tokens)
        if batch.prompts and sender != self._prompt_sender:
            raise PermissionError(f"{sender} delivered log probabilities of a prompt")
        for prompt in batch.prompts:
            self._streams.add_prompt_logprobs(*prompt)
