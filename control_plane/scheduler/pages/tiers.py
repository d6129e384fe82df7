"""The slots of one tier of one instance, and which of them is given up first.

Enters: pages that are kept and used, how many slots there are. Leaves: slots. Does not know: what a
page is, who copies it.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple


class OwnPage(NamedTuple):
    """A page that a preempted request has alone: its last one if not full, or one of its state."""

    request_id: int
    ticket: int
    """That under which it was stowed: pages of two copies do not belong together."""
    page: int


Key = bytes | OwnPage
"""A full page has its hash."""


class TakenSlot(NamedTuple):
    """A slot to be filled."""

    slot: int
    page: Key | None
    """The page that was in it, if there was one."""


class Tier:
    """Slots from `first_slot` on. Each is free, has a page, or was taken to be filled."""

    def __init__(self, first_slot: int, num_slots: int) -> None:
        self.free = list(range(first_slot + num_slots - 1, first_slot - 1, -1))
        """The last is taken first."""
        self.kept: dict[Key, int] = {}
        """Slot of each page, the least recently used first."""

    def take(self, pinned: Container[Key]) -> TakenSlot | None:
        """A free slot, or that of the page used least recently; None if all are in use."""
        if self.free:
            return TakenSlot(self.free.pop(), None)
        for key in self.kept:
            if key not in pinned:
                return TakenSlot(self.kept.pop(key), key)
        return None
