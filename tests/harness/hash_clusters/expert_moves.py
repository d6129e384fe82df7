"""Experts of hash clusters: slots that are filled step by step, and changes that a seed draws."""

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random

from control_plane.coordinator.flights.expert_changes import ExpertChanges
from control_plane.coordinator.members.expert_moves import Change
from data_plane.moe.expert_tables import ExpertSlots
from harness.transports.random_tables import named_slots
from nanocp.values.experts import MAX_REPLICAS, ExpertTable


class HashSlots(ExpertSlots):
    """The slots of one instance. A row at a wrong one gets the output of another expert."""

    def __init__(self, instance: int, num_layers: int, seed: int) -> None:
        self._instance, self._layers = instance, range(num_layers)
        self._random = Random(seed)
        self.wake = lambda: None
        self.num_slots = 0
        self._held: list[list[int]] = []
        """By layer the expert in each slot; -1: none, or one that is half there."""
        self._pairs: list[list[int]] = []
        self._fill: tuple[int, list[tuple[int, int, int]]] | None = None
        """What is loaded: the number of a table, and each (layer, slot, expert)."""
        self.failure_share = 0.0
        """How often a load fails."""

    def place(self, table: ExpertTable) -> None:
        self._held = [[-1] * table.num_slots for _ in self._layers]
        for layer, slot, expert in self._lacking(table):
            self._held[layer][slot] = expert
        self.follow(table)
        self._pairs = [[0] * table.num_slots for _ in self._layers]

    def follow(self, table: ExpertTable) -> None:
        self.num_slots = table.num_slots
        self.names = [named_slots(table, layer) for layer in self._layers]

    def _lacking(self, table: ExpertTable) -> list[tuple[int, int, int]]:
        return [
            (layer, slot, expert)
            for layer in self._layers
            for slot, expert in table.at(self._instance, layer).items()
            if self._held[layer][slot] != expert
        ]

    def fill(self, number: int, table: ExpertTable) -> None:
        self._fill = number, self._lacking(table)

    def filled(self) -> tuple[int, str] | None:
        """Load nothing, a part or all; a slot that is half written holds nothing."""
        if self._fill is None:
            return None
        number, lacking = self._fill
        for _ in range(self._random.choice([0, 1, 3, 99])):
            if not lacking:
                self._fill = None
                return number, ""
            layer, slot, expert = lacking[-1]
            if self._held[layer][slot] >= 0:
                self._held[layer][slot] = -1
            else:
                self._held[layer][slot] = expert
                lacking.pop()
        if self._random.random() < self.failure_share:
            self._fill = None
            return number, "the file is gone"
        return None

    def stop(self) -> None:
        self._fill = None

    def loads(self) -> tuple[bytes, ...]:
        pairs = tuple(array("q", layer).tobytes() for layer in self._pairs)
        self._pairs = [[0] * len(layer) for layer in self._pairs]
        return pairs

    def held(self) -> tuple[bytes, ...]:
        return tuple(array("h", layer).tobytes() for layer in self._held)

    def visit(self, layer: int, number: int) -> int:
        """The expert in a slot that a row names; -1: it has come elsewhere, or to no expert."""
        slot = number - self._instance * self.num_slots
        if not 0 <= slot < self.num_slots:
            return -1
        self._pairs[layer][slot] += 1
        return self._held[layer][slot]


class RandomMoves:
    """Changes that a seed draws, in place of a balancer's: any that leave each expert somewhere."""

    def __init__(self, num_slots: int, seed: int) -> None:
        self._random, self.num_slots = Random(seed), num_slots
        self.imbalances: list[float] = []
        self._left = 0
        self._table: Sequence[Sequence[int]] = ()
        self.num_pairs = 0

    def use(self, number: int, table: Sequence[Sequence[int]], seats: Sequence[int]) -> None:
        """See ExpertMoves."""
        self._table, self._seats = table, seats
        for layer in table:
            assert {*range(max(layer) + 1)} == {*layer} - {-1}, "each expert is in some slot"

    def report(self, number: int, window: int, seat: int, pairs: Sequence[Sequence[float]]) -> None:
        """See ExpertMoves."""
        self.num_pairs += int(sum(map(sum, pairs)))

    def plan(self) -> Iterator[None]:
        """See ExpertMoves."""
        self._left = self._random.choice([0, 1, 1, 3])
        yield from [None] * self._random.choice([0, 1, 5])

    def changes(self) -> list[Change]:
        """See ExpertMoves."""
        if not self._left:
            return []
        self._left -= 1
        found = []
        for layer, experts in enumerate(self._table):
            counts = Counter(experts)
            num_experts = max(experts) + 1
            places = [
                seat * self.num_slots + slot
                for seat in self._seats
                for slot in range(self.num_slots)
            ]
            for number in self._random.sample(places, self._random.randrange(len(places) + 1)):
                if experts[number] >= 0 and counts[experts[number]] == 1:
                    continue
                counts[experts[number]] -= 1
                new = self._random.choice([-1, self._random.randrange(num_experts)])
                if new >= 0 and counts[new] < MAX_REPLICAS:
                    found.append(Change(layer, number, new))
                elif experts[number] >= 0:
                    found.append(Change(layer, number, -1))
        return found


class Outcomes:
    """Counts changes of tables, in place of metrics."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def reported(self, imbalances: Sequence[float]) -> None:
        """See ExpertMetrics."""

    def load_began(self) -> None:
        """See ExpertMetrics."""

    def changed(self, outcome: str, num_experts: int) -> None:
        """See ExpertMetrics."""
        self._counts[f"moves_{outcome}"] += 1
        self._counts["experts_moved"] += num_experts


def move_at_random(changes: ExpertChanges, seed: int, counts: Counter[str]) -> None:
    """Let a seed change the table; a failed load is tried again soon. counts: of outcomes."""
    changes.moves = RandomMoves(changes.moves.num_slots, seed)
    changes.is_on, changes.rest, changes.metrics = True, 3, Outcomes(counts)
