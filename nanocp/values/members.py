"""The members of a cluster, and what they say to the controller.

Enters: nothing; values only. Leaves: the values. Does not know: streams, terms' steps, what follows
from what a member says.
"""

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
    """A process that dials the controller: `Member("instance", 3)`, or the prefill.

    `Member("node", 0)` is the process that carries the streams of a node's instances: no member of
    a term, but started and ended as one.
    """

    kind: str
    """`instance`, `prefill` or `node`."""
    instance: int | None = None
    """The number of an instance or of a node; None for the prefill."""

    def __str__(self) -> str:
        return self.kind if self.instance is None else f"{self.kind} {self.instance}"

    @classmethod
    def named(cls, name: str) -> Member:
        """The member whose `str` this is. Raises ValueError if its number is none."""
        kind, _, number = name.partition(" ")
        return cls(kind, int(number) if number else None)


PREFILL = Member("prefill")


class Peer(NamedTuple):
    """Where an instance is, for its peers."""

    node: str = ""
    """The node's identity: equal for processes that share memory."""
    address: str = ""
    """host:port where writers of other nodes attach; empty if they cannot."""


@dataclass(frozen=True, slots=True)
class Hello:
    """An instance has loaded its model, and waits for a term."""

    instance: int
    where: Peer
    kept: tuple[tuple[int, TargetRun], ...] | None = None
    """(request, a run of its pages) that it holds since a controller was lost; None: it is new."""
    restarts: tuple[tuple[int, int, int], ...] = ()
    """(request, least, most): where rows may go on with states that are here, as Left says."""


@dataclass(frozen=True, slots=True)
class Loading:
    """A member has loaded this percentage of its weights, 1 to 100."""

    percent: int


@dataclass(frozen=True, slots=True)
class Beat:
    """The member lives."""

    awaited: int | None = None
    """The instance that its decode thread is blocked on; None if it is not."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The member has joined the term."""

    chosen: tuple[str, ...] = ()
    """What it has chosen at its start and why, one sentence each."""


@dataclass(frozen=True, slots=True)
class Left:
    """The instance has left the term, and waits for the next one."""

    restarts: tuple[tuple[int, int, int], ...] = ()
    """(request, least, most): positions at which the row of a state that is here may go on."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A wait for a peer has failed; the member waits for the end of the term."""

    instance: int | None
    """The peer, if it is known."""
    is_gone: bool
    """Whether its process is gone, as far as the member can see; else it is silent."""
    message: str
    """What was waited for and how long, as a sentence."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The member cannot go on and exits; the message says why."""

    message: str


@dataclass(frozen=True, slots=True)
class Resync:
    """An instance asks for the full table of a window: the plan was made for another one.

    Nothing else can be applied before (protocol.md, table digests).
    """

    window: int
    reason: str


@dataclass(frozen=True, slots=True)
class TokensLost:
    """A front end took no more tokens of these requests, which begin another attempt."""

    request_ids: tuple[int, ...]
    reason: str
    """Why, as a sentence for the client."""


class EngineNow(NamedTuple):
    """What computes prompts for the prefill; counts are since its start."""

    url: str
    is_up: bool = False
    problem: str = ""
    """Why it is not up, as a sentence."""
    tokens_in_flight: int = 0
    """Prompt tokens that it is asked for now."""
    num_done: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    """Prompts that it was told to forget."""
    num_pages: int = 0
    """Pages of the prompts that are done."""
    answer_s: float = 0.0
    """Seconds until the engine answered, over all prompts that are done."""
    arrive_s: float = 0.0
    """Seconds from its answer until all pages had arrived, over all prompts that are done."""


@dataclass(frozen=True, slots=True)
class EnginesNow:
    """The state of every engine of the prefill, whenever it has changed."""

    engines: tuple[EngineNow, ...]


Report = (
    WindowDone
    | TransferDone
    | TransferFenced
    | TransferMissed
    | TransferFailed
    | LayersMoved
    | Resync
    | TokensLost
    | EnginesNow
)
"""What a member says of its work in a term."""

Said = Hello | Loading | Beat | Ready | Left | Suspect | Failure | Report
"""What a member says."""


class Envelope(NamedTuple):
    """A message of a member, or for one, and the term that it belongs to.

    Who gets it drops what is of an earlier term.
    """

    message: Any
    term: int = 0
