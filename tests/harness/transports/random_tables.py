"""Expert tables that no controller would make, and where rows go by them."""

import random
from collections import defaultdict
from types import SimpleNamespace

from nanocp.values.experts import ExpertTable, num_slots


def random_table(num_experts, num_instances, seed, num_slots=0, num_layers=1):
    """Every expert is in some slot, and some in many, in each layer another way; slots are left.

    num_slots: of an instance; 0: three more than it needs.
    """
    rng = random.Random(seed)
    num_slots = num_slots or -(-num_experts // num_instances) + 3
    num_free = num_slots * num_instances - num_experts
    layers = []
    for _ in range(num_layers):
        often = rng.choices(range(num_experts), k=1 + num_free // 4)
        held = [*range(num_experts), *rng.choices([*often, -1], k=num_free)]
        layers.append(rng.sample(held, len(held)))
    return ExpertTable.of(num_slots, *layers)


def table_of(model, cluster, seed):
    """A random table of all MoE layers, in the slots of this cluster."""
    total = model.num_experts
    slots = num_slots(total, cluster.num_instances, cluster.redundant_experts)
    num_layers = model.num_stored_layers - model.num_dense_layers
    return random_table(total, cluster.num_instances, seed, slots, num_layers)


def numbers_of(table, num_experts, device="cpu"):
    """A sender's table of one layer: SlotNames.of."""
    from data_plane.moe.mixture import SlotNames

    return SlotNames(table, [SimpleNamespace(moe=True)], num_experts, device).of(0)


def named_slots(table, layer):
    """What says the slot of (expert, row and seat): a slow reference of SlotNames."""
    numbers = defaultdict(list)
    for number, expert in enumerate(table.experts(layer)):
        numbers[expert].append(number)
    return lambda expert, row: numbers[expert][row % len(numbers[expert])]
