"""The balancer of experts: reports of loads come in, changes of slots come out.

A value without clock, thread or chance; it plans in small steps, between two windows.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from heapq import heapify, heapreplace, nlargest, nsmallest
from itertools import chain, product
from math import inf, sqrt
from operator import add
from typing import NamedTuple

from nanocp.values.experts import MAX_REPLICAS

MAX_TRIALS = 120
"""Candidates that a step of a plan tries at most, in less than 1 ms."""
HALVED_EVERY = 1000
"""Windows after which the loads before them count half."""
_EVEN, _LEAST_GAIN = 1.02, 5e-4
_DEVIATIONS = 5
"""Chance puts one of 256 even instances so high in one layer of 10,000."""
_HEAVIEST, _COLDEST, _OTHERS = 4, (2, 6), 2
"""The hottest instance's experts, instances for them, and experts there that a step tries."""

Held = list[list[int]]
"""The experts of each instance in one layer, all different."""
Table = Sequence[Sequence[int]]
"""For each layer the expert in each slot's number (seat * slots of a seat + slot); -1: none."""


class Change(NamedTuple):
    """An expert that is to be loaded into a slot; -1: rows leave the slot, nothing is loaded."""

    layer: int
    number: int
    expert: int


_Way = tuple[float, float, int, int, int, bool]
"""(most load that it leaves where it changes one, experts to load, an expert of the hottest
instance, a cold one that gets it, what leaves that for it (-1: none), whether the hottest gives it
away and gets that)."""


class LayerPlacement:
    """The experts of one layer, and the load of each instance. Replicas share evenly."""

    def __init__(
        self, loads: Sequence[float], held: Held, num_slots: int, one_lends: bool = False
    ) -> None:
        """loads: of each expert. held: at most num_slots each.

        one_lends: a slot of either instance does for an exchange; several may need both.
        """
        self._loads, self._num_slots = loads, num_slots
        self._lent = min if one_lends else add
        self.held = [[*experts] for experts in held]
        self._holders: list[list[int]] = [[] for _ in loads]
        for at, experts in enumerate(held):
            for expert in experts:
                self._holders[expert].append(at)
        self.instance_loads = [sum(map(self._share, experts)) for experts in held]
        lend = {at for holders in self._holders for at in holders[1:]}
        self._price = [
            0 if len(experts) < num_slots else 1 if at in lend else inf
            for at, experts in enumerate(held)
        ]
        """Replicas that lend their slot until an expert has left; inf: there is none."""

    @property
    def imbalance(self) -> float:
        """The load of the hottest instance over the mean; 1 without loads."""
        total = sum(self.instance_loads)
        return max(self.instance_loads) * len(self.held) / total if total > 0 else 1.0

    def lowered(self, budget: float, coldest: int) -> Generator[None, None, LayerPlacement]:
        """Lower the hottest instance, change by change; returns itself.

        budget: experts to load at most. coldest: instances that a step tries.
        """
        loads = self.instance_loads
        while self.imbalance > _EVEN:
            hot = max(range(len(loads)), key=loads.__getitem__)
            ways = (way for way in self._ways(hot, coldest) if way[1] <= budget)
            way = min(ways, default=None)
            if way is None or way[0] > loads[hot] * (1 - _LEAST_GAIN):
                break
            _, cost, expert, cold, other, gives = way
            for at in (cold, hot) if gives else (cold,):
                for each in (expert, other) if other >= 0 else (expert,):
                    self._toggle(each, at)
            budget -= cost
            yield
        return self

    def _share(self, expert: int) -> float:
        return self._loads[expert] / len(self._holders[expert])

    def _ways(self, hot: int, coldest: int) -> Iterator[_Way]:
        loads, share_of = self.instance_loads, self._share
        colds = nsmallest(coldest, range(len(loads)), key=loads.__getitem__)
        for expert in nlargest(_HEAVIEST, self.held[hot], key=share_of):
            share, num = share_of(expert), len(self._holders[expert])
            relief = share / (num + 1)
            for cold in (each for each in colds if expert not in self.held[each]):
                here = self.held[cold]
                most = max(loads[hot] - relief, loads[cold] + share - relief)
                room = [-1] if len(here) < self._num_slots else []
                replicas = (each for each in here if len(self._holders[each]) > 1)
                spare = room or nsmallest(_OTHERS, replicas, key=share_of)
                for other in spare if num < MAX_REPLICAS else ():
                    rest = [at for at in self._holders[other] if at != cold] if other >= 0 else []
                    then = [
                        loads[at]
                        - relief * (at in self._holders[expert])
                        + share_of(other) / len(rest)
                        for at in rest
                    ]
                    yield max([most, *then]), 1, expert, cold, other, False
                best = share - (loads[hot] - loads[cold]) / 2
                own = (each for each in here if each not in self.held[hot])
                near = nsmallest(_OTHERS, own, key=lambda each: abs(share_of(each) - best))
                for other in room + near:
                    more = share - (share_of(other) if other >= 0 else 0.0)
                    most = max(loads[hot] - more, loads[cold] + more)
                    lent = self._lent(self._price[hot], self._price[cold])
                    cost = 2 + lent if other >= 0 else 1
                    yield most, cost, expert, cold, other, True

    def _toggle(self, expert: int, at: int) -> None:
        holders = self._holders[expert]
        for holder in holders:
            self.instance_loads[holder] -= self._share(expert)
        for members, each in ((holders, at), (self.held[at], expert)):
            (members.remove if each in members else members.append)(each)
        for holder in holders:
            self.instance_loads[holder] += self._share(expert)


def placed_anew(
    loads: Sequence[float], held: Held, num_slots: int, budget: int
) -> Generator[None, None, LayerPlacement]:
    """Place all but one replica of each expert: the largest shares at the emptiest instances.

    loads, held, num_slots: see LayerPlacement. budget: replicas beyond the first, at most.
    """
    kept = {expert: at for at, experts in enumerate(held) for expert in experts}
    copies, most = [1] * len(loads), min(MAX_REPLICAS, len(held))
    shares = [(-load, expert) for expert, load in enumerate(loads)]
    heapify(shares)
    for _ in range(min(budget, len(held) * num_slots - len(loads))):
        share, expert = shares[0]
        copies[expert] += share < 0
        share = -loads[expert] / copies[expert] if copies[expert] < most else 0.0
        heapreplace(shares, (share, expert))
        yield
    now: Held = [[] for _ in held]
    for expert, at in kept.items():
        now[at].append(expert)
    each_gets = [load / num for load, num in zip(loads, copies, strict=True)]
    emptiest = sorted((sum(each_gets[each] for each in now[at]), at) for at in range(len(now)))
    for expert in sorted(range(len(loads)), key=each_gets.__getitem__, reverse=True):
        for _ in range(copies[expert] - (expert in kept)):
            free = (n for n, (_, at) in enumerate(emptiest) if expert not in now[at])
            if (place := next(free, None)) is not None:
                load, at = emptiest.pop(place)
                now[at].append(expert)
                if len(now[at]) < num_slots:
                    insort(emptiest, (load + each_gets[expert], at))
            yield
    return LayerPlacement(loads, now, num_slots)


class ExpertMoves:
    """The loads of all experts, and a plan of changes."""

    def __init__(
        self, num_experts: int, num_slots: int, start_above: float, changes_per_round: int
    ) -> None:
        """num_slots, changes_per_round: of an instance in a layer; with 0 a plan only looks.

        start_above: a layer's hottest instance over the mean, above which a plan changes it.
        """
        self._num_experts, self.num_slots = num_experts, num_slots
        self._start_above, self._changes_per_round = start_above, changes_per_round
        self._number, self._seats, self._age = -1, list[int](), 0
        self._table: Table = ()
        self._sums: list[list[float]] = []
        """For each layer the pairs of each expert."""
        self._planned: dict[int, Held] = {}
        self.imbalances: list[float] = []
        """By layer the load of the hottest instance over the mean, when last planned."""

    def use(self, number: int, table: Table, seats: Sequence[int]) -> None:
        """Take the table that rows follow from now on. Other seats end a plan."""
        if list(seats) != self._seats:
            self._planned.clear()
        self._number, self._table, self._seats = number, table, list(seats)
        self._sums = self._sums or [[0.0] * self._num_experts for _ in table]

    def report(self, number: int, window: int, seat: int, pairs: Sequence[Sequence[float]]) -> None:
        """Add an instance's pairs by layer and slot; those of another table are dropped.

        window: the present one.
        """
        if number != self._number:
            return
        age, first = window // HALVED_EVERY, seat * self.num_slots
        part, self._age = 0.5 ** (age - self._age), age
        for sums, experts, counts in zip(self._sums, self._table, pairs, strict=True):
            sums[:] = [part * each for each in sums] if part < 1 else sums
            for expert, count in zip(experts[first:], counts, strict=False):
                sums[expert] += count if expert >= 0 else 0

    def loads(self, layer: int) -> list[float]:
        """The pairs of each expert of a layer, lately."""
        return [*self._sums[layer]]

    def placement(self, layer: int) -> LayerPlacement:
        """The experts of a layer where they are, with the loads so far."""
        return LayerPlacement(self.loads(layer), self._held(self._table[layer]), self.num_slots)

    def planned(self, layer: int) -> LayerPlacement:
        """The experts of a layer once the plan is carried out."""
        held = self._planned.get(layer) or self._held(self._table[layer])
        return LayerPlacement(self._sums[layer], held, self.num_slots)

    def _held(self, experts: Sequence[int]) -> Held:
        num = self.num_slots
        slots = (experts[seat * num : (seat + 1) * num] for seat in self._seats)
        return [[each for each in held if each >= 0] for held in slots]

    def plan(self) -> Iterator[None]:
        """Plan changes of layers that are more uneven than chance explains, in small steps.

        Another table ends it.
        """
        self._planned.clear()
        number = self._number
        for _ in self._steps():
            yield
            if number != self._number:
                return

    def _steps(self) -> Iterator[None]:
        budget = self._changes_per_round * len(self._seats)
        self.imbalances = self.imbalances or [1.0] * len(self._table)
        for layer, experts in enumerate(self._table):
            best, held, loads = self.placement(layer), self._held(experts), [*self._sums[layer]]
            self.imbalances[layer] = best.imbalance
            noise = _DEVIATIONS * sqrt(len(held) / max(1.0, sum(loads)))
            if budget and best.imbalance > max(self._start_above, 1 + noise):
                yield
                slots = self.num_slots
                ways = (
                    LayerPlacement(loads, held, slots, one_lends).lowered(budget, coldest)
                    for one_lends, coldest in product((False, True), _COLDEST)
                )
                for way in chain(ways, [placed_anew(loads, held, slots, budget)]):
                    found = yield from way
                    yield
                    is_better = found.imbalance < best.imbalance
                    if is_better and (yield from self._leads_to(found.held, experts, budget)):
                        best, self._planned[layer] = found, found.held
                    if best.imbalance <= self._start_above:
                        break
            yield

    def _leads_to(
        self, planned: Held, experts: Sequence[int], budget: int
    ) -> Generator[None, None, bool]:
        """Whether changes within the budget end there: slots may be too few to exchange experts."""
        before, experts = list[int](), [*experts]
        while before != experts:
            before = [*experts]
            for number, expert in self._next(planned, before):
                experts[number] = expert
                budget -= expert >= 0
                yield
        ends = zip(self._held(experts), planned, strict=True)
        return budget >= 0 and all({*here} == {*wanted} for here, wanted in ends)

    def changes(self) -> list[Change]:
        """The next changes of the plan; empty once it is carried out.

        They leave each expert in a slot that they do not write. Then call `use`, and ask again.
        """
        return [
            Change(layer, *change)
            for layer, held in self._planned.items()
            for change in self._next(held, self._table[layer])
        ]

    def _next(self, planned: Held, experts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The next (number, expert) of a layer that has these experts."""
        num, present = self.num_slots, self._held(experts)
        both = [*zip(self._seats, present, planned, strict=True)]
        left = Counter(each for here in present for each in here)
        stay = Counter(each for _, here, wanted in both for each in here if each in wanted)
        for seat, here, wanted in both:
            # First experts that leave all seats which hold them: their slots are needed.
            missing = sorted({*wanted} - {*here}, key=lambda each: (stay[each], each), reverse=True)
            numbers = range(seat * num, (seat + 1) * num)
            for number in sorted(numbers, key=lambda each: (experts[each] in wanted, each)):
                old = experts[number]
                lends = missing and not stay[missing[-1]] and stay[old] > 1
                if missing if old < 0 else lends if old in wanted else left[old] > 1:
                    left[old] -= 1
                    stay[old] -= old in wanted
                    yield number, missing.pop() if missing else -1
