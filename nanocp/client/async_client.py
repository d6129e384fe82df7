"""`AsyncClient`: a connection for one asyncio event loop.

Enters: a service's host:port, prompts, sampling options. Leaves: chunks as the service streams
them, or a ServiceError. Does not know: how the service works.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from nanocp.client.connection import CHANNEL_OPTIONS, call_metadata, channel_credentials
from nanocp.client.errors import errors_of, service_error
from nanocp.client.messages import (
    Chunk,
    Generation,
    Sampling,
    ServerInfo,
    chunk_of,
    cluster_load_of,
    generation_of,
    request_message,
    server_info_of,
)
from nanocp.plan import ClusterLoad
from nanocp.wire.v1 import inference_pb2 as pb
from nanocp.wire.v1 import inference_pb2_grpc as rpc


class AsyncChunks:
    """An asynchronous iterator over the chunks of one request, as they arrive.

    It ends when each choice has had its `finish`. Iterating raises ServiceError if the request
    fails.
    """

    def __init__(self, target: str, call: Any) -> None:
        self._target = target
        self._call = call
        self._responses = aiter(call)

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        try:
            return chunk_of(await anext(self._responses))
        except grpc.RpcError as error:
            raise service_error(self._target, error) from error

    def close(self) -> None:
        """Abort the request if it has not ended. Idempotent."""
        self._call.cancel()


class AsyncClient:
    """A connection to a service for one asyncio event loop, inside which it must be made."""

    def __init__(
        self, target: str, api_key: str = "", *, tls: bool = False, ca: Path | str | None = None
    ) -> None:
        """target: host:port; api_key: for a service that asks for one.

        tls: the connection is encrypted. ca: a file with the certificates by which the service's
        is judged, if not by the system's; it means tls.

        Nothing is sent before the first call. Raises RuntimeError outside an event loop: the
        connection would belong to another loop than its calls, which would then hang.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                "AsyncClient must be made inside the event loop that uses it: in an async def"
            ) from None
        self._target = target
        self._metadata = call_metadata(api_key)
        credentials = channel_credentials(tls, ca)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options=CHANNEL_OPTIONS)
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
        user: str = "",
        **sampling: Unpack[Sampling],
    ) -> AsyncChunks:
        """Start decoding one prompt, a text or token ids, and return its chunks as they arrive.

        timeout_s limits the whole request, queue_timeout_s only how long it waits to be placed.
        Requests of a lower priority number are placed first. user: whose request it is, for the
        fairness of a service without API keys. Raises ValueError, naming it, if the
        prompt or an option cannot be sent; iterating raises ServiceError if the request fails.
        """
        message = request_message(prompt, request_id, sampling, priority, queue_timeout_s, user)
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
        user: str = "",
        **sampling: Unpack[Sampling],
    ) -> Generation:
        """Decode one prompt and wait for the complete answer; `generate` explains the options.

        Raises ValueError for what cannot be sent, ServiceError if the request fails.
        """
        message = request_message(prompt, request_id, sampling, priority, queue_timeout_s, user)
        with errors_of(self._target):
            return generation_of(
                await self._inference.GenerateUnary(
                    message, timeout=timeout_s, metadata=self._metadata
                )
            )

    async def abort(self, *request_ids: str, timeout_s: float = 10.0) -> tuple[str, ...]:
        """Abort requests by id and return those that were running or waiting.

        Raises NotFound if none of them was.
        """
        with errors_of(self._target):
            response = await self._control.Abort(
                pb.AbortRequest(request_ids=request_ids), timeout=timeout_s, metadata=self._metadata
            )
        return tuple(response.aborted)

    async def server_info(self, *, timeout_s: float = 10.0) -> ServerInfo:
        """The service's model, limits and version."""
        with errors_of(self._target):
            return server_info_of(
                await self._control.GetServerInfo(
                    pb.GetServerInfoRequest(), timeout=timeout_s, metadata=self._metadata
                )
            )

    async def loads(self, *, timeout_s: float = 10.0) -> ClusterLoad:
        """The load that is decided for each instance now: rows, KV tokens and frames.

        Raises Unavailable before the cluster has started.
        """
        with errors_of(self._target):
            return cluster_load_of(
                await self._control.GetLoads(
                    pb.GetLoadsRequest(), timeout=timeout_s, metadata=self._metadata
                )
            )

    async def close(self) -> None:
        """Close the connection; running requests are aborted."""
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
