"""A client's connections to a service: endpoints, gRPC options, credentials, API key."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import grpc

from nanocp.wire.keepalive import keepalive_options
from nanocp.wire.v1 import inference_pb2_grpc as rpc

# A dead network is noticed within 90 s, also while the service has nothing to say.
CHANNEL_OPTIONS = (
    *keepalive_options(every_ms=30_000),
    ("grpc.http2.max_pings_without_data", 0),
    # An endpoint that comes back is found soon.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # One answer may hold the log probabilities of a long prompt.
    ("grpc.max_receive_message_length", 64 << 20),
)


class Endpoint:
    """One connection of a client."""

    def __init__(
        self, target: str, credentials: grpc.ChannelCredentials | None, kind: ModuleType
    ) -> None:
        """kind: grpc or grpc.aio. Nothing is sent before the first call."""
        self.target = target
        if credentials is None:
            self.channel = kind.insecure_channel(target, options=CHANNEL_OPTIONS)
        else:
            self.channel = kind.secure_channel(target, credentials, options=CHANNEL_OPTIONS)
        self.inference = rpc.InferenceStub(self.channel)
        self.control = rpc.ControlStub(self.channel)


class Endpoints:
    """A client's connections, and the one at which calls begin."""

    def __init__(
        self,
        target: str | Sequence[str],
        api_key: str,
        tls: bool,
        ca: Path | str | None,
        kind: ModuleType,
    ) -> None:
        """target: host:port of each. ca: a file of certificates. kind: grpc or grpc.aio.

        Raises ValueError or OSError; RuntimeError for grpc.aio outside an event loop, where calls
        would hang.
        """
        if kind is grpc.aio:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                raise RuntimeError(
                    "AsyncClient must be made inside the event loop that uses it: in an async def"
                ) from None
        targets = (target,) if isinstance(target, str) else tuple(target)
        if not targets or not all(targets):
            raise ValueError(
                "target is empty, or one of its parts; each must name an endpoint, host:port"
            )
        credentials = channel_credentials(tls, ca)
        self.all = [Endpoint(one, credentials, kind) for one in targets]
        self.metadata = call_metadata(api_key)
        self._number = 0

    @property
    def present(self) -> Endpoint:
        """The endpoint at which calls begin."""
        return self.all[self._number]

    @property
    def in_turn(self) -> list[Endpoint]:
        """All endpoints, the present one first."""
        return self.all[self._number :] + self.all[: self._number]

    def failed(self, endpoint: Endpoint) -> None:
        """Begin calls at the next one, unless another call already has."""
        if endpoint is self.present:
            self._number = (self._number + 1) % len(self.all)


def channel_credentials(tls: bool, ca: Path | str | None) -> grpc.ChannelCredentials | None:
    """Credentials of an encrypted channel; None for a plain one.

    ca: trusted certificates, in PEM; None: gRPC's own. Raises OSError.
    """
    if not tls and ca is None:
        return None
    roots = None if ca is None else Path(ca).read_bytes()
    return grpc.ssl_channel_credentials(root_certificates=roots)


def call_metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    """gRPC metadata of every call; an empty key sends none."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()
