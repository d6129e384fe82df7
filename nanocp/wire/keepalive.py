"""How gRPC connections notice a dead network: the same way on each side of every one.

Enters: how often a side asks. Leaves: options of a channel or server. Does not know: what is said.
"""

from __future__ import annotations

_ANSWER_MS = 60_000
"""Longest wait for the answer to a ping. On a busy machine it has taken more than 10 s."""


def keepalive_options(every_ms: int) -> tuple[tuple[str, int], ...]:
    """Options of a side that pings after so many ms of silence; a minute later the peer is dead."""
    return (
        ("grpc.keepalive_time_ms", every_ms),
        ("grpc.keepalive_timeout_ms", _ANSWER_MS),
        ("grpc.http2.ping_timeout_ms", _ANSWER_MS),
    )
