"""The expert table: which expert each slot holds, for each layer.

A slot's number is seat * slots of a seat + slot. Redundant slots hold replicas, and the experts of
seats that do not serve.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

MAX_REPLICAS = 63
"""Slots of one expert that rows of a layer visit evenly."""


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """The experts of all slots."""

    num_slots: int
    """Slots of each seat in a layer."""
    layers: tuple[bytes, ...]
    """For each MoE layer the expert in each number, int16; -1: none. One: all layers have it."""

    @classmethod
    def of(cls, num_slots: int, *layers: Sequence[int]) -> ExpertTable:
        """The table of these experts, for each layer in each number."""
        return cls(num_slots, tuple(array("h", layer).tobytes() for layer in layers))

    def experts(self, layer: int = 0) -> Sequence[int]:
        """The expert in each number of a layer."""
        return array("h", self.layers[layer if len(self.layers) > 1 else 0])

    def at(self, seat: int, layer: int = 0) -> dict[int, int]:
        """slot -> expert of a seat."""
        held = self.experts(layer)[seat * self.num_slots : (seat + 1) * self.num_slots]
        return {slot: expert for slot, expert in enumerate(held) if expert >= 0}


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


def home_table(num_experts: int, num_seats: int, redundant: int = 0) -> ExpertTable:
    """The table while all seats serve: shares in slots 0, 1, ..."""
    return place_experts(num_experts, num_seats, redundant, range(num_seats))


def place_experts(
    num_experts: int,
    num_seats: int,
    redundant: int,
    serving: Collection[int],
    before: ExpertTable | None = None,
) -> ExpertTable:
    """Place every expert on seats that serve, in each layer of the table `before`.

    What such a seat holds stays; one that holds nothing gets its home experts, which move there if
    they are in one other place. An expert that is nowhere takes a slot of the seat with most free
    ones, else that of a replica. Raises ValueError if slots are too few.
    """
    total = num_slots(num_experts, num_seats, redundant)
    needed = fewest_seats(num_experts, num_seats, redundant)
    if len(serving) < needed:
        raise ValueError(
            f"{len(serving)} instances have {len(serving) * total} slots for {num_experts} experts "
            f"in each layer; at least {needed} instances must serve, or more slots be redundant "
            "(cluster.redundant_experts)"
        )
    layers = range(len(before.layers)) if before else ()
    old = [before.experts(layer) for layer in layers] if before else [[-1] * total * num_seats]
    homes = {seat: home_experts(num_experts, seat, num_seats) for seat in serving}
    return ExpertTable.of(total, *(_placed(each, total, num_experts, homes) for each in old))


def _placed(
    before: Sequence[int], total: int, num_experts: int, homes: dict[int, range]
) -> list[int]:
    """Place the experts of one layer. homes: of the seats that serve."""
    held = [expert if at // total in homes else -1 for at, expert in enumerate(before)]
    replicas = Counter(held)
    for seat, home in homes.items():
        first = seat * total
        if any(expert >= 0 for expert in held[first : first + total]):
            continue
        for number, expert in enumerate(home, first):
            if replicas[expert] == 1:
                held[held.index(expert)] = -1
            else:
                replicas[expert] += 1
            held[number] = expert
    for expert in (each for each in range(num_experts) if not replicas[each]):
        free = {seat: held[seat * total : (seat + 1) * total].count(-1) for seat in homes}
        seat = max(homes, key=lambda each: (free[each], -each))
        number = seat * total
        if free[seat]:
            number = held.index(-1, number)
        else:
            most = max(range(num_experts), key=lambda each: (replicas[each], -each))
            replicas[most] -= 1
            number = held.index(most)
        held[number] = expert
        replicas[expert] = 1
    return held
