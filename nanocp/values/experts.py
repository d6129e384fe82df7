"""The expert table: each expert's seat and slot, the same in every layer.

Redundant slots take the experts of seats that do not serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """The place of each expert."""

    seats: tuple[int, ...]
    """The seat of each expert."""
    slots: tuple[int, ...]
    """Each expert's slot at its seat."""

    def at(self, seat: int) -> dict[int, int]:
        """slot -> expert of a seat."""
        pairs = enumerate(zip(self.seats, self.slots, strict=True))
        return {slot: expert for expert, (where, slot) in pairs if where == seat}


def home_experts(num_experts: int, seat: int, num_seats: int) -> range:
    """Experts of a seat while all serve; shares differ by at most 1."""
    first, end = (-(-each * num_experts // num_seats) for each in (seat, seat + 1))
    return range(first, end)


def num_slots(num_experts: int, num_seats: int, redundant: int) -> int:
    """Slots of each seat in a layer: the largest share, and redundant ones."""
    return -(-num_experts // num_seats) + redundant


def fewest_seats(num_experts: int, num_seats: int, redundant: int) -> int:
    """Fewest serving seats with a slot for every expert; at least 1."""
    return max(1, -(-num_experts // max(1, num_slots(num_experts, num_seats, redundant))))


def home_table(num_experts: int, num_seats: int) -> ExpertTable:
    """The table while all seats serve: shares in slots 0, 1, ..."""
    return place_experts(num_experts, num_seats, 0, range(num_seats))


def place_experts(
    num_experts: int,
    num_seats: int,
    redundant: int,
    serving: Sequence[int],
    before: ExpertTable | None = None,
) -> ExpertTable:
    """Place every expert on seats that serve.

    It keeps its own slot, else its place `before`, if that seat serves; otherwise it goes to the
    seat with most free slots. Raises ValueError, with a sufficient number, if slots are too few.
    """
    total = num_slots(num_experts, num_seats, redundant)
    needed = fewest_seats(num_experts, num_seats, redundant)
    if len(serving) < needed:
        raise ValueError(
            f"{len(serving)} instances have {len(serving) * total} slots for {num_experts} experts "
            f"in each layer; at least {needed} instances must serve, or more slots be redundant "
            "(cluster.redundant_experts)"
        )
    seats, slots = [-1] * num_experts, [-1] * num_experts
    free: dict[int, list[int]] = {}
    for seat in serving:
        own = home_experts(num_experts, seat, num_seats)
        free[seat] = list(range(len(own), total))
        for slot, expert in enumerate(own):
            seats[expert], slots[expert] = seat, slot
    homeless = [expert for expert, seat in enumerate(seats) if seat < 0]
    if before is not None:
        for expert in homeless:
            seat, slot = before.seats[expert], before.slots[expert]
            if slot in free.get(seat, ()):
                free[seat].remove(slot)
                seats[expert], slots[expert] = seat, slot
    for expert in homeless:
        if seats[expert] < 0:
            seat = max(free, key=lambda each: (len(free[each]), -each))
            seats[expert], slots[expert] = seat, free[seat].pop(0)
    return ExpertTable(tuple(seats), tuple(slots))
