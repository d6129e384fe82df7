"""Short terms: losses so close together that something new must be the cause."""

from __future__ import annotations

_SHORT_TERM = 10
"""A loss before this many windows ends a short term."""
MAX_SHORT_TERMS = 4
"""Short terms in a row after which the cluster ends: each suspect request has ended."""
MAX_OF_ONE_SEAT = 3
"""Short terms in a row after which one seat is left empty, if others can serve."""


class ShortTerms:
    """The windows of this term, and the short terms before it."""

    def __init__(self) -> None:
        self._num_reports = 0
        self._seats: list[int] = []
        """The seats whose loss ended the short terms in a row."""

    def began(self) -> None:
        """A term begins."""
        self._num_reports = 0

    def reported(self) -> None:
        """One instance has run one window."""
        self._num_reports += 1

    def lost(self, seat: int, num_seats: int, has_windows: bool) -> None:
        """Record the loss of an instance, which ends the term.

        num_seats: of the term. has_windows: False for the loss of an idle member, which says
        nothing.
        """
        num_windows = self._num_reports // num_seats
        is_short = num_windows < _SHORT_TERM and (num_windows > 0 or has_windows)
        self._seats = [*self._seats, seat][-MAX_SHORT_TERMS:] if is_short else []

    @property
    def are_too_many(self) -> bool:
        """Return whether the cause must still be there."""
        return len(self._seats) == MAX_SHORT_TERMS

    def is_to_blame(self, seat: int) -> bool:
        """Return whether this seat is the cause: its machine may be ill."""
        return self._seats[-MAX_OF_ONE_SEAT:] == [seat] * MAX_OF_ONE_SEAT
