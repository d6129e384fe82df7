"""What the prefill and its stages say to each other, pickled through a pipe.

Enters: nothing. Leaves: values. Does not know: pipes, who plans passes. Passes themselves go as
nanocp.values.passes has them.
"""

from __future__ import annotations

from typing import NamedTuple

from data_plane.member.lifetime import MemberSpec
from nanocp.values.members import Peer
from nanocp.values.plan import Transfer


class StageSpec(NamedTuple):
    """All that a stage's process needs to know; the first message to it."""

    member: MemberSpec
    """The prefill that it is a part of."""
    stage: int
    links_id: str
    """Prefix of the shared memory between the stages."""


class BeginPrompt(NamedTuple):
    """To every stage: pages of this ticket are wanted."""

    transfer: Transfer
    token_ids: tuple[int, ...]
    """The prompt, for the first stage and, if num_top is given, for the last; empty for others."""
    num_top: int | None = None
    """For the last stage: most likely tokens beside each token of the prompt. None: nothing of it
    is asked."""
    front_end: str = ""
    """host:port that gets the log probabilities."""


class CancelPrompt(NamedTuple):
    """To every stage: no page of this ticket is wanted any more."""

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
    """Whether the frames that it was to fill are empty."""


class StageGaveUp(NamedTuple):
    """A ticket fails: nobody takes what was asked of its prompt."""

    ticket: int
    message: str


class StageSuspects(NamedTuple):
    """An instance takes no pages from a stage."""

    term: int
    instance: int | None
    is_gone: bool
    message: str


class StageEnded(NamedTuple):
    """A stage's process is about to end, or has ended: it is the last report."""

    message: str
