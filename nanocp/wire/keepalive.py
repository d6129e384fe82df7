"""Keepalive options of all gRPC connections, which detect a dead network."""

from __future__ import annotations

_ANSWER_MS = 60_000
"""Ping timeout; on a busy machine an answer has taken more than 10 s."""


def keepalive_options(every_ms: int) -> tuple[tuple[str, int], ...]:
    """Options of a side that pings after so many ms of silence; a minute later the peer is dead."""
    return (
        ("grpc.keepalive_time_ms", every_ms),
        ("grpc.keepalive_timeout_ms", _ANSWER_MS),
        ("grpc.http2.ping_timeout_ms", _ANSWER_MS),
    )
