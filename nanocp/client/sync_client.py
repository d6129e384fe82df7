# Generated from async_client.py by `make client`; change that file.
"""`Client`: a connection for threads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Self, Unpack

import grpc

from nanocp.client.connection import Endpoints
from nanocp.client.errors import Aborted, service_error
from nanocp.client.messages import (
    Chunk,
    Generation,
    RequestOptions,
    ServerInfo,
    cluster_load_of,
    generation_of,
    server_info_of,
)
from nanocp.client.resumption import RESUME_TIMEOUT_S, Resumption
from nanocp.values.plan import ClusterLoad
from nanocp.wire.v1 import inference_pb2 as pb


class Chunks:
    """An iterator over the chunks of one request, as they arrive.

    It ends when each choice has had its `finish`, and resumes at another endpoint if its own is
    lost. Iterating raises ServiceError if the request fails.
    """

    def __init__(self, endpoints: Endpoints, resumption: Resumption) -> None:
        self._endpoints = endpoints
        self._resumption = resumption
        self._is_closed = False
        self._begin()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        while True:
            try:
                chunk = self._resumption.chunk(next(self._responses))
            except grpc.RpcError as error:
                if self._resumption.is_over:
                    raise StopIteration from None
                pause_s = self._resumption.pause_s(self._endpoint.target, error)
                self._endpoints.failed(self._endpoint)
                time.sleep(pause_s)
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
        self._responses = iter(self._call)


class Client:
    """A connection to a service, which threads may share."""

    def __init__(
        self,
        target: str | Sequence[str],
        api_key: str = "",
        *,
        tls: bool = False,
        ca: Path | str | None = None,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
    ) -> None:
        """target: host:port, or several; api_key: for a service that requires one.

        tls: encrypts the connection. ca: a file of trusted certificates in place of the system's;
        implies tls. With several targets a request resumes at the next one, for at most
        resume_timeout_s without a new token. Nothing is sent before the first call.
        """
        self._endpoints = Endpoints(target, api_key, tls, ca, grpc)
        self._resume_timeout_s = resume_timeout_s

    def generate(self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]) -> Chunks:
        """Start decoding one prompt, a text or token ids, and return its chunks as they arrive.

        Raises ValueError, naming it, for an invalid prompt or option; iterating raises ServiceError
        if the request fails.
        """
        return Chunks(self._endpoints, self._resumption(prompt, options))

    def generate_unary(
        self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]
    ) -> Generation:
        """Decode one prompt and wait for the complete answer.

        Raises ValueError for what cannot be sent, ServiceError if the request fails.
        """
        resumption = self._resumption(prompt, options)
        while True:
            endpoint = self._endpoints.present
            call = endpoint.inference.GenerateUnary.future(
                resumption.message(),
                timeout=resumption.timeout_s,
                metadata=self._endpoints.metadata,
            )
            try:
                return generation_of(call.result())
            except grpc.RpcError as error:
                pause_s = resumption.pause_s(endpoint.target, error)
            except BaseException:
                call.cancel()
                raise
            self._endpoints.failed(endpoint)
            time.sleep(pause_s)

    def abort(self, *request_ids: str | Sequence[str], timeout_s: float = 10.0) -> tuple[str, ...]:
        """Abort requests by id and return those that were running or waiting.

        Ids are several arguments, or a list. Raises NotFound if none of them was.
        """
        named = [[each] if isinstance(each, str) else each for each in request_ids]
        message = pb.AbortRequest(request_ids=chain.from_iterable(named))
        aborted: dict[str, None] = {}
        failures = []
        for endpoint in self._endpoints.all:
            try:
                response = endpoint.control.Abort(
                    message, timeout=timeout_s, metadata=self._endpoints.metadata
                )
            except grpc.RpcError as error:
                failures.append(service_error(endpoint.target, error))
            else:
                aborted |= dict.fromkeys(response.aborted)
        if not aborted:
            raise failures[0]
        return tuple(aborted)

    def server_info(self, *, timeout_s: float = 10.0) -> ServerInfo:
        """The service's model, limits and version."""
        request = pb.GetServerInfoRequest()
        return server_info_of(self._ask("GetServerInfo", request, timeout_s))

    def loads(self, *, timeout_s: float = 10.0) -> ClusterLoad:
        """Planned load of each instance: rows, KV tokens and frames.

        Raises Unavailable before the cluster has started.
        """
        return cluster_load_of(self._ask("GetLoads", pb.GetLoadsRequest(), timeout_s))

    def close(self) -> None:
        """Close the connections; running requests are aborted."""
        for endpoint in self._endpoints.all:
            endpoint.channel.close()

    def _resumption(self, prompt: str | Sequence[int], options: RequestOptions) -> Resumption:
        return Resumption(prompt, options, len(self._endpoints.all), self._resume_timeout_s)

    def _ask(self, method: str, message: Any, timeout_s: float) -> Any:
        turn = self._endpoints.in_turn
        for endpoint in turn:
            call = getattr(endpoint.control, method)
            try:
                return call(message, timeout=timeout_s, metadata=self._endpoints.metadata)
            except grpc.RpcError as error:
                if endpoint is turn[-1] or error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise service_error(endpoint.target, error) from error
        raise AssertionError("the last endpoint's failure is raised")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
