"""Capacity planning: the smallest cluster that sustains a load within the SLO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nanocp.simulator.costs.cluster_file import ClusterFile
from nanocp.simulator.trial import Trial

_MAX_INSTANCES = 1024


def sizes(file: ClusterFile) -> Sequence[int]:
    """Whole nodes, no more instances than experts, ascending."""
    node = file.cluster.instances_per_node
    most = min(file.model.num_experts or _MAX_INSTANCES, _MAX_INSTANCES)
    return range(node, most + 1, node)


def size(trial: Trial) -> int | None:
    """Instances of the smallest cluster that sustains the trial's load; None: no number does.

    Doubles, then bisects, as if capacity grew with size. Raises ValueError for a cluster file
    without a memory section.
    """
    if trial.file.memory is None:
        raise ValueError("the cluster file has no memory section, so it has one size only")

    def is_enough(num_instances: int) -> bool:
        try:
            file = trial.file.of_size(num_instances)
        except ValueError:
            return False  # the model does not fit
        return replace(trial, file=file).filled().play().is_sustained

    possible = sizes(trial.file)
    too_few, enough = 0, min(1, len(possible))  # numbers of nodes
    while enough > too_few and not is_enough(possible[enough - 1]):
        too_few, enough = enough, min(2 * enough, len(possible))
    if enough == too_few:
        return None
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if is_enough(possible[middle - 1]):
            enough = middle
        else:
            too_few = middle
    return possible[enough - 1]
