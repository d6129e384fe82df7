"""Capacity planning: the smallest cluster that sustains a load within the SLO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from nanocp.simulator.costs.cluster_file import ClusterFile
from nanocp.simulator.outcome import Outcome, Recorder
from nanocp.simulator.trial import Trial

_MAX_INSTANCES = 1024


@dataclass(frozen=True, slots=True)
class Tried:
    """One size."""

    num_instances: int
    num_frames: int
    """0 if the model does not fit."""
    outcome: Outcome | None
    why_not: str
    """Empty: it was simulated."""

    @property
    def is_enough(self) -> bool:
        """Whether it sustains the load."""
        return self.outcome is not None and self.outcome.is_sustained


@dataclass(frozen=True, slots=True)
class Sizing:
    """The sizes tried, smallest first."""

    tried: tuple[Tried, ...]

    @property
    def answer(self) -> Tried | None:
        """The smallest size that is enough."""
        return next((one for one in self.tried if one.is_enough), None)


def sizes(file: ClusterFile) -> Sequence[int]:
    """Whole nodes, no more instances than experts, ascending."""
    node = file.cluster.instances_per_node
    most = min(file.model.num_experts or _MAX_INSTANCES, _MAX_INSTANCES)
    return range(node, most + 1, node)


def size(trial: Trial, on_size: Callable[[int], None] | None = None) -> Sizing:
    """The smallest cluster that sustains the trial's load; on_size gets each size tried.

    Doubles, then bisects, as if capacity grew with size. Raises ValueError for a cluster file
    without a memory section.
    """
    if trial.file.memory is None:
        raise ValueError("the cluster file has no memory section, so it has one size only")
    tried: list[Tried] = []

    def is_enough(num_instances: int) -> bool:
        if on_size is not None:
            on_size(num_instances)
        try:
            file = trial.file.of_size(num_instances)
        except ValueError as error:
            tried.append(Tried(num_instances, 0, None, str(error)))
            return False
        here = replace(trial, file=file).filled()
        tried.append(
            Tried(num_instances, file.cluster.num_frames, here.play(Recorder(here.run)), "")
        )
        return tried[-1].is_enough

    possible = sizes(trial.file)
    too_few, enough = 0, min(1, len(possible))  # numbers of nodes
    while enough > too_few and not is_enough(possible[enough - 1]):
        too_few, enough = enough, min(2 * enough, len(possible))
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if is_enough(possible[middle - 1]):
            enough = middle
        else:
            too_few = middle
    return Sizing(tuple(sorted(tried, key=attrgetter("num_instances"))))
