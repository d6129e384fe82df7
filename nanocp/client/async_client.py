"""`AsyncClient`: a connection for one asyncio event loop.

Enters: a service's host:port, prompts, sampling options. Leaves: chunks as the service streams
them, or a ServiceError. Does not know: how the service works.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from nanocp.client.connection import Endpoint, Endpoints
from nanocp.client.errors import Aborted, errors_of, service_error
from nanocp.client.messages import (
    Chunk,
    Generation,
    Sampling,
    ServerInfo,
    cluster_load_of,
    generation_of,
    request_message,
    server_info_of,
)
from nanocp.client.resumption import RESUME_TIMEOUT_S, Resumption
from nanocp.values.plan import ClusterLoad
from nanocp.wire.v1 import inference_pb2 as pb


class AsyncChunks:
    """An asynchronous iterator over the chunks of one request, as they arrive.

    It ends when each choice has had its `finish`. If its endpoint is lost, it goes on at the
    client's next one. Iterating raises ServiceError if the request fails.
    """

    def __init__(self, endpoints: Endpoints, resumption: Resumption) -> None:
        self._endpoints = endpoints
        self._resumption = resumption
        self._is_closed = False
        self._begin()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        while True:
            try:
                chunk = self._resumption.chunk(await anext(self._responses))
            except grpc.RpcError as error:
                if self._resumption.is_over:
                    raise StopAsyncIteration from None
                metadata = await self._call.initial_metadata()
                pause_s = self._resumption.pause_s(self._endpoint.target, error, metadata)
                self._endpoints.failed(self._endpoint)
                await asyncio.sleep(pause_s)
                if self._is_closed:
                    raise Aborted("the request was closed") from error
                self._begin()
            else:
                if chunk is not None:
                    return chunk

    def close(self) -> None:
        """Abort the request if it has not ended. Idempotent."""
        self._is_closed = True
        self._call.cancel()

    def _begin(self) -> None:
        self._endpoint = self._endpoints.present
        self._call = self._endpoint.inference.Generate(
            self._resumption.message(),
            timeout=self._resumption.timeout_s,
            metadata=self._endpoints.metadata,
        )
        self._responses = aiter(self._call)


class AsyncClient:
    """A connection to a service for one asyncio event loop, inside which it must be made."""

    def __init__(
        self,
        target: str | Sequence[str],
        api_key: str = "",
        *,
        tls: bool = False,
        ca: Path | str | None = None,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
    ) -> None:
        """target: host:port, or several; api_key: for a service that asks for one.

        tls: the connection is encrypted. ca: a file with the certificates by which the service's
        is judged, if not by the system's; it means tls. With several targets a request goes on at
        the next one when its own is lost, for at most resume_timeout_s without a new token.

        Nothing is sent before the first call. Raises RuntimeError outside an event loop: the
        connection would belong to another loop than its calls, which would then hang.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                "AsyncClient must be made inside the event loop that uses it: in an async def"
            ) from None
        self._endpoints = Endpoints(target, api_key, tls, ca, grpc.aio)
        self._resume_timeout_s = resume_timeout_s

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
        return AsyncChunks(self._endpoints, self._resumption(message, timeout_s))

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
        resumption = self._resumption(message, timeout_s)
        while True:
            endpoint = self._endpoints.present
            call = endpoint.inference.GenerateUnary(
                resumption.message(),
                timeout=resumption.timeout_s,
                metadata=self._endpoints.metadata,
            )
            try:
                return generation_of(await call)
            except grpc.RpcError as error:
                metadata = await call.initial_metadata()
                pause_s = resumption.pause_s(endpoint.target, error, metadata)
            self._endpoints.failed(endpoint)
            await asyncio.sleep(pause_s)

    async def abort(self, *request_ids: str, timeout_s: float = 10.0) -> tuple[str, ...]:
        """Abort requests by id and return those that were running or waiting.

        Raises NotFound if none of them was.
        """
        message = pb.AbortRequest(request_ids=request_ids)
        aborted: dict[str, None] = {}
        failures = []
        for endpoint in self._endpoints.all:
            try:
                response = await endpoint.control.Abort(
                    message, timeout=timeout_s, metadata=self._endpoints.metadata
                )
            except grpc.RpcError as error:
                failures.append(service_error(endpoint.target, error))
            else:
                aborted |= dict.fromkeys(response.aborted)
        if not aborted:
            raise failures[0]
        return tuple(aborted)

    async def server_info(self, *, timeout_s: float = 10.0) -> ServerInfo:
        """The service's model, limits and version."""
        response = await self._anywhere(
            lambda endpoint: endpoint.control.GetServerInfo(
                pb.GetServerInfoRequest(), timeout=timeout_s, metadata=self._endpoints.metadata
            )
        )
        return server_info_of(response)

    async def loads(self, *, timeout_s: float = 10.0) -> ClusterLoad:
        """The load that is decided for each instance now: rows, KV tokens and frames.

        Raises Unavailable before the cluster has started.
        """
        response = await self._anywhere(
            lambda endpoint: endpoint.control.GetLoads(
                pb.GetLoadsRequest(), timeout=timeout_s, metadata=self._endpoints.metadata
            )
        )
        return cluster_load_of(response)

    async def close(self) -> None:
        """Close the connections; running requests are aborted."""
        for endpoint in self._endpoints.all:
            await endpoint.channel.close()

    def _resumption(self, message: pb.GenerateRequest, timeout_s: float | None) -> Resumption:
        return Resumption(message, len(self._endpoints.all), timeout_s, self._resume_timeout_s)

    async def _anywhere(self, call: Callable[[Endpoint], Awaitable[Any]]) -> Any:
        """The result of a call at the first endpoint that is there."""
        for endpoint in self._endpoints.in_turn[:-1]:
            try:
                return await call(endpoint)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise service_error(endpoint.target, error) from error
        endpoint = self._endpoints.in_turn[-1]
        with errors_of(endpoint.target):
            return await call(endpoint)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
