"""The term: it ends, perhaps with losses, and the next one begins."""

from __future__ import annotations

from nanocp.values.plan import InstanceLost, TermEnded


class SchedulerTerm:
    """Between two terms nothing is planned."""

    def __init__(self) -> None:
        self.is_over = False
        self.lost_seats: set[int] = set()
        """Instances, or stages, that were lost in the term that ended."""

    def lose(self, event: InstanceLost) -> None:
        """End the term by a loss."""
        self.lost_seats.add(event.instance)
        self.is_over = True

    def end(self, event: TermEnded) -> None:
        """End the term; its instances may be the next one's."""
        self.is_over = True

    def begin(self) -> None:
        """Begin the next term."""
        self.lost_seats.clear()
        self.is_over = False
