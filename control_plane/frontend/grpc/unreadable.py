"""A sentence for requests that are no valid protobuf message.

Enters: calls as bytes. Leaves: the same calls with their message, or INVALID_ARGUMENT. Does not
know: what they say.

gRPC itself would answer INTERNAL, as if the service had failed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

_SERVICES = ("/nanocp.v1.Inference/", "/nanocp.v1.Control/")


class RefuseUnreadable(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Wraps the methods of the clients' services, which all take one message."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> grpc.RpcMethodHandler | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_SERVICES):
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

        is_stream = handler.unary_stream is not None
        make = (
            grpc.unary_stream_rpc_method_handler
            if is_stream
            else grpc.unary_unary_rpc_method_handler
        )
        return make(answer, deserialize, handler.response_serializer)
