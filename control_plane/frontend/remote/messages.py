"""What goes between the controller and front ends that are processes of their own.

Enters: nothing. Leaves: values for what controller_interface.py has as calls, and a codec for each
direction. Does not know: streams.
"""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.ports.controller_interface import Submission
from nanocp.values.plan import AbortRequested, ClusterLoad, Ended, Placement, Preempted
from nanocp.wire.codec import Codec
from nanocp.wire.members import VERSION

FRONT_END_PORT = f"nanocp.v{VERSION}.FrontEndPort"
"""The controller's service. `Attach` is one stream as long as a front end's process runs.
`ReadPage` answers a request for a page."""


@dataclass(frozen=True, slots=True)
class FrontEndHello:
    """The first message of a front end."""

    grpc_address: str = ""
    """host:port where clients find it."""
    http_address: str = ""
    """host:port where clients find it."""
    failure: str = ""
    """Why it cannot serve; empty: it can."""
    pid: int = 0
    newest_id: int = 0
    """Number of the newest request that it has submitted to an earlier controller; 0: none."""


@dataclass(frozen=True, slots=True)
class AllSubmitted:
    """Every open request has been submitted again since the oldest Interrupted without answer."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What became of requests and answers, for metrics and traces."""

    calls: bytes
    """What `Observations.take` returned."""


@dataclass(frozen=True, slots=True)
class Drained:
    """Every request has ended, or the drain's time has."""

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
    """Where a request is now."""

    placement: Placement
    num_cached: int | None
    """Tokens of its prompt that nobody computed, with its first placement."""


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
    """What the front end's HTTP API shows of the whole service."""

    name: str
    """metrics or snapshot."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the whole service."""

    content: bytes = b""
    failure: str = ""
    """Why there is none; empty: there is."""


FROM_FRONT_END = Codec(FrontEndHello, Submission, AbortRequested, AllSubmitted, Observed, Drained)
TO_FRONT_END = Codec(
    OpenFrontEnd, IssuedSecret, Placed, Preempted, Interrupted, RequestLostTokens, Ended,
    ClusterLoad, Drain, Stop,
)  # fmt: skip
PAGE_REQUEST, PAGE = Codec(PageRequest), Codec(Page)
