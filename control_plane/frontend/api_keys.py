"""API keys: which clients a service with keys answers.

Enters: keys, a call's header. Leaves: yes or no; for gRPC also the refusal. Does not know: HTTP,
what is asked.

Clients send a key as `Authorization: Bearer KEY`, over HTTP and in gRPC's metadata.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

REFUSED = (
    "an API key is required, as `Authorization: Bearer KEY`; the request has none, or not one of "
    "this service's"
)
_MAX_USER = 128
"""Characters of a user's name that count."""
_GUARDED = ("/nanocp.v1.Inference/", "/nanocp.v1.Control/")


class ApiKeys:
    """The keys in service.api_keys. Without any, every client is answered."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def tenant(self, authorization: str | None, user: str = "") -> str:
        """Whose request it is: the digest of its key; without keys the user that it names."""
        if not self._digests:
            return user[:_MAX_USER]
        return _digest((authorization or "").partition(" ")[2]).hex()[:16]

    def admit(self, authorization: str | None) -> bool:
        """Whether a client that sends this header is answered.

        Takes as long for a nearly right key as for a wrong one.
        """
        if not self._digests:
            return True
        scheme, _, key = (authorization or "").partition(" ")
        found = [hmac.compare_digest(_digest(key), digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(found)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class RequireApiKey(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls of the clients' services without a key.

    Other services, such as health, need none: probes have no key.
    """

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> grpc.RpcMethodHandler | None:
        """See grpc.aio.ServerInterceptor."""
        metadata = dict(handler_call_details.invocation_metadata or ())
        if not handler_call_details.method.startswith(_GUARDED) or self._keys.admit(
            metadata.get("authorization")
        ):
            return await continuation(handler_call_details)

        async def refuse(request: bytes, context: grpc.aio.ServicerContext) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSED)

        return grpc.unary_unary_rpc_method_handler(refuse)
