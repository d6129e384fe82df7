"""Short terms: losses that follow each other so soon that something new must be what kills.

Enters: reports of windows, losses. Leaves: whether one seat is to blame, or whether to give up.
Does not know: members, requests.
"""

from __future__ import annotations

_SHORT_TERM = 10
"""A loss before so many windows ends a short term."""
MAX_SHORT_TERMS = 4
"""The loss that ends the last of so many in a row is not recovered from: by then the scheduler has
ended each request that may be what ends instances."""
MAX_OF_ONE_SEAT = 3
"""A seat whose process ends so many short terms in a row is left empty, if the others can serve."""


class ShortTerms:
    """How many windows this term has run, and how many short terms came before."""

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
        """The instance at a seat of the term was lost, and ends it.

        num_seats: of the term. has_windows: whether a window is in flight. The loss of a member
        that did nothing says nothing.
        """
        num_windows = self._num_reports // num_seats
        is_short = num_windows < _SHORT_TERM and (num_windows > 0 or has_windows)
        self._seats = [*self._seats, seat][-MAX_SHORT_TERMS:] if is_short else []

    @property
    def are_too_many(self) -> bool:
        """Whether something that is still there must be what ends instances."""
        return len(self._seats) == MAX_SHORT_TERMS

    def is_to_blame(self, seat: int) -> bool:
        """Whether it is this seat: its machine may be ill."""
        return self._seats[-MAX_OF_ONE_SEAT:] == [seat] * MAX_OF_ONE_SEAT
