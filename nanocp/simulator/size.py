"""How many instances a load needs: the smallest cluster that sustains it within the SLO.

Enters: a trial at the rate of the load. Leaves: what was tried, and for the answer its headroom,
its memory and what one request of a million tokens does there. Does not know: prices, pictures.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from nanocp.simulator.cluster_file import ClusterFile
from nanocp.simulator.outcome import Outcome
from nanocp.simulator.reports.timeline import TimelineRecorder
from nanocp.simulator.sweep import Sweep, sweep
from nanocp.simulator.trial import Trial
from nanocp.simulator.workload_request import WorkloadRequest

LONG_PROMPT, LONG_OUTPUT = 1_000_000, 500
_MAX_INSTANCES = 1024


@dataclass(frozen=True, slots=True)
class Tried:
    """One size."""

    num_instances: int
    num_frames: int
    """Frames of each instance; 0 if the model does not fit."""
    outcome: Outcome | None
    why_not: str
    """Why it was not simulated. Empty: it was."""

    @property
    def is_enough(self) -> bool:
        """Whether it sustains the load."""
        return self.outcome is not None and self.outcome.is_sustained


@dataclass(frozen=True, slots=True)
class Guest:
    """One request of a million tokens that arrives while the load runs."""

    prompt_len: int
    cp_degree: int
    ttft_ms: float | None
    """None: it has no token when the run ends."""
    tpot_ms: float | None
    """None: it has not ended when the run does."""
    others: Outcome
    """The whole run, the guest among the judged."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """What was tried, smallest first, and what is known of the answer."""

    tried: tuple[Tried, ...]
    timeline: TimelineRecorder | None
    """TimelineRecorder of the answer's run. None: no size is enough."""
    most: Sweep | None
    """The rate that the answer sustains, to 10%."""
    guest: Guest | None
    """None: no size is enough, or the model is too short for the prompt."""

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

    Sizes are doubled until one is enough, and what lies between is halved: a cluster larger than
    one that is enough is taken to be enough too. Raises ValueError for a cluster file without a
    memory section.
    """
    if trial.file.memory is None:
        raise ValueError("the cluster file has no memory section, so it has one size only")
    tried: list[Tried] = []
    answer: tuple[Trial, TimelineRecorder] | None = None

    def is_enough(num_instances: int) -> bool:
        nonlocal answer
        if on_size is not None:
            on_size(num_instances)
        try:
            file = trial.file.of_size(num_instances)
        except ValueError as error:
            tried.append(Tried(num_instances, 0, None, str(error)))
            return False
        here = replace(trial, file=file).filled()
        timeline = TimelineRecorder(here.run)
        outcome = here.play(timeline)
        tried.append(Tried(num_instances, file.cluster.num_frames, outcome, ""))
        if outcome.is_sustained:
            answer = here, timeline
        return outcome.is_sustained

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
    tried.sort(key=attrgetter("num_instances"))
    if answer is None:
        return Sizing(tuple(tried), None, None, None)
    here, timeline = answer
    most = sweep(replace(trial, file=here.file), precision=1.1, num_seeds=1)
    return Sizing(tuple(tried), timeline, most, _guest(here))


def _guest(trial: Trial) -> Guest | None:
    """Play the load once more, with a long request that arrives after the warm-up."""
    if trial.file.cluster.max_model_len < LONG_PROMPT + LONG_OUTPUT:
        return None
    request = WorkloadRequest(trial.warm_up_us, LONG_PROMPT, LONG_OUTPUT, LONG_OUTPUT)
    timeline = TimelineRecorder(trial.run)
    arrivals = heapq.merge(trial.requests(), iter([request]), key=attrgetter("arrival_us"))
    outcome = trial.simulation(timeline).run(arrivals)
    times = next(one for one in timeline.requests.values() if one.request is request)
    first_us, ended_us = times.first_token_us, times.ended_us
    return Guest(
        prompt_len=LONG_PROMPT,
        cp_degree=times.cp_degree,
        ttft_ms=None if first_us is None else (first_us - request.arrival_us) / 1e3,
        tpot_ms=None
        if first_us is None or ended_us is None
        else (ended_us - first_us) / (LONG_OUTPUT - 1) / 1e3,
        others=outcome,
    )
