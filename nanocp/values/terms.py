"""Events of the scheduler about members and terms."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InstanceLost:
    """The instance and its frames are gone: no window until Regrouped."""

    instance: int


@dataclass(frozen=True, slots=True)
class TermEnded:
    """The term ended without a loss: no window until Regrouped."""


@dataclass(frozen=True, slots=True)
class Regrouped:
    """The next term begins; lost seats have another process with empty frames, or none.

    Windows and tickets are over. Requests whose pages survived are held until their next attempt;
    others are forgotten until then.
    """

    term: int
    """Greater than every term before."""
    seats: tuple[int, ...] = ()
    """Instances of the term, ascending; empty: all."""
    keeps_rows: bool = False
    """The last term was settled without a loss since: rows, tables and pages stay."""
    restarts: tuple[tuple[int, int, int], ...] = ()
    """(request, least, most): positions at which rows with surviving states may go on."""


@dataclass(frozen=True, slots=True)
class Resubmitted:
    """Every front end has submitted its open requests again after Regrouped.

    Other held requests are over. Nothing is placed before; `held_timeout_us` bounds the wait.
    """


@dataclass(frozen=True, slots=True)
class SeatsWanted:
    """The next term is to have these instances: the term ends without a loss.

    Others are emptied first, then `Plan.is_settled`. It replaces a pending change; the present
    instances undo it.
    """

    seats: tuple[int, ...]
    """Ascending; new ones are ready to join."""


@dataclass(frozen=True, slots=True)
class ClusterLost:
    """The cluster cannot go on: all requests, later ones too, end with FAILED."""

    message: str
