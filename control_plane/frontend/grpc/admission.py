"""Steps before every method of the clients' gRPC services: the API key, and decoding."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from control_plane.frontend.access.api_keys import REFUSED, ApiKeys
from control_plane.ports.members_port import refusal

_SERVICES = ("/nanocp.v1.Inference/", "/nanocp.v1.Control/")


class AdmitCalls(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without a key, and those that are no valid protobuf message.

    gRPC itself would answer INTERNAL, as if the service had failed.
    """

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> grpc.RpcMethodHandler | None:
        is_clients = handler_call_details.method.startswith(_SERVICES)
        metadata = dict(handler_call_details.invocation_metadata or ())
        if is_clients and not self._keys.admit(metadata):
            return refusal(REFUSED)
        handler = await continuation(handler_call_details)
        if handler is None or not is_clients:
            return handler
        read, behavior = handler.request_deserializer, handler.unary_stream or handler.unary_unary

        def deserialize(data: bytes) -> Any:
            try:
                return read(data)
            except DecodeError as error:
                return error

        async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
            if isinstance(request, DecodeError):
                name = read.__self__.__name__ if hasattr(read, "__self__") else "message"
                sentence = f"the request cannot be read as nanocp.v1.{name} (protobuf): {request}"
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, sentence)
            return await behavior(request, context)

        kind = "unary_unary" if handler.unary_stream is None else "unary_stream"
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(answer, deserialize, handler.response_serializer)
