"""Messages between the controller and front ends in processes of their own."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.ports.controller_interface import Submission
from nanocp.values.commands import RefuseBlocks
from nanocp.values.plan import AbortRequested, ClusterLoad, Ended, Placement, Preempted
from nanocp.wire.codec import Codec
from nanocp.wire.members import VERSION

FRONT_END_PORT = f"nanocp.v{VERSION}.FrontEndPort"
"""Controller's service: `Attach`, a front end's stream, and `ReadPage`, a page's request."""


@dataclass(frozen=True, slots=True)
class FrontEndHello:
    """The first message of a front end."""

    grpc_address: str = ""
    """host:port where clients find it."""
    http_address: str = ""
    """host:port where clients find it."""
    failure: str = ""
    """Reason why it cannot serve, or empty."""
    pid: int = 0
    newest_id: int = 0
    """Number of the newest request that it submitted to an earlier controller; 0: none."""


@dataclass(frozen=True, slots=True)
class AllSubmitted:
    """Every open request has been submitted again since the oldest unanswered Interrupted."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Observations of requests and answers, for metrics and traces."""

    calls: bytes
    """What `Observations.take` returned."""


@dataclass(frozen=True, slots=True)
class Drained:
    """Every request has ended, or the drain's time is over."""

    is_complete: bool


@dataclass(frozen=True, slots=True)
class OpenFrontEnd:
    """The cluster is ready: accept requests."""

    first_id: int
    """Number of the first request; no earlier process has used it."""
    front_ends: tuple[str, ...]
    """host:port of each."""


@dataclass(frozen=True, slots=True)
class IssuedSecret:
    """A member may deliver tokens with this secret, and with no older one."""

    name: str
    secret: str


@dataclass(frozen=True, slots=True)
class Placed:
    """The present place of a request."""

    placement: Placement
    num_cached: int | None
    """Cached tokens of its prompt, with its first placement."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A term has ended: submit every open request again."""


@dataclass(frozen=True, slots=True)
class RequestLostTokens:
    """Tokens of a request were lost on their way."""

    request_id: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Refuse new requests, and say when all open ones have ended."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End every request with UNAVAILABLE and this reason, and leave."""

    reason: str


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A page of the whole service for the front end's HTTP API."""

    name: str
    """metrics or snapshot."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the whole service."""

    content: bytes = b""
    failure: str = ""
    """Why there is none; empty: there is."""


FROM_FRONT_END = Codec(
    FrontEndHello, Submission, AbortRequested, AllSubmitted, RefuseBlocks, Observed, Drained
)
TO_FRONT_END = Codec(
    OpenFrontEnd, IssuedSecret, Placed, Preempted, Interrupted, RequestLostTokens, Ended,
    ClusterLoad, Drain, Stop,
)  # fmt: skip
PAGE_REQUEST, PAGE = Codec(PageRequest), Codec(Page)
