"""The messages between the prefill and its stages, pickled through a pipe.

Passes go as nanocp.values.passes has them.
"""

from __future__ import annotations

from typing import NamedTuple

from data_plane.member.lifetime import MemberSpec
from nanocp.values.members import Peer
from nanocp.values.plan import Transfer


class StageSpec(NamedTuple):
    """The first message to a stage's process, with all that it needs."""

    member: MemberSpec
    stage: int
    links_id: str
    """Prefix of the stages' shared memory."""


class BeginPrompt(NamedTuple):
    """To every stage: send pages of this ticket."""

    transfer: Transfer
    token_ids: tuple[int, ...]
    """For the first stage and, with num_top, the last; else empty."""
    num_top: int | None = None
    """For the last stage: likely tokens beside each prompt token; None: no log probabilities."""
    front_end: str = ""
    """host:port for the log probabilities."""


class CancelPrompt(NamedTuple):
    """To every stage: send no more pages of this ticket."""

    ticket: int


class JoinTerm(NamedTuple):
    """To every stage: earlier tickets are void, and instances have new rings."""

    number: int
    places: tuple[Peer | None, ...]


class StageLoading(NamedTuple):
    """A stage has loaded this percentage of its weights."""

    percent: int


class StageLoaded(NamedTuple):
    """A stage has loaded its weights, and is connected to the others."""


class StageJoined(NamedTuple):
    """A stage is attached to its rings of the term."""

    term: int


class StageRan(NamedTuple):
    """A stage has run a pass, and its pages are on their way."""

    number: int
    has_failed: bool = False
    """True if the frames to be filled are empty."""


class StageGaveUp(NamedTuple):
    """A ticket fails: nobody takes its prompt's log probabilities."""

    ticket: int
    message: str


class StageSuspects(NamedTuple):
    """An instance takes no pages from a stage."""

    term: int
    instance: int | None
    is_gone: bool
    message: str


class StageEnded(NamedTuple):
    """The last report: a stage's process has ended or soon will."""

    message: str
