"""Short terms: losses that follow each other so soon that something new must be what kills.

Enters: reports of windows, losses. Leaves: whether to give up. Does not know: members, requests.
"""

from __future__ import annotations

_SHORT_TERM = 10
"""A loss before so many windows ends a short term."""
MAX_SHORT_TERMS = 3
"""So many of them may follow each other."""


class ShortTerms:
    """How many windows this term has run, and how many short terms came before."""

    def __init__(self) -> None:
        self._num_reports = 0
        self._num_short = 0

    def began(self) -> None:
        """A term begins."""
        self._num_reports = 0

    def reported(self) -> None:
        """One instance has run one window."""
        self._num_reports += 1

    def lost(self, num_seats: int, has_windows: bool) -> bool:
        """An instance of the term was lost; returns whether too many short terms have followed.

        num_seats: of the term. has_windows: whether a window is in flight. The loss of a member
        that did nothing says nothing.
        """
        num_windows = self._num_reports // num_seats
        is_short = num_windows < _SHORT_TERM and (num_windows > 0 or has_windows)
        self._num_short = self._num_short + 1 if is_short else 0
        return self._num_short == MAX_SHORT_TERMS
