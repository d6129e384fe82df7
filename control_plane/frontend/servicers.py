"""The front end's gRPC services: Inference and Control for clients, TokenSink for instances.

Enters: messages of inference.proto and TokenBatch. Leaves: responses, or a status with a sentence.
Does not know: threads, ports, how a request is placed or decoded.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence

import grpc

from control_plane.frontend.streams import ClientStream, ClientStreams
from control_plane.frontend.tokenizer import OutputText, Tokenizer
from control_plane.frontend.validation import (
    ModelLimits,
    check_admission,
    check_length,
    check_request_id,
    prompt_ids,
    sampling_params,
    stop_strings,
)
from nanocp.plan import FinishReason, Placement
from nanocp.sampling import SamplingParams, TokenLogprobs
from nanocp.wire import convert
from nanocp.wire.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2_grpc
from nanocp.wire.v1 import inference_pb2 as pb

_STATUS = {
    FinishReason.REFUSED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    FinishReason.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    FinishReason.FAILED: grpc.StatusCode.UNAVAILABLE,
    FinishReason.EXPIRED: grpc.StatusCode.DEADLINE_EXCEEDED,
    FinishReason.ABORTED: grpc.StatusCode.CANCELLED,
}
_REASON = {FinishReason.STOP: pb.Finish.STOP, FinishReason.LENGTH: pb.Finish.LENGTH}


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """One call of `Generate` for each request."""

    def __init__(
        self, streams: ClientStreams, limits: ModelLimits, tokenizer: Tokenizer | None, max_open_calls: int
    ) -> None:
        """`max_open_calls`: calls beyond these are refused; one that a client has stopped reading counts too."""
        self._streams = streams
        self._limits = limits
        self._tokenizer = tokenizer
        self._max_open_calls = max_open_calls
        self._num_open_calls = 0
        self.closed_because = "the cluster is starting"
        """Why requests are refused; empty: they are not."""
        self.idle = asyncio.Event()
        """Set while no call is open."""
        self.idle.set()

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """See inference.proto. Writes instead of yielding, so that cancellation reaches this frame at once."""
        if self._num_open_calls >= self._max_open_calls:
            sentence = f"{self._num_open_calls} requests are open, the most that this cluster can hold and queue"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, sentence)
        self._num_open_calls += 1
        self.idle.clear()
        try:
            stream = await self._submit(request, context)
            try:
                await self._relay(stream, context)
            finally:
                self._streams.client_gone(stream)
        finally:
            self._num_open_calls -= 1
            if self._num_open_calls == 0:
                self.idle.set()

    async def _submit(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> ClientStream:
        try:
            if not self.closed_because:
                ids, params, text = await self._validated(request)
            if not self.closed_because:  # It may have closed meanwhile.
                client_id, timeout_us = request.request_id or uuid.uuid4().hex, _queue_timeout_us(request, context)
                return self._streams.submit(client_id, ids, params, request.priority, timeout_us, text)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        await context.abort(grpc.StatusCode.UNAVAILABLE, self.closed_because)
        raise AssertionError("abort raises")

    async def _validated(self, request: pb.GenerateRequest) -> tuple[Sequence[int], SamplingParams, OutputText | None]:
        check_request_id(request.request_id)
        check_admission(request)
        stop = stop_strings(request.sampling, self._tokenizer)
        # A long text takes tens of milliseconds to tokenize, which the streams of others would feel.
        ids, params = await asyncio.to_thread(self._tokenized, request)
        check_length(request.WhichOneof("prompt") or "prompt", len(ids), params.max_tokens, self._limits)
        return ids, params, OutputText(self._tokenizer, stop, params.min_tokens) if self._tokenizer else None

    def _tokenized(self, request: pb.GenerateRequest) -> tuple[Sequence[int], SamplingParams]:
        params = sampling_params(request.sampling, self._limits, self._tokenizer)
        return prompt_ids(request, self._limits, self._tokenizer), params

    async def _relay(self, stream: ClientStream, context: grpc.aio.ServicerContext) -> None:
        """Write what is new until the request ends. A client that reads slowly gets fewer, longer messages."""
        while True:
            await stream.changed.wait()
            # Both are read before the write, during which more may arrive.
            finish_reason, ended = stream.finish_reason, stream.ended
            token_ids = stream.take_new()
            text = stream.text.take_new() if stream.text else ""
            logprobs = map(_logprobs, stream.take_new_logprobs())
            response = pb.GenerateResponse(
                request_id=stream.client_id, token_ids=token_ids, text=text, logprobs=logprobs
            )
            if finish_reason is not None:
                response.text += stream.text.flush() if stream.text else ""
                response.finish.CopyFrom(_finish(stream, finish_reason))
            if token_ids or finish_reason is not None:
                await context.write(response)
            if finish_reason is not None:
                return
            if ended is not None:
                await context.abort(_STATUS[ended.reason], ended.message)


def _queue_timeout_us(request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> int | None:
    """The client's own limit or its call's deadline, whichever comes first."""
    limits_s = [request.queue_timeout_ms / 1000] if request.HasField("queue_timeout_ms") else []
    if (left_s := context.time_remaining()) is not None:
        limits_s.append(left_s)
    return round(min(limits_s) * 1e6) if limits_s else None


def _logprobs(logprobs: TokenLogprobs) -> pb.Logprobs:
    return pb.Logprobs(
        logprob=logprobs.logprob,
        top_token_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def _finish(stream: ClientStream, reason: FinishReason) -> pb.Finish:
    placement = stream.placement or Placement(stream.request_id, 0, 0, ())
    # The last generated token has no KV.
    kv_split = placement.kv_split(stream.prompt_len + max(len(stream.output_ids) - 1, 0))
    return pb.Finish(
        reason=_REASON[reason],
        prompt_tokens=stream.prompt_len,
        generated_tokens=len(stream.output_ids),
        cp_degree=len(kv_split),
        moe_binding=placement.moe_binding,
        kv_split=[pb.KvShare(instance=instance, pages=pages) for instance, pages in kv_split],
    )


class ControlServicer(inference_pb2_grpc.ControlServicer):
    """Aborts by the client's request ids."""

    def __init__(self, streams: ClientStreams) -> None:
        self._streams = streams

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        """See inference.proto."""
        if not request.request_ids:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "request_ids is empty; name at least one request")
        aborted = [client_id for client_id in request.request_ids if self._streams.abort(client_id)]
        if not aborted:
            named = ", ".join(map(repr, request.request_ids[:3]))
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no request is running or waiting as {named}")
        return pb.AbortResponse(aborted=aborted)


class TokenSinkServicer(cluster_pb2_grpc.TokenSinkServicer):
    """Takes tokens from instances and never makes one wait for a client."""

    def __init__(self, streams: ClientStreams, front_end: str) -> None:
        self._streams = streams
        self._front_end = front_end

    async def Deliver(
        self, batches: AsyncIterator[cluster_pb2.TokenBatch], context: grpc.aio.ServicerContext
    ) -> cluster_pb2.DeliverResponse:
        """See cluster.proto."""
        async for batch in batches:
            try:
                self._streams.deliver(convert.tokens_from_wire(self._front_end, batch))
            except ValueError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return cluster_pb2.DeliverResponse()
