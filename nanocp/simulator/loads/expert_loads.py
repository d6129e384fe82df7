"""How unevenly rows choose experts: by a distribution of popularity, or as a service counted it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import expm1
from pathlib import Path
from random import Random
from statistics import fmean

from control_plane.coordinator.members.expert_moves import ExpertMoves
from nanocp.simulator.costs.cluster_file import ModelShape
from nanocp.values.experts import home_experts, home_table

_NUM_DRAWN = 16
"""Layers that are drawn; a number is the mean of theirs."""
_KINDS = ("lognormal", "zipf")


def expert_shares(
    kind: str, size: float, num_experts: int, per_token: int, seed: int
) -> list[float]:
    """The probability that a row chooses each expert; their sum is per_token.

    kind, size: lognormal and the deviation of the logarithm, or zipf and the exponent. Experts are
    chosen by a race: each comes at a random time, by its popularity, and the first per_token win.
    """
    random = Random(seed)
    popular = [number**-size for number in range(1, num_experts + 1)]
    if kind == "lognormal":
        popular = [random.lognormvariate(0, size) for _ in popular]
    random.shuffle(popular)
    low, high = 0.0, 1e9 / max(popular)
    for _ in range(200):
        end = (low + high) / 2
        is_early = -sum(expm1(-end * each) for each in popular) < per_token
        low, high = (end, high) if is_early else (low, end)
    return [-expm1(-low * each) for each in popular]


def home_imbalance(shares: Sequence[float], num_instances: int) -> float:
    """Pairs of the busiest instance over the mean, while all experts are at home."""
    homes = (home_experts(len(shares), at, num_instances) for at in range(num_instances))
    return max(sum(shares[each] for each in home) for home in homes) * num_instances / sum(shares)


def expert_imbalance(text: str, model: ModelShape, num_instances: int) -> float:
    """Pairs of the busiest instance over the mean, on average of the MoE layers.

    text: lognormal:DEVIATION, zipf:EXPONENT, or a JSON file of `nanocp experts --json`. It has, for
    each MoE layer (also one that drafts), the pairs of each instance, and of each expert (loads):
    these count for another number of instances, with experts at home. Raises ValueError, naming the
    field.
    """
    if not model.num_experts:
        raise ValueError(f"experts is {text}; this model has none")
    kind, _, number = text.partition(":")
    if kind in _KINDS:
        try:
            size = float(number)
        except ValueError:
            size = -1.0
        if not 0 <= size <= 4:
            raise ValueError(f"experts is {text}; after {kind}: comes a number from 0 to 4")
        shape = (model.num_experts, model.experts_per_token)
        drawn = (expert_shares(kind, size, *shape, seed) for seed in range(_NUM_DRAWN))
        return fmean(home_imbalance(layer, num_instances) for layer in drawn)
    try:
        found = json.loads(Path(text).read_text())
        numbers = found["pairs"], found["loads"]
        pairs, loads = ([[float(each) for each in layer] for layer in one] for one in numbers)
        found_shape = (found["num_experts"], len(pairs), len(loads))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"experts: {text} is no file of `nanocp experts --json` (num_experts, pairs and loads "
            f"by MoE layer), nor lognormal:1.2 or zipf:1.1: {error}"
        ) from error
    num = model.num_moe_layers
    mine = [(model.num_experts, each, each) for each in (num, num + 1)]
    if found_shape not in mine or {len(layer) for layer in loads} != {model.num_experts}:
        raise ValueError(
            f"experts: {text} has (experts, MoE layers of pairs, of loads) {found_shape}; "
            f"simulated are {mine[0]}"
        )
    if (low := min(min(layer, default=0) for layer in pairs + loads)) < 0:
        raise ValueError(f"experts: {text} has pairs below zero ({low:g})")
    if {len(layer) for layer in pairs} == {num_instances}:
        uneven = [max(layer) * num_instances / sum(layer) for layer in pairs if any(layer)]
    else:
        uneven = [home_imbalance(layer, num_instances) for layer in loads if any(layer)]
    return fmean(uneven or [1.0])


def with_a_slot_more(num_experts: int, per_token: int, num_instances: int) -> tuple[float, float]:
    """The imbalance of lognormal:1.2 at home, and by one plan with a redundant slot."""
    homes = [home_experts(num_experts, seat, num_instances) for seat in range(num_instances)]
    table = home_table(num_experts, num_instances, 1)
    moves = ExpertMoves(num_experts, table.num_slots, 1.1, 1)
    moves.use(0, [table.experts()] * _NUM_DRAWN, range(num_instances))
    layers = [
        expert_shares("lognormal", 1.2, num_experts, per_token, seed) for seed in range(_NUM_DRAWN)
    ]
    for seat, home in enumerate(homes):
        moves.report(0, 0, seat, [[1e9 * layer[each] for each in home] for layer in layers])
    any(moves.plan())
    before = fmean(moves.placement(layer).imbalance for layer in range(_NUM_DRAWN))
    return before, fmean(moves.planned(layer).imbalance for layer in range(_NUM_DRAWN))
