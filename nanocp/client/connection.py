"""What every connection to a service has: its gRPC options, its credentials, and the API key.

Enters: a key, whether the connection is encrypted. Leaves: arguments of gRPC. Does not know: calls.
"""

from __future__ import annotations

from pathlib import Path

import grpc

# A dead network is noticed within 40 s, also while the service has nothing to say.
CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # One answer may hold the log probabilities of a long prompt.
    ("grpc.max_receive_message_length", 64 << 20),
)


def channel_credentials(tls: bool, ca: Path | str | None) -> grpc.ChannelCredentials | None:
    """Credentials of an encrypted channel; None for a plain one.

    ca: certificates, in PEM, by which the service's is judged; None: gRPC's own. Raises OSError.
    """
    if not tls and ca is None:
        return None
    roots = None if ca is None else Path(ca).read_bytes()
    return grpc.ssl_channel_credentials(root_certificates=roots)


def call_metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    """gRPC metadata of every call; an empty key sends none."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()
