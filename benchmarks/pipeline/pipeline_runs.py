"""Runs of the pipeline's figures: which there are, and how one is played.

Enters: a plan. Leaves: runs with their outcomes. Does not know: what is claimed of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from random import Random
from typing import Any

from benchmarks.kit.machine import ROOT
from benchmarks.pipeline.forming import making
from control_plane.scheduler.pipeline.layer_policies import LayerPolicy, Split
from control_plane.scheduler.pipeline.predictor import PassTimes
from nanocp.simulator.loads.workload import Workload
from nanocp.simulator.loads.workload_request import WorkloadRequest
from nanocp.simulator.outcome import Slo
from nanocp.simulator.pipeline.outcome import PipelineOutcome
from nanocp.simulator.pipeline.pipeline_file import load_pipeline_file
from nanocp.simulator.pipeline.simulation import SPREAD, PipelineSimulation, PipelineTrial

AZURE = f"azure:{ROOT / 'benchmarks/traces/azure_2023_conv_200.csv'}"
WORKLOADS = {"ShareGPT": "sharegpt", "Azure": AZURE}
MODELS = {"14B": "a100x4-qwen2.5-14b", "32B": "a100x4-qwen2.5-32b"}
# The paper's Table 2 is a picture: these are ours.
SLOS = {"14B": Slo(100_000, 2_000_000), "32B": Slo(200_000, 4_000_000)}
STATICS = {
    "14B": ("even", "static:12,12,13,11", "static:12,13,13,10", "static:13,13,13,9"),
    "32B": ("even", "static:16,17,17,14", "static:17,17,17,13", "static:17,17,18,12"),
}
"""Layouts with k = 0, 1, 2, ... layers less in the last stage: their index is k."""
OUTPUTS = (1, 64, 512)
"""Output lengths of Figure 5; its prompts have 512 tokens."""
WINDOWS = (1, 25, 100, 100_000)
"""Windows of Figure 6; the last one never lets a layer move."""
TCP = {"link_gb_per_s": 1.0, "hop_us": 300.0}
"""Between processes of a host by TCP on loopback; assumed."""


@dataclass(frozen=True)
class PipelineRun:
    """One run; the rate is in requests a second."""

    model: str
    workload: str
    rate: float
    policy: str = "level"
    passes: str = "ours"
    window: int = 25
    seconds: float = 60.0
    links: str = ""
    control: str = ""


@dataclass(frozen=True)
class PlannedRuns:
    """Which runs there are, by their place in the figures, and how long, in simulated seconds."""

    rates: dict[tuple[str, str], tuple[float, ...]]
    workloads: dict[str, str]
    """Workloads by what the claims call them."""
    seconds: float
    long_seconds: float
    """Length of the pair of runs at the highest rate of 14B on ShareGPT."""

    def at(self, model: str, workload: str, rate: float, policy: str, **options: Any) -> Any:
        """A run of a workload."""
        name = self.workloads.get(workload, workload)
        return PipelineRun(model, name, rate, policy, seconds=self.seconds, **options)

    def near(self, model: str) -> tuple[str, str, float]:
        """Where policies are compared on ShareGPT: the rate in the middle."""
        rates = self.rates[model, "ShareGPT"]
        return model, "ShareGPT", rates[len(rates) // 2]

    def output(self, tokens: int, policy: str) -> PipelineRun:
        """A run of Figure 5, at about 0.8 of what 14B sustains."""
        rate = 0.8 / (512 / 28_000 + tokens / 7_500)
        return self.at("14B", f"fixed:512:{tokens}", round(rate, 1), policy)

    def long(self, policy: str, passes: str) -> PipelineRun:
        """A long run at the highest rate."""
        rate = self.rates["14B", "ShareGPT"][-1]
        run = self.at("14B", "ShareGPT", rate, policy, passes=passes)
        return replace(run, seconds=self.long_seconds)

    def controls(self) -> dict[str, PipelineRun]:
        """Runs in which something is taken away."""
        near = self.near("14B")
        controls = {
            name: self.at(*near, "level", control=name) for name in ("greedy", "shuffled", "free")
        }
        controls["free"] = replace(controls["free"], window=1)
        for policy in ("level", "even", "fluid"):
            controls[f"one {policy}"] = self.at("14B", "fixed:200:20", 5.0, policy, control="one")
        return controls

    def tasks(self) -> Iterator[PipelineRun]:
        """Every run; some are asked for by more than one claim."""
        for (model, workload), rates in self.rates.items():
            for rate in rates:
                yield self.at(model, workload, rate, "even", passes="gllm")
                yield self.at(model, workload, rate, "level")
        for model in MODELS:
            for policy in (*STATICS[model], "delta", "fluid"):
                yield self.at(*self.near(model), policy)
        for passes in ("vllm", "sarathi", "no_mixing"):
            yield self.at(*self.near("14B"), "even", passes=passes)
        yield from (self.at(*self.near("14B"), policy) for policy in SPREAD)
        for tokens in OUTPUTS:
            yield from (self.output(tokens, policy) for policy in (*STATICS["14B"], "level"))
        # The window is the paper's rule: `level` sums what a layout saves.
        yield from (self.at(*self.near("32B"), "delta", window=window) for window in WINDOWS)
        yield self.at(*self.near("14B"), "even", passes="gllm", links="tcp")
        yield self.at(*self.near("14B"), "level", links="tcp")
        yield self.long("even", "gllm")
        yield self.long("level", "ours")
        yield from self.controls().values()


FULL = PlannedRuns(
    {
        ("14B", "ShareGPT"): (55.0, 64.0, 74.0),
        ("14B", "Azure"): (11.0, 14.0, 17.0),
        ("32B", "ShareGPT"): (24.0, 30.0, 36.0),
        ("32B", "Azure"): (5.5, 7.5, 9.5),
    },
    WORKLOADS,
    12.0,
    30.0,
)
QUICK = PlannedRuns(
    {key: rates[1:2] for key, rates in FULL.rates.items()},
    dict.fromkeys(WORKLOADS, "fixed:300:15"),
    0.3,
    0.3,
)


def play(task: PipelineRun) -> tuple[PipelineRun, PipelineOutcome]:
    """Run it. A quarter of the time is warm-up."""
    file = load_pipeline_file(MODELS[task.model])
    costs = file.costs_of("fitted")
    if task.links == "tcp":
        costs = replace(costs, **TCP)
    if task.control == "greedy":
        costs = replace(costs, sampled_us=0.0, sampling_us=45.0)
    file = replace(file, costs={"fitted": costs})
    if task.control == "one":
        file = replace(file, num_stages=1, memory=replace(file.memory, hbm_gb=160.0))
    trial = PipelineTrial(
        file,
        task.policy,
        make_rows=making(task.passes),
        layout_window=task.window,
        moves_are_free=task.control == "free",
        warm_up_us=round(task.seconds * 0.25e6),
        slo=SLOS[task.model],
    )
    workload = Workload(task.workload, task.rate, seed=1)

    def is_in_time(request: WorkloadRequest) -> bool:
        return request.arrival_us < task.seconds * 1e6

    simulation = PipelineSimulation(trial)
    if task.control == "shuffled":
        layouts = simulation.scheduler.layouts
        layouts._policy = Shuffled(layouts._policy)
    requests = workload.requests(file.max_model_len)
    return task, simulation.run(takewhile(is_in_time, requests))


class Shuffled:
    """A layer policy that gets the predictions of other passes than the one it is asked about."""

    def __init__(self, policy: LayerPolicy) -> None:
        self._policy = policy
        self._random = Random(0)
        self._seen: list[PassTimes] = []

    def wish(self, split: Split, times: PassTimes, number: int, num_frames: int) -> Split:
        """See LayerPolicy."""
        self._seen.append(times)
        layer, sample = self._random.choice(self._seen), self._random.choice(self._seen)
        # A layer's time and that of sampling are of two passes, and one in two is turned round.
        mixed = PassTimes(layer.layer_us, sample.sample_us)
        if self._random.random() < 0.5:
            mixed = PassTimes(mixed.sample_us or mixed.layer_us, mixed.layer_us)
        return self._policy.wish(split, mixed, number, num_frames)
