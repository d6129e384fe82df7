"""A dense model's layer as a graph of operations, with tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nanocp.overlap.interference import COMPUTE, MEMORY, NETWORK, RESOURCES
from nanocp.overlap.operations import Operation, without_empty
from nanocp.overlap.roofline import DenseModel, Machine, Requests, demands

NANO_BATCHING_COST = 0.132
"""Share of dense operations' time (Figure 9, ablation)."""


def dense_layer(us: Mapping[str, float], resources: Mapping[str, str]) -> tuple[Operation, ...]:
    """One layer of an iteration, from the microseconds of each line of Table 2.

    resources: of lines not bound by compute. Each further nano-operation repeats
    NANO_BATCHING_COST of a dense operation's time, all of a memory-bound one's.
    """

    def dense(name: str, *needs: str) -> Operation:
        resource = resources.get(name, COMPUTE)
        cost = 1.0 if resource == MEMORY else NANO_BATCHING_COST
        before = ("all-reduce",) if name == "KQV" else ()
        return Operation(name, resource, us[name], cost * us[name], needs, before)

    def network(name: str, share: float, *needs: str) -> Operation:
        return Operation(name, NETWORK, share * us["Net"], 0.0, needs)

    return without_empty(
        (
            dense("KQV"),
            Operation("DecAttn", MEMORY, us["DecAttn"], 0.0, ("KQV",)),
            Operation("PfAttn", COMPUTE, us["PfAttn"], 0.0, ("KQV",)),
            # An all-reduce moves twice what an all-gather does.
            network("all-gather-1", 0.25, "DecAttn", "PfAttn"),
            dense("O", "all-gather-1"),
            network("all-gather-2", 0.25, "O"),
            dense("UG", "all-gather-2"),
            dense("D", "UG"),
            network("all-reduce", 0.5, "D"),
        )
    )


def collective_forms(layer: Sequence[Operation]) -> list[Sequence[Operation]]:
    """The layer, and with an all-reduce for both all-gathers: O's weights are cut by rows."""
    named = {operation.name: operation for operation in layer}
    if "all-gather-1" not in named:
        return [layer]
    first, second = named.pop("all-gather-1"), named["all-gather-2"]
    named["all-gather-2"] = replace(second, name="all-reduce-1", us=first.us + second.us)
    named["O"] = replace(named["O"], needs=first.needs)
    named["UG"] = replace(named["UG"], needs=("all-reduce-1",))
    return [layer, tuple(named.values())]


def roofline_layer(
    machine: Machine, model: DenseModel, requests: Requests, batch: int
) -> tuple[Operation, ...]:
    """One layer whose operations take the roofline time of their resource."""
    us, resources = {}, {}
    for demand in demands(model, requests, batch, machine.num_gpus):
        ms = machine.times(demand)
        us[demand.name] = 1e3 * max(ms) / model.num_layers
        resources[demand.name] = RESOURCES[ms.index(max(ms))]
    return dense_layer(us, resources)
