"""The members of a cluster, and their messages to the controller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from nanocp.values.passes import LayersMoved
from nanocp.values.plan import (
    TargetRun,
    TransferDone,
    TransferFailed,
    TransferFenced,
    TransferMissed,
    WindowDone,
)


class Member(NamedTuple):
    """A process that dials the controller: `Member("instance", 3)`, the prefill, or the puller.

    `Member("node", 0)` carries the streams of a node's instances and is no member of a term.
    """

    kind: str
    """`instance`, `prefill`, `puller` or `node`."""
    instance: int | None = None
    """Number of an instance or a node; None for the prefill and the puller."""

    def __str__(self) -> str:
        return self.kind if self.instance is None else f"{self.kind} {self.instance}"

    @classmethod
    def named(cls, name: str) -> Member:
        """The member of this `str`. Raises ValueError for a number that is none."""
        kind, _, number = name.partition(" ")
        return cls(kind, int(number) if number else None)


PREFILL = Member("prefill")
PULLER = Member("puller")
"""Reads the KV of prompts from the engines that have computed it."""


class Peer(NamedTuple):
    """An instance's address for its peers."""

    node: str = ""
    """Equal for processes that share memory."""
    address: str = ""
    """host:port for writers of other nodes; empty: none."""


@dataclass(frozen=True, slots=True)
class Hello:
    """An instance has its model, and waits for a term."""

    instance: int
    where: Peer
    kept: tuple[tuple[int, TargetRun], ...] | None = None
    """(request, run of pages) kept from a lost controller; None: it is new."""
    restarts: tuple[tuple[int, int, int], ...] = ()
    """(request, least, most): positions at which rows may go on with states here."""
    experts: tuple[bytes, ...] = ()
    """For each MoE layer the expert in each slot, int16; empty: those at home, or none."""


@dataclass(frozen=True, slots=True)
class Loading:
    """A member's loaded weights in percent, 1 to 100."""

    percent: int


@dataclass(frozen=True, slots=True)
class Beat:
    """The member lives."""

    awaited: int | None = None
    """The instance that the decode thread waits for, if any."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The member has joined the term."""

    chosen: tuple[str, ...] = ()
    """Choices at its start with reasons, one sentence each."""


@dataclass(frozen=True, slots=True)
class Left:
    """The instance has left the term, and waits for the next."""

    restarts: tuple[tuple[int, int, int], ...] = ()
    """(request, least, most): positions at which rows may go on with states here."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A wait for a peer failed; the member waits for the term's end."""

    instance: int | None
    """The peer, if it is known."""
    is_gone: bool
    """The process is known to be gone; else it is silent."""
    message: str
    """A sentence: the peer, and how long it was awaited."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The member exits, for the reason in the message."""

    message: str


@dataclass(frozen=True, slots=True)
class Resync:
    """An instance asks for a window's full table: digests differ (protocol.md, table digests)."""

    window: int
    reason: str


@dataclass(frozen=True, slots=True)
class ExpertsHere:
    """An instance has the experts of a coming table."""

    instance: int
    number: int
    """The table's (ChangeExperts)."""
    problem: str = ""
    """A sentence: the reason that they cannot be loaded."""


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Pairs of a row and an expert that an instance ran since the last such report."""

    instance: int
    number: int
    """The table that the rows followed; see ChangeExperts."""
    window: int
    """The last window that counts."""
    pairs: tuple[bytes, ...]
    """For each MoE layer those of each slot, int64."""


@dataclass(frozen=True, slots=True)
class TokensLost:
    """A front end refused tokens of these requests, whose next attempt begins."""

    request_ids: tuple[int, ...]
    reason: str
    """Why, as a sentence for the client."""


class EngineNow(NamedTuple):
    """An engine that computes prompts; counts are since its start."""

    url: str
    is_up: bool = False
    problem: str = ""
    """A sentence: the reason that it is not up."""
    tokens_in_flight: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    """Prompts that it was told to forget."""
    num_pages: int = 0
    answer_s: float = 0.0
    """Seconds until it answered, over all finished prompts."""
    arrive_s: float = 0.0
    """Seconds from its answer to the last page, over all finished prompts."""


@dataclass(frozen=True, slots=True)
class EnginesNow:
    """State of every engine of the prefill, at each change."""

    engines: tuple[EngineNow, ...]


@dataclass(frozen=True, slots=True)
class BlocksRefused:
    """The puller cannot read a request's blocks, whatever it tries: the client is wrong."""

    request_id: int
    message: str


Report = (
    WindowDone
    | TransferDone
    | TransferFenced
    | TransferMissed
    | TransferFailed
    | LayersMoved
    | ExpertsHere
    | ExpertLoad
    | Resync
    | TokensLost
    | EnginesNow
    | BlocksRefused
)
"""A member's report of its work in a term."""

Said = Hello | Loading | Beat | Ready | Left | Suspect | Failure | Report
"""Any message of a member."""


class Envelope(NamedTuple):
    """A message with its term; receivers drop those of earlier terms."""

    message: Any
    term: int = 0
