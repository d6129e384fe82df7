"""Experts follow a skewed load: how soon, how even, and what it costs the streams.

Enters: a checkpoint, and the same with a gate whose bias sends most rows to one of four instances;
a service of four real instances for each, without Ray. Leaves: imbalance over time, tokens a
second in turns, gaps of streams. Does not know: how a change is planned or carried out.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any, Literal

from safetensors.torch import load_file, save_file

from benchmarks.kit.bench import BenchRun, Claim, at_least, at_most, bench
from benchmarks.kit.service import checkpoint_of, in_process, random_prompts
from nanocp.client import AsyncClient
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.service import ServiceConfig
from nanocp.config.whole import Config
from nanocp.serve.service import Service
from nanocp.values.members import ExpertLoad

NUM_INSTANCES, NUM_STREAMS = 4, 32
SKEW = 2.5
"""The hottest instance over the mean, of the biased gate."""
BIAS = {"tiny": 0.3, "small": 0.2}
"""Added to a gate's choice of the first instance's experts: by trial, so that SKEW comes of it."""
EVEN, SETTLED_S = 1.10, 60.0
AFTER_S = 0.2
"""Gaps of streams so soon after windows name another table are laid to the change."""
MIN_RATIO = 0.95
CONFIG = Config(
    cluster=ClusterConfig(
        num_instances=NUM_INSTANCES,
        num_frames=256,
        max_model_len=2048,
        redundant_experts=1,
        expert_load_mb_per_s=8,
        bounds=BoundsConfig(max_rows=16, max_attention_rows=32),
    ),
    service=ServiceConfig(grpc_port=0, metrics_port=0, http_port=0),
)


@bench("Shorter turns, tiny: about a minute and a half.")
def main(
    run: BenchRun,
    preset: Annotated[Literal["tiny", "small"], "Which model."] = "small",
    bias: Annotated[float, "Of the first instance's experts; by default the preset's."] = 0.0,
) -> None:
    """Load both services in turns."""
    preset = "tiny" if run.is_quick else preset
    even = checkpoint_of(preset)
    skewed = biased_checkpoint(even, bias or BIAS[preset])
    result = measured(even, skewed, 5.0 if run.is_quick else 15.0)
    result |= {"preset": preset, "bias": bias or BIAS[preset]}
    run.facts(result)
    run.keep(result)
    run.judge(claims_of(result, run.is_quick))


def biased_checkpoint(path: Path, bias: float) -> Path:
    """A copy of a checkpoint whose gates prefer the first instance's experts."""
    skewed = path.with_name(f"{path.name}-biased")
    shutil.rmtree(skewed, ignore_errors=True)
    shutil.copytree(path, skewed)
    num_experts = json.loads((path / "config.json").read_text())["n_routed_experts"]
    for file in skewed.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith("e_score_correction_bias"):
                tensor[: num_experts // NUM_INSTANCES] += bias
        save_file(tensors, file, metadata={"format": "pt"})
    return skewed


@dataclass(slots=True)
class Watched:
    """A service, the loads that its instances report, and its streams' tokens."""

    service: Service
    loads: list[tuple[float, int, int, list[list[int]]]] = field(default_factory=list)
    """(time, window, instance, pairs by layer and slot) of each report."""
    marks_s: list[float] = field(default_factory=list)
    loading_s: list[list[float]] = field(default_factory=list)
    arrivals_s: list[list[float]] = field(default_factory=list)
    """Times of each stream's tokens."""

    def watch(self) -> None:
        """Note reports and changes, on the controller's thread."""
        changes: Any = self.service._controller._flights.experts
        reported, sent, load, use = changes.reported, changes.sent, changes._load, changes._use

        def noted(report: Any) -> None:
            if isinstance(report, ExpertLoad):
                pairs = [list(array("q", layer)) for layer in report.pairs]
                self.loads.append((time.monotonic(), report.window, report.instance, pairs))
            reported(report)

        def noted_sent(window: int) -> int:
            number = sent(window)
            if number != noted_sent.number:  # type: ignore[attr-defined]
                self.marks_s.append(time.monotonic())
                noted_sent.number = number  # type: ignore[attr-defined]
            return int(number)

        def noted_load() -> None:
            self.loading_s.append([time.monotonic()] * 2)
            load()

        def noted_use() -> None:
            self.loading_s[-1][1] = time.monotonic()
            use()

        noted_sent.number = 0  # type: ignore[attr-defined]
        changes.reported, changes.sent = noted, noted_sent
        changes._load, changes._use = noted_load, noted_use

    def imbalance(self, begin_s: float, end_s: float) -> float:
        """The hottest instance over the mean, the mean of layers, of reports in this time."""
        layers: dict[int, list[float]] = {}
        for at_s, _, instance, pairs in self.loads:
            if begin_s <= at_s < end_s:
                for layer, counts in enumerate(pairs):
                    sums = layers.setdefault(layer, [0.0] * NUM_INSTANCES)
                    sums[instance] += sum(counts)
        return mean(max(each) * NUM_INSTANCES / sum(each) for each in layers.values())


async def _stream(watched: Watched, client: AsyncClient, prompt: Sequence[int]) -> None:
    """Decode a prompt again and again."""
    while True:
        arrivals: list[float] = []
        watched.arrivals_s.append(arrivals)
        chunks = client.generate(prompt, max_tokens=1024, temperature=0.0, ignore_eos=True)
        async for chunk in chunks:
            arrivals += [time.monotonic()] * len(chunk.token_ids)


async def load(watched: Watched, prompts: Sequence[Sequence[int]], seconds: float) -> list[float]:
    """Keep a stream of each prompt running; returns [begin, end] of the time in which all ran."""
    first = len(watched.arrivals_s)
    async with AsyncClient(watched.service.address) as client:
        tasks = [asyncio.create_task(_stream(watched, client, prompt)) for prompt in prompts]
        while sum(len(each) > 4 for each in watched.arrivals_s[first:]) < len(prompts):
            await asyncio.sleep(0.05)
        begin_s = time.monotonic()
        await asyncio.sleep(seconds)
        end_s = time.monotonic()
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
    return [begin_s, end_s]


def tokens_per_s(watched: Watched, times: Sequence[Sequence[float]]) -> float:
    """Tokens of all streams a second, in these times."""
    arrivals = [at_s for stream in watched.arrivals_s for at_s in stream]
    num = sum(begin_s <= at_s < end_s for begin_s, end_s in times for at_s in arrivals)
    return num / max(sum(end_s - begin_s for begin_s, end_s in times), 1e-9)


def gaps(watched: Watched, begin_s: float, end_s: float) -> list[tuple[float, float]]:
    """(time, seconds since the token before) of each token in this time."""
    return [
        (now, now - before)
        for stream in watched.arrivals_s
        for before, now in pairwise(stream)
        if begin_s <= before and now < end_s and now > before
    ]


def measured(even: Path, skewed: Path, seconds: float) -> dict[str, Any]:
    """Let experts move until they rest, then load both services in turns."""
    with ExitStack() as stack:
        services = {
            path: Watched(stack.enter_context(in_process(CONFIG, path))[0])
            for path in (even, skewed)
        }
        for watched in services.values():
            watched.watch()
        prompts = random_prompts(even, NUM_STREAMS, 48)
        moving = services[skewed]
        begin_s, end_s = asyncio.run(load(moving, prompts, SETTLED_S))
        turns: dict[Path, list[list[float]]] = {even: [], skewed: []}
        for path in (even, skewed, skewed, even, even, skewed):
            turns[path].append(asyncio.run(load(services[path], prompts, seconds)))
    first_s = min(moving.marks_s, default=end_s)
    late_s = end_s - SETTLED_S / 3
    loading = [each for each in moving.loading_s if begin_s <= each[0] < each[1] <= end_s]
    beside = [[a, b] for (_, a), (b, _) in pairwise([[0.0, begin_s], *loading, [end_s, 0.0]])]
    in_time = gaps(moving, begin_s, end_s)
    changing = [[at_s, at_s + AFTER_S] for at_s in moving.marks_s] + loading
    by_changes = [gap for at_s, gap in in_time if is_in(at_s - gap, at_s, changing)]
    others = [gap for at_s, gap in in_time if not is_in(at_s - gap, at_s, changing)]
    middle = median(gap for _, gap in in_time)
    reports = [window for at_s, window, *_ in moving.loads if late_s <= at_s < end_s]
    return {
        "imbalance_before": round(moving.imbalance(0.0, first_s), 3),
        "imbalance_late": round(moving.imbalance(late_s, end_s), 3),
        "windows_late": max(reports) - min(reports),
        "imbalance_after": round(moving.imbalance(end_s, turns[skewed][-1][1]), 3),
        "marks": len(moving.marks_s),
        "marks_of_even": len(services[even].marks_s),
        "loads": len(loading),
        "loading_s": round(sum(end - begin for begin, end in loading), 2),
        "tokens_per_s": {
            "even": round(tokens_per_s(services[even], turns[even]), 1),
            "biased": round(tokens_per_s(moving, turns[skewed]), 1),
            "while_loading": round(tokens_per_s(moving, loading), 1),
            "beside": round(tokens_per_s(moving, beside), 1),
        },
        "gap_ms_p50": round(1e3 * middle, 2),
        "gap_ms_max": round(1e3 * max(others), 2),
        "gap_ms_max_by_changes": round(1e3 * max(by_changes, default=0.0), 2),
        "gaps_over_twice": round(mean(gap > 2 * middle for gap in others), 5),
        "gaps_over_twice_by_changes": round(mean(gap > 2 * middle for gap in by_changes), 5),
    }


def is_in(begin_s: float, end_s: float, times: Sequence[Sequence[float]]) -> bool:
    """Whether a time meets one of others."""
    return any(begin_s < end and begin < end_s for begin, end in times)


def claims_of(result: dict[str, Any], is_quick: bool) -> Iterator[Claim]:
    """What is claimed of moves."""
    too_short = "a quick run" if is_quick else ""
    yield at_least("the gate is biased by {}", result["imbalance_before"], 0.8 * SKEW)
    yield at_most("in the last 20 s of a minute {} of the mean", result["imbalance_late"], EVEN)
    yield at_most("then {} of the mean", result["imbalance_after"], EVEN)
    rates = result["tokens_per_s"]
    ratio = round(rates["biased"] / rates["even"], 3)
    yield at_least("{} of the even gate's tokens", ratio, MIN_RATIO).unless(too_short)
    loading = round(rates["while_loading"] / rates["beside"], 3)
    yield at_least("{} of the tokens while experts load", loading, MIN_RATIO).unless(too_short)


if __name__ == "__main__":
    main()
