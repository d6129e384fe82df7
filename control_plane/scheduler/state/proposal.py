"""Where a request should go: a policy's proposal, pages that it may share, and the layout of both.

Enters: nothing. Leaves: values. Does not know: how they are found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nanocp.values.plan import TargetRun


class Proposal(NamedTuple):
    """Where a policy wants a request to be placed."""

    moe_binding: int
    shares: Mapping[int, int]
    """instance -> pages, each at least 1, summing to the prompt's pages.

    The MoE binding may be absent.
    """
    turns: tuple[int, ...] = ()
    """Instances that take the pages of coming tokens, one each in turns.

    Empty: the MoE binding takes them first.
    """


class SharedPrefix(NamedTuple):
    """Pages 0, 1, ... of a prompt that are in the cluster."""

    runs: tuple[TargetRun, ...] = ()
    pages_on: Mapping[int, int] = {}
    frames_on: Mapping[int, int] = {}
    """instance -> free frames that hold some of the pages: to share those takes them."""

    @property
    def num_pages(self) -> int:
        """Pages in all runs."""
        return sum(self.pages_on.values())


NOTHING_SHARED = SharedPrefix()


class Layout(NamedTuple):
    """Where all pages of a request go, those promised for coming tokens too."""

    proposal: Proposal
    """The policy's, or what it became to share pages."""
    pages: Sequence[tuple[int, int]]
    """(instance, pages) in the order of the pages after the shared ones."""
    pages_on: dict[int, int]
    """instance -> pages, the shared ones too."""
    shared: SharedPrefix = NOTHING_SHARED
