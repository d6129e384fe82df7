"""The view of a scheduler that metrics and pages read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from control_plane.scheduler.pages.prefix_sharing import PrefixSharing
from control_plane.scheduler.queue.known_requests import KnownRequests


class ObservedScheduler(Protocol):
    """A scheduler between two calls, to look at only; see scheduler.scheduler.Scheduler."""

    prefix_sharing: PrefixSharing
    requests: KnownRequests

    @property
    def noted(self) -> Mapping[int, str]:
        """The reasons why requests were not placed in the latest call."""

    @property
    def next_deadline_us(self) -> int | None:
        """The latest time for the next call of the scheduler."""
