"""What becomes of the cluster's members and its terms, as events of the scheduler.

Enters: nothing; values only. Leaves: the values. Does not know: requests, plans.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InstanceLost:
    """The instance is gone, and its frames with it. The term is over: no window until Regrouped."""

    instance: int


@dataclass(frozen=True, slots=True)
class TermEnded:
    """The term is over though no instance was lost: no window until Regrouped."""


@dataclass(frozen=True, slots=True)
class Regrouped:
    """The next term begins. A seat that was lost has another process with empty frames, or none.

    Every member has left the old term or is lost; windows in flight and tickets are over. Requests
    whose pages survived are held until the next attempt of each arrives, the others are forgotten
    until then.
    """

    term: int
    """Greater than every term before."""
    seats: tuple[int, ...] = ()
    """Instances of the term, ascending; empty: all of the cluster."""
    keeps_rows: bool = False
    """Whether the last term was settled and no instance was lost since: then rows, tables and
    pages are as they were, and no request is held."""
    restarts: tuple[tuple[int, int, int], ...] = ()
    """(request, least, most): positions at which rows may go on whose states have survived."""


@dataclass(frozen=True, slots=True)
class Resubmitted:
    """Every front end has submitted its open requests again after Regrouped.

    Held requests that are not among them are over. Until then nothing is placed, so that requests
    of the last term go before new ones; `held_timeout_us` bounds the wait.
    """


@dataclass(frozen=True, slots=True)
class SeatsWanted:
    """The next term is to have these instances: let the term come to an end without a loss.

    Others are emptied first. Then `Plan.is_settled`. It replaces a change that is under way, and
    the instances of the present term end it.
    """

    seats: tuple[int, ...]
    """Ascending; among those that are not of the term, each is ready to join."""


@dataclass(frozen=True, slots=True)
class ClusterLost:
    """The cluster cannot go on. Every request ends with FAILED, and so does every later one."""

    message: str
