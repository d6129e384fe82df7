"""A pipeline on CPUs: its predictor, layers that move and their price, stages as a prefill.

    python benchmarks/pipeline_cpu.py [--quick] [--only PART ...] [--json PATH]

Enters: nothing; checkpoints are drawn. Leaves: a table of what is asked and what was found, as
ratios within this run; exit status 1 if a claim does not hold. A quick run (preset tiny, few
passes) judges nothing. Does not know: how layers move.

Parts `predictor` and `layouts` run all stages in one thread, and count processor time: how long
passes take is that of a pipeline whose stages have a core each. Parts `prefill` and `link` are real
services, timed by their clients, and need a core for each stage; `link` needs root (gigabit.py).
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Annotated

import typer
from gigabit import gigabit_nodes, tokens_per_s, why_not
from machine import describe, write_results
from rich.console import Console
from rich.table import Table

from control_plane.launchers.processes import ProcessLauncher
from control_plane.scheduler.pipeline.predictor import predict_pass
from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.profiling.stages import PassTime, makespan_us
from nanocp.client import Client
from nanocp.config import (
    ClusterConfig,
    Config,
    LimitsConfig,
    PassesConfig,
    PrefillConfig,
    SchedulerConfig,
    ServiceConfig,
)
from nanocp.passes import PassCosts
from nanocp.plan import PAGE_SIZE
from nanocp.profile.pipeline import GREEDY, LoadPhase, PipelinePlay, Played, errors, mixes
from nanocp.sampling import SamplingParams
from nanocp.serve.service import Service, member_environment, open_checkpoint
from nanocp.simulator.pipeline.fit import MeasuredPass, fit_costs

PARTS = ("predictor", "layouts", "prefill", "link")
NUM_LAYERS, NUM_EXPERTS, PER_TOKEN = 12, {"tiny": 16, "small": 32}, 4
BIG_VOCABULARY, SMALL_VOCABULARY = {"tiny": 32_768, "small": 129_280}, 4_096
KINDS = {
    "drawn": SamplingParams(temperature=1.0, seed=1),
    "nucleus": SamplingParams(temperature=1.0, top_p=0.9, seed=1),
    "controls": replace(GREEDY, repetition_penalty=1.2, frequency_penalty=0.2),
}


@dataclass(frozen=True, slots=True)
class StageClaim:
    """A row of the table."""

    claim: str
    asked: str
    found: str
    holds: bool | None
    """None: this run does not judge it."""


# --- the predictor


def part_predictor(
    checkpoint: Path, greedy: Sequence[MeasuredPass], preset: str, is_quick: bool
) -> list[StageClaim]:
    """Errors on held-out passes, and how long a prediction takes."""
    claims, num_experts = [], NUM_EXPERTS[preset]
    kinds = {} if is_quick else KINDS
    for kind, params in {"greedy": GREEDY, **kinds}.items():
        passes = greedy if kind == "greedy" else mixes(checkpoint, params)
        found = errors(passes, num_experts, PER_TOKEN)
        layer, sampling = found["ours"]
        if kind == "greedy":
            paper, _ = found["paper"]
            claims.append(
                StageClaim(
                    "layer, held-out passes: mean error",
                    "<= 7%, <= 0.35 of the paper's form",
                    f"{layer:.1%}, {layer / paper:.2f} of {paper:.1%}",
                    None if is_quick else layer <= 0.07 and layer <= 0.35 * paper,
                )
            )
            costs = fit_costs("ours", passes, num_experts, PER_TOKEN)
            begin = time.perf_counter()
            for each in passes:
                predict_pass(each.spans, costs)
            us = 1e6 * (time.perf_counter() - begin) / len(passes)
            holds = None if is_quick else us <= 20
            claims.append(StageClaim("a prediction, mean", "<= 20 us", f"{us:.1f} us", holds))
        holds = None if is_quick else sampling <= 0.05
        claims.append(
            StageClaim(f"sampling, {kind}: mean error", "<= 5%", f"{sampling:.1%}", holds)
        )
    return claims


# --- layouts


class Layouts:
    """Layers that move against layers that do not, on one checkpoint."""

    def __init__(self, checkpoint: Path, costs: PassCosts, is_quick: bool) -> None:
        """costs: what policies plan with."""
        self._checkpoint, self._costs, self._is_quick = checkpoint, costs, is_quick
        self._num = 10 if is_quick else 80
        self._window = 3 if is_quick else 25
        self._decode = LoadPhase(4, 60, 2000, self._num + 3 * self._window)
        self._prompts = LoadPhase(6, 700, 2, self._num)

    def _run(
        self,
        policy: str,
        *phases: LoadPhase,
        copy_ahead: bool = True,
        slowness: Sequence[float] | None = None,
    ) -> Played:
        config = PassesConfig(
            max_pass_tokens=256,
            layer_policy=policy,
            layout_window=self._window,
            copy_ahead=copy_ahead,
            costs=self._costs,
        )
        return PipelinePlay(self._checkpoint, phases, config, slowness=slowness).run()

    def _claim(self, claim: str, asked: str, found: str, holds: bool | None) -> StageClaim:
        return StageClaim(claim, asked, found, None if self._is_quick else holds)

    def decode(self) -> tuple[StageClaim, float]:
        """Few rows that decode; also returns their r."""
        even, level = self._run("even", self._decode), self._run("level", self._decode)
        r = ratio_of(even.passes[-self._num // 2 :])
        longest = [max(per_pass(one.passes[-self._num // 2 :])) for one in (even, level)]
        found = longest[1] / longest[0]
        allowed = min(lengths(r)) / lengths(r)[NUM_LAYERS // 2 - 1]
        claim = self._claim(
            f"decode, few rows, r = {r:.1f}: longest stage, level / even",
            f"r >= 2: <= 0.88, or within 3% of {allowed:.2f}, what whole layers allow",
            f"{found:.2f}, {level.num_changes} changes",
            found <= max(0.88, 1.03 * allowed) if r >= 2 else None,
        )
        return claim, r

    def phases(self, r: float) -> StageClaim:
        """Decode, prompts, decode. r: of the decode phases. Passes are alike in every run."""
        # Passes of prompts are longer: phases take about as long as each other.
        decode, prompts = self._decode._replace(num_passes=6 * self._num), self._prompts
        head = lengths(r).index(min(lengths(r))) + 1
        best = f"static:{head},{NUM_LAYERS - head}"
        turns = (decode, prompts, decode)
        even, static, level = (self._run(policy, *turns) for policy in ("even", best, "level"))
        us = makespan_us(level.passes)
        longest = [max(each.stage_us) for each in even.passes]
        share = sum(longest[decode.num_passes : -decode.num_passes]) / sum(longest)
        against = [us / makespan_us(one.passes) for one in (even, static)]
        return self._claim(
            f"decode, prompts ({share:.0%} of even's time), decode: level / even, level / {best}",
            "<= 0.92 of both",
            f"{against[0]:.2f}, {against[1]:.2f}, {level.num_changes} changes",
            max(against) <= 0.92,
        )

    def steady(self) -> StageClaim:
        """Many rows, for which sampling costs little: nothing may move."""
        rows = LoadPhase(24, 60, 400, self._num + self._window)
        even, level = self._run("even", rows), self._run("level", rows)
        r = ratio_of(even.passes[-self._num :])
        found = makespan_us(level.passes) / makespan_us(even.passes)
        is_still = level.num_changes == 0 and abs(found - 1) <= 0.02
        return self._claim(
            f"steady mix, r = {r:.2f}: changes; time, level / even",
            "r < 0.5: 0; within 2%",
            f"{level.num_changes}; {found:.2f}",
            is_still if r < 0.5 else None,
        )

    def slowed(self) -> StageClaim:
        """The first stage is on a host of half the speed: its processor time counts double."""
        rows, slow = LoadPhase(24, 60, 400, 2 * self._num + self._window), (2.0, 1.0)
        equal, even = self._run("even", rows), self._run("even", rows, slowness=slow)
        level = self._run("level", rows, slowness=slow)
        longest = [max(per_pass(one.passes[-self._num :])) for one in (equal, even, level)]
        found = (longest[1] - longest[2]) / (longest[1] - longest[0])
        return self._claim(
            "one stage of half the speed: what level recovers of what even loses",
            ">= 60%",
            f"{found:.0%}, {level.num_changes} changes",
            found >= 0.6,
        )

    def pre_copy(self) -> StageClaim:
        """KV of long rows that is sent at the mark, with and without pages that go ahead."""
        rows = LoadPhase(6, 300 if self._is_quick else 1200, 2000, self._num + 6 * self._window)
        us, frames, pass_us = [], [], 1.0
        for copy_ahead in (True, False):
            played = self._run("level", rows, copy_ahead=copy_ahead)
            marks = [move for move in played.moves if move.is_mark]
            if not marks:
                return self._claim("pre-copy", "<= 25% of a pass", "no layer moved", None)
            us.append(fmean(move.us for move in marks))
            frames.append(fmean(move.num_frames for move in marks))
            pass_us = sum(per_pass(played.passes[-self._num // 2 :]))
        return self._claim(
            "pre-copy: KV at the mark, processor time of both ends",
            "<= 25% of a pass, <= 0.4 of that without",
            f"{us[0] / pass_us:.0%}, {us[0] / us[1]:.2f} ({frames[0]:.0f} and {frames[1]:.0f} "
            "frames of a layer)",
            us[0] <= 0.25 * pass_us and us[0] <= 0.4 * us[1],
        )


def per_pass(passes: Sequence[PassTime]) -> list[float]:
    """For each stage, the mean processor time of a pass, in us."""
    return [fmean(us) for us in zip(*(each.stage_us for each in passes), strict=True)]


def ratio_of(passes: Sequence[PassTime]) -> float:
    """Sampling over a layer: r."""
    return median(each.sample_us / each.layer_us for each in passes)


def lengths(r: float) -> list[float]:
    """The longest of two stages, in layers, by the layers of the first: 1, 2, ..."""
    return [max(head, NUM_LAYERS - head + r) for head in range(1, NUM_LAYERS)]


# --- stages as a prefill


@contextmanager
def serving(checkpoint: Path, num_stages: int, max_len: int) -> Iterator[Service]:
    """One instance, whose prompts so many stages compute."""
    config = Config(
        cluster=ClusterConfig(
            num_instances=1, num_frames=5 * max_len // PAGE_SIZE, max_model_len=max_len
        ),
        scheduler=SchedulerConfig(prefix_sharing=False),
        prefill=PrefillConfig(stages=num_stages),
        limits=LimitsConfig(start_timeout_ms=300_000),
        service=ServiceConfig(grpc_port=0, metrics_port=0, http_port=0),
    )
    launcher = ProcessLauncher(
        [sys.executable, "-m", "data_plane.member.process"], member_environment(config)
    )
    service = Service(config, open_checkpoint(config, checkpoint), launcher)
    try:
        service.start(lambda step: None)
        yield service
    finally:
        service.stop()


def first_token_s(service: Service, ids: Sequence[int]) -> float:
    """Seconds from the request to its one token."""
    begin = time.perf_counter()
    with Client(service.address) as client:
        for _ in client.generate(ids, max_tokens=1, temperature=0.0, timeout_s=600):
            pass
    return time.perf_counter() - begin


def part_prefill(checkpoint: Path, is_quick: bool) -> list[StageClaim]:
    """Two stages against the embedded prefill, in turn."""
    length, num_rounds = (256, 1) if is_quick else (4096, 3)
    random = Random(7)

    def prompt(num_tokens: int) -> list[int]:
        return [random.randrange(2, 4000) for _ in range(num_tokens)]

    long_s: dict[int, list[float]] = {1: [], 2: []}
    four_s: dict[int, list[float]] = {1: [], 2: []}
    with (
        serving(checkpoint, 1, length + 64) as one,
        serving(checkpoint, 2, length + 64) as two,
        ThreadPoolExecutor(4) as pool,
    ):
        services = {1: one, 2: two}
        for service in services.values():
            first_token_s(service, prompt(100))
        for _ in range(num_rounds):
            for num_stages, service in services.items():
                long_s[num_stages].append(first_token_s(service, prompt(length)))
                four = [prompt(length // 2) for _ in range(4)]
                begin = time.perf_counter()
                list(pool.map(partial(first_token_s, service), four))
                four_s[num_stages].append(time.perf_counter() - begin)
    ttft = min(long_s[2]) / min(long_s[1])
    rate = min(four_s[1]) / min(four_s[2])
    can_judge = not is_quick and len(os.sched_getaffinity(0)) >= 2
    return [
        StageClaim(
            "prefill, 2 stages: prompt tokens/s against the embedded prefill, 4 prompts",
            ">= 1.7x",
            f"{rate:.2f}x",
            rate >= 1.7 if can_judge else None,
        ),
        StageClaim(
            f"prefill, 2 stages: time to first token of {length} tokens",
            "<= 0.65",
            f"{ttft:.2f}",
            ttft <= 0.65 if can_judge else None,
        ),
    ]


# --- a slow network


def part_link(checkpoint: Path, is_quick: bool) -> StageClaim:
    """Two stages against two instances, one after the other."""
    claim, asked = "two stages over 1 Gbit/s against two instances: tokens/s", ">= 1.5x"
    if reason := why_not():
        return StageClaim(claim, asked, f"not measured: {reason}", None)
    num_rows, num_tokens = (2, 8) if is_quick else (8, 160)
    with gigabit_nodes():
        stages, instances = (
            tokens_per_s(checkpoint, layout, num_rows, num_tokens)
            for layout in ("pipeline", "instances")
        )
    ratio = stages / instances
    found = f"{ratio:.2f}x, {num_rows} rows"
    can_judge = not is_quick and len(os.sched_getaffinity(0)) >= 2
    return StageClaim(claim, asked, found, ratio >= 1.5 if can_judge else None)


# --- the table


def main(
    quick: Annotated[bool, typer.Option(help="Preset tiny, few passes; judges nothing.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="A part; may be given again.")] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the results here, the machine beside it.")
    ] = None,
) -> None:
    """Measure every part, and print what is asked beside what was found."""
    parts = set(only or PARTS)
    if unknown := parts - set(PARTS):
        raise typer.BadParameter(f"--only is {min(unknown)}; it must be one of {', '.join(PARTS)}")
    load_before = os.getloadavg()[0]
    preset = "tiny" if quick else "small"
    claims: list[StageClaim] = []
    with tempfile.TemporaryDirectory() as folder:
        big, small = Path(folder, "big"), Path(folder, "small")
        layers = {"num_hidden_layers": NUM_LAYERS}
        if parts & {"predictor", "layouts"}:
            big_layers = layers | {"vocab_size": BIG_VOCABULARY[preset]}
            make_checkpoint(big, preset, overrides=big_layers)
        make_checkpoint(small, preset, overrides=layers | {"vocab_size": SMALL_VOCABULARY})
        if parts & {"predictor", "layouts"}:
            greedy = mixes(big, is_quick=quick)
        if "predictor" in parts:
            claims += part_predictor(big, greedy, preset, quick)
        if "layouts" in parts:
            experts = NUM_EXPERTS[preset], PER_TOKEN
            moving = Layouts(big, fit_costs("ours", greedy, *experts), quick)
            claim, r = moving.decode()
            calm = fit_costs("ours", mixes(small, is_quick=quick), *experts)
            claims += [claim, moving.phases(r), moving.pre_copy()]
            resting = Layouts(small, calm, quick)
            claims += [resting.steady(), resting.slowed()]
        if "prefill" in parts:
            claims += part_prefill(small, quick)
        if "link" in parts:
            claims.append(part_link(small, quick))
    show(claims)
    if json is not None:
        write_results(json, [asdict(claim) for claim in claims], describe(load_before))
    raise typer.Exit(1 if any(claim.holds is False for claim in claims) else 0)


def show(claims: Sequence[StageClaim]) -> None:
    """Print the table."""
    table = Table()
    for column in ("claim", "asked", "found", "holds"):
        table.add_column(column)
    for claim in claims:
        holds = {True: "yes", False: "no", None: "not judged"}[claim.holds]
        table.add_row(claim.claim, claim.asked, claim.found, holds)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    typer.run(main)
