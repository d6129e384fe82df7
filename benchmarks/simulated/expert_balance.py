"""How evenly instances share experts' loads: today's table, EPLB's, and the balancer's.

Enters: rows that draw 8 of 256 experts without replacement, by a popularity. Leaves: for each load,
size and table the hottest instance over the mean in the long run and in a step, the experts that
it loads, and which claims hold. Does not know: a service, nor how long a load takes.

EPLB is written from DeepSeek's description: groups to nodes, replicas to the largest shares,
replicas to instances, each the heaviest to the lightest that has room.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.kit.bench import BenchRun, Claim, at_most, bench
from control_plane.coordinator.members.expert_moves import (
    ExpertMoves,
    Held,
    LayerPlacement,
    placed_anew,
)
from nanocp.simulator.loads.expert_loads import expert_shares
from nanocp.values.experts import home_experts

E, K, ROWS = 256, 8, 64
SIZES = ((32, 9), (256, 2), (256, 3))
"""Instances, and slots of each in a layer."""
KINDS = (("lognormal", 1.2), ("lognormal", 0.5), ("zipf", 1.1))
SEEDS = range(16)
"""A layer each."""
GROUPS, NODES = 8, 4
PAIRS = 1e9

Shares = Sequence[float]


def packed(weights: Sequence[float], num_packs: int) -> list[list[int]]:
    """Items by pack, as many in each: the heaviest first, to the lightest pack with room."""
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    sums, most = [0.0] * num_packs, len(weights) // num_packs
    for item in sorted(range(len(weights)), key=lambda each: -weights[each]):
        open_packs = (each for each in range(num_packs) if len(packs[each]) < most)
        pack = min(open_packs, key=sums.__getitem__)
        packs[pack].append(item)
        sums[pack] += weights[item]
    return packs


def replicated(weights: Sequence[float], num: int) -> list[int]:
    """The item of each of `num` replicas: one of each, then of the largest share."""
    items, counts = list(range(len(weights))), [1] * len(weights)
    while len(items) < num:
        item = max(range(len(weights)), key=lambda each: weights[each] / counts[each])
        counts[item] += 1
        items.append(item)
    return items


def eplb(shares: Shares, num_instances: int, num_slots: int, groups: int, nodes: int) -> Held:
    """EPLB's table; it may have an expert twice on an instance. groups, nodes 1: global."""
    size = len(shares) // groups
    group_loads = [sum(shares[each * size : (each + 1) * size]) for each in range(groups)]
    held: Held = []
    for node in packed(group_loads, nodes):
        experts = [each for g in node for each in range(g * size, (g + 1) * size)]
        replicas = replicated([shares[e] for e in experts], num_instances * num_slots // nodes)
        counts = [replicas.count(each) for each in range(len(experts))]
        loads = [shares[experts[each]] / counts[each] for each in replicas]
        for pack in packed(loads, num_instances // nodes):
            held.append([experts[replicas[each]] for each in pack])
    return held


def home(num_instances: int, num_slots: int) -> list[int]:
    """Today's table: the expert of each slot's number."""
    homes = [home_experts(E, each, num_instances) for each in range(num_instances)]
    return [each for own in homes for each in (*own, *[-1] * (num_slots - len(own)))]


def by_instance(table: Sequence[int], num_slots: int) -> Held:
    """The experts of each instance."""
    starts = range(0, len(table), num_slots)
    return [[each for each in table[at : at + num_slots] if each >= 0] for at in starts]


def anew(shares: Shares, num_instances: int, num_slots: int) -> Held:
    """Our table without one before."""
    steps = placed_anew(shares, [[] for _ in range(num_instances)], num_slots, 10**6)
    return finished(steps).held


def finished(steps: Iterator[None]) -> LayerPlacement:
    """What a plan's steps lead to."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            placement: LayerPlacement = end.value
            return placement


def moved(shares: Shares, num_instances: int, num_slots: int) -> tuple[Held, dict[str, float]]:
    """Our table after one plan from today's, a change an instance; turns, loads and times."""
    table, moves = home(num_instances, num_slots), ExpertMoves(len(shares), num_slots, 1.1, 1)
    moves.use(0, [table], range(num_instances))
    for seat, own in enumerate(by_instance(table, num_slots)):
        moves.report(0, 0, seat, [[PAIRS * shares[each] for each in own]])
    steps_s = []
    plan, is_over = moves.plan(), False
    gc.disable()  # it would count what the tables of EPLB left
    while not is_over:
        began_s = time.thread_time()
        is_over = next(plan, 0) == 0
        steps_s.append(time.thread_time() - began_s)
    gc.enable()
    turns = num_loads = 0
    while changes := moves.changes():
        for change in changes:
            num_loads += change.expert >= 0
            table[change.number] = change.expert
        turns += 1
        moves.use(turns, [table], range(num_instances))
    about = {"plan_ms": 1e3 * sum(steps_s), "step_ms": 1e3 * max(steps_s)}
    return by_instance(table, num_slots), about | {"turns": turns, "loads": num_loads}


def rows_of(shares: Shares, num_rows: int, seed: int) -> Any:
    """[num_rows, K] experts: each comes at a random time, by its popularity, and K win."""
    random = np.random.default_rng(seed)
    popular = -np.log1p(-np.minimum(shares, 1 - 1e-12))
    times = random.exponential(size=(num_rows, len(shares))) / popular
    return np.argpartition(times, K, axis=1)[:, :K]


def in_a_step(held: Held, rows: Any) -> float:
    """The hottest over the mean of these rows: row r of instance s takes replica r + s."""
    num_instances = len(held)
    places: list[list[int]] = [[] for _ in range(E)]
    for at, experts in enumerate(held):
        for expert in experts:
            places[expert].append(at)
    counts = np.zeros(num_instances)
    for number, experts in enumerate(rows):
        turn = number % ROWS + number // ROWS
        for expert in experts:
            counts[places[expert][turn % len(places[expert])]] += 1
    return float(counts.max() / counts.mean())


def in_the_long_run(shares: Shares, held: Held) -> float:
    """The hottest over the mean, of equal replicas."""
    copies = np.bincount([each for experts in held for each in experts], minlength=E)
    loads = [sum(shares[each] / int(copies[each]) for each in experts) for experts in held]
    return max(loads) / fmean(loads)


def num_new(held: Held, before: Held) -> int:
    """Experts to load, at best: instances keep their numbers."""
    return sum(len(now) - len({*now} & {*own}) for now, own in zip(held, before, strict=True))


TABLES: dict[str, Callable[[Shares, int, int], Held]] = {
    "today's": lambda shares, num, slots: by_instance(home(num, slots), slots),
    "EPLB hierarchical": lambda shares, num, slots: eplb(shares, num, slots, GROUPS, NODES),
    "EPLB global": lambda shares, num, slots: eplb(shares, num, slots, 1, 1),
    "ours, anew": anew,
}
MOVED = "ours, one change an instance"


def measured(kind: tuple[str, float], num: int, slots: int, seeds: range) -> list[dict[str, Any]]:
    """A row for each table."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in (*TABLES, MOVED)}
    for seed in seeds:
        shares = expert_shares(*kind, E, K, seed)
        rows = rows_of(shares, num * ROWS, seed)
        before = by_instance(home(num, slots), slots)
        tables = {name: table(shares, num, slots) for name, table in TABLES.items()}
        tables[MOVED], about = moved(shares, num, slots)
        for name, held in tables.items():
            numbers = {"long_run": in_the_long_run(shares, held), "a_step": in_a_step(held, rows)}
            numbers |= {"loads": num_new(held, before)} | (about if name == MOVED else {})
            found[name].append(numbers)
    return [
        {"load": f"{kind[0]}:{kind[1]}", "instances": num, "slots": slots, "table": name}
        | {key: fmean(layer[key] for layer in layers) for key in layers[0]}
        | {"worst_layer": max(layer["long_run"] for layer in layers)}
        for name, layers in found.items()
    ]


def claims(results: Sequence[dict[str, Any]]) -> Iterator[Claim]:
    """Those of issue 55."""
    by_case: dict[tuple[str, int, int], dict[str, dict[str, Any]]] = {}
    for one in results:
        key = (one["load"], one["instances"], one["slots"])
        by_case.setdefault(key, {})[one["table"]] = one
    for (load, num, slots), rows in by_case.items():
        case = f"{load}, {num} instances with {slots} slots"
        theirs, ours, ours_moved = rows["EPLB global"], rows["ours, anew"], rows[MOVED]
        over = ours["long_run"] / theirs["long_run"]
        yield at_most(f"{case}: ours anew over EPLB's", over, 1.01)
        if num == 32:
            over = ours_moved["long_run"] / theirs["long_run"]
            bound = 1.15 if load.startswith("zipf") else 1.10
            yield at_most(f"{case}: ours from today's over EPLB's", over, bound)
            over = ours_moved["loads"] / theirs["loads"]
            yield at_most(f"{case}: its loads over EPLB's", over, 0.15)
    for (num, slots), bound in {(32, 9): 1.02, (256, 2): 1.17}.items():
        ours = by_case["lognormal:1.2", num, slots]["ours, anew"]
        what = f"lognormal:1.2, {num} instances with {slots} slots: ours anew"
        yield at_most(what, ours["long_run"], bound)


@bench("Two layers of each case; it judges nothing.")
def main(run: BenchRun) -> None:
    """Place each load by each table."""
    cases = [(kind, *size) for size in SIZES for kind in KINDS]
    for case in run.track(cases, "placing"):
        run.keep(*measured(*case, SEEDS[:2] if run.is_quick else SEEDS))
    formats = {"table": "", "long_run": ".3f", "worst_layer": ".3f", "a_step": ".3f"}
    formats |= {"loads": ".0f", "turns": ".1f", "plan_ms": ".1f", "step_ms": ".2f"}
    for size in SIZES:
        rows = [each for each in run.results if (each["instances"], each["slots"]) == size]
        run.table(f"{size[0]} instances, {size[1]} slots", rows, load="", **formats)
    run.judge(claims(run.results), run.too_quick)


if __name__ == "__main__":
    main()
