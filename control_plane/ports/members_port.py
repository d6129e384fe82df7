"""The ports for members, apart from the clients'. Each member has a secret.

Secrets are new at each start, and in no log, command line, event log or snapshot.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc

from control_plane.ports.addresses import advertised_host, join
from nanocp.config.service import ServiceConfig
from nanocp.wire.keepalive import keepalive_options
from nanocp.wire.member_metadata import NAME, SECRET

REFUSED = "this port is for members of the service, and the call has no valid secret of one"

_MAX_MESSAGE_BYTES = 256 << 20
"""Fits a full table, or the prompt ids of one request."""

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    *keepalive_options(every_ms=10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Every heartbeat would bring pings that measure the bandwidth.
    ("grpc.http2.bdp_probe", 0),
)


class MemberSecrets:
    """One secret for each member of this start of the service."""

    def __init__(self) -> None:
        self._secrets: dict[str, str] = {}
        self._watcher: Callable[[str, str], None] = lambda name, secret: None

    def issue(self, name: str) -> str:
        """Make the member's secret; an older one is void."""
        self.take(name, secrets.token_hex(16))
        return self._secrets[name]

    def take(self, name: str, secret: str) -> None:
        """Admit a member by another process's secret; an older one is void."""
        self._secrets[name] = secret
        self._watcher(name, secret)

    def watch(self, issued: Callable[[str, str], None]) -> None:
        """Call `issued` with each later name and secret, from the issuing thread."""
        self._watcher = issued

    def issued(self) -> dict[str, str]:
        """Return the valid secrets, by name."""
        return dict(self._secrets)

    def admit(self, metadata: Mapping[str, str]) -> bool:
        """Check a call's member name and secret, in constant time."""
        secret = self._secrets.get(metadata.get(NAME, ""))
        given = metadata.get(SECRET, "").encode()
        return secret is not None and hmac.compare_digest(secret.encode(), given)


def caller(context: grpc.aio.ServicerContext) -> str:
    """Return the name of the calling member, such as `instance 3`."""
    return str(dict(context.invocation_metadata())[NAME])


def bind(
    service: ServiceConfig, members: MemberSecrets, number: int
) -> tuple[grpc.aio.Server, str]:
    """Make a server for members alone, bound but not started; return it and its host:port.

    number: added to service.members_port, if that is not 0. Raises OSError, naming the port.
    """
    server = grpc.aio.server(interceptors=(_MembersOnly(members),), options=SERVER_OPTIONS)
    port = service.members_port + number if service.members_port else 0
    settings = "for members (service.host, service.members_port)"
    port = add_port(server, service.host, port, settings)
    return server, join(advertised_host(service), port)


def add_port(
    server: grpc.aio.Server,
    host: str,
    port: int,
    settings: str,
    credentials: grpc.ServerCredentials | None = None,
) -> int:
    """Bind a port, or a free one if it is 0; return it. Raises OSError, naming the settings."""
    try:
        if credentials is None:
            return int(server.add_insecure_port(join(host, port)))
        return int(server.add_secure_port(join(host, port), credentials))
    except RuntimeError as error:  # Its message says nothing but the address.
        raise OSError(
            f"cannot listen on port {port} of {host} {settings}: the port is in use, or the "
            "address is not this machine's"
        ) from error


class _MembersOnly(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    def __init__(self, members: MemberSecrets) -> None:
        self._members = members

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> grpc.RpcMethodHandler | None:
        if self._members.admit(dict(handler_call_details.invocation_metadata or ())):
            return await continuation(handler_call_details)
        return refusal(REFUSED)


def refusal(sentence: str) -> grpc.RpcMethodHandler:
    """Refuse a call with UNAUTHENTICATED at once, without waiting for a message."""

    async def refuse(requests: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, sentence)

    return grpc.stream_unary_rpc_method_handler(refuse)
