"""A policy's proposal for a request, the pages it may share, and the layout of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nanocp.values.plan import TargetRun


class Proposal(NamedTuple):
    """A policy's wish for the place of a request."""

    moe_binding: int
    shares: Mapping[int, int]
    """Pages by instance, each at least 1; their sum is the prompt's pages.

    The MoE binding may be absent.
    """
    turns: tuple[int, ...] = ()
    """Instances that take the pages of coming tokens, one page each in turns.

    Empty: the MoE binding takes them first.
    """


class SharedPrefix(NamedTuple):
    """The prompt's first pages that are already in the cluster."""

    runs: tuple[TargetRun, ...] = ()
    pages_on: Mapping[int, int] = {}
    frames_on: Mapping[int, int] = {}
    """By instance: free frames that hold some of the pages; sharing takes them."""

    @property
    def num_pages(self) -> int:
        """The number of shared pages."""
        return sum(self.pages_on.values())


NOTHING_SHARED = SharedPrefix()


class Layout(NamedTuple):
    """The place of all pages of a request, with those promised for coming tokens."""

    proposal: Proposal
    """The policy's proposal, changed if pages are shared."""
    pages: Sequence[tuple[int, int]]
    """(instance, pages) in page order, after the shared ones."""
    pages_on: dict[int, int]
    """instance -> pages, the shared ones too."""
    shared: SharedPrefix = NOTHING_SHARED
