"""Bounds of every wait and queue. Standard library only: the scheduler imports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from nanocp.config.choices import (
    INTERNAL,
    Natural,
    Positive,
    at_least,
    between,
    check_fields,
    require,
)


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Bounds of every wait and every queue (protocol.md, bounded waits)."""

    __pydantic_config__ = {"extra": "forbid"}

    tick_ms: Annotated[int, between(10, 1000), INTERNAL] = 100
    """Interval at which a waiting instance checks its peer."""
    exchange_timeout_ms: int = 30_000
    """Longest wait for a peer inside a step. Unless it is set, half more than plan_timeout_ms."""
    plan_timeout_ms: int = 20_000
    """Longest wait for the full table after a digest mismatch. A window's report may take this and
    exchange_timeout_ms together."""
    retry_ms: Annotated[int, INTERNAL] = 2_000
    """Pause between two attempts to connect at start-up."""
    start_timeout_ms: Positive = 120_000
    """Longest wait for all instances to be ready."""
    suspect_ms: Annotated[int, at_least(300)] = 3_000
    """A member that has sent nothing for this long is taken for lost."""
    recovery_timeout_ms: Natural = 120_000
    """Longest wait after a loss until the service goes on; then it ends. 0: it ends with the first
    loss. So it does on GPUs, unless data_plane.dispatch_backend is exchange, nixl_ep or fused."""
    orphan_ms: Natural = 120_000
    """Time that members and front ends wait for another controller after a loss, while their
    process runs."""
    drain_timeout_ms: Positive = 30_000
    """Time that running requests get to finish after SIGTERM."""
    max_undelivered_tokens: Positive = 4096
    """A request is aborted once this many of its tokens wait for a slow client."""
    http_request_timeout_ms: Positive = 30_000
    """A client that takes longer to send its HTTP request, or for a handshake with gRPC, is
    disconnected."""
    max_http_connections: Positive = 4096
    """Most HTTP connections, idle ones too; requests beyond them are answered with 503. Fewer where
    ulimit -n leaves fewer (docs/use/operate.md)."""

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            self.exchange_timeout_ms > self.plan_timeout_ms > self.retry_ms > 0,
            "the limits must be ordered exchange_timeout_ms > plan_timeout_ms > retry_ms > 0, not "
            f"{self.exchange_timeout_ms}, {self.plan_timeout_ms}, {self.retry_ms}",
        )

    @property
    def longest_change_s(self) -> float:
        """Longest wait for a change of seats or layers."""
        return (self.start_timeout_ms + self.drain_timeout_ms) / 1000
