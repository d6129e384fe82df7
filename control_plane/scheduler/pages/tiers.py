"""The slots of one tier of one instance, in the order in which they are given up."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple


class OwnPage(NamedTuple):
    """A page of a preempted request alone: its last partial one, or one of its state."""

    request_id: int
    ticket: int
    """Ticket of its copy: pages of two copies do not belong together."""
    page: int


Key = bytes | OwnPage
"""A full page's key is its hash."""


class TakenSlot(NamedTuple):
    """A slot to be filled."""

    slot: int
    page: Key | None
    """The page that was in it, if there was one."""


class Tier:
    """Slots from `first_slot` on. Each is free, has a page, or is being filled."""

    def __init__(self, first_slot: int, num_slots: int) -> None:
        self.free = list(range(first_slot + num_slots - 1, first_slot - 1, -1))
        """The last is taken first."""
        self.kept: dict[Key, int] = {}
        """Slot of each page, the least recently used first."""

    def take(self, pinned: Container[Key]) -> TakenSlot | None:
        """Take a free slot, or the least recently used one; None if all are in use."""
        if self.free:
            return TakenSlot(self.free.pop(), None)
        for key in self.kept:
            if key not in pinned:
                return TakenSlot(self.kept.pop(key), key)
        return None
