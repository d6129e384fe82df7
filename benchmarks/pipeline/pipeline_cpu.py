"""A pipeline on CPUs: its predictor, layers that move and their price, stages as a prefill.

Enters: nothing; checkpoints are drawn. Leaves: a table of what is asked and what was found, as
ratios within this run. A quick run (preset tiny, few passes) judges nothing. Does not know: how
layers move.

Parts `predictor` and `layouts` run all stages in one thread, and count processor time: how long
passes take is that of a pipeline whose stages have a core each. Parts `prefill` and `link` are real
services, timed by their clients, and need a core for each stage; `link` needs root.
As a control, the stages of a prefill also share one core, where they must gain nothing.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Annotated, Literal, get_args

from benchmarks.kit.bench import BenchRun, Claim, bench
from benchmarks.kit.machine import TwoProcesses, two_processes
from benchmarks.kit.service import in_process
from benchmarks.pipeline.pipeline_layouts import NUM_LAYERS, Layouts, StageClaim
from benchmarks.pipeline.pipeline_link import NUM_DENSE, part_link
from control_plane.scheduler.pipeline.predictor import predict_pass
from data_plane.model.config import ModelConfig
from data_plane.model.make_checkpoint import make_checkpoint
from nanocp.client import Client
from nanocp.config.cluster import ClusterConfig
from nanocp.config.limits import LimitsConfig
from nanocp.config.passes import PassCosts
from nanocp.config.prefill import PrefillConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.service import ServiceConfig
from nanocp.config.whole import Config
from nanocp.serve.service import Service
from nanocp.simulator.fit.pipeline import KINDS, errors, measure
from nanocp.simulator.pipeline.fit import FitError, fit_costs
from nanocp.values.plan import PAGE_SIZE

Part = Literal["predictor", "layouts", "prefill", "link"]
BIG_VOCABULARY, SMALL_VOCABULARY = {"tiny": 32_768, "small": 129_280}, 4_096
WIDE = {"hidden_size": 2048, "moe_intermediate_size": 32}
"""Preset tiny with rows of 8 KB there and back; DeepSeek-V3's have 7 (FP8) and 14 (BF16)."""


# --- the predictor


def part_predictor(
    checkpoint: Path, layers: tuple[int, int, int], is_quick: bool
) -> list[StageClaim]:
    """Errors on held-out passes, beside what plays of them differ by; time of a prediction."""
    kinds = ("greedy", "mixed") if is_quick else tuple(KINDS)
    passes, apart = measure(checkpoint, kinds, is_quick=is_quick)
    floor = FitError(*map(fmean, zip(*apart.values(), strict=True)))
    found = errors(passes, *layers)
    layer, paper = (
        fmean(error.layer for error in found[form].values()) for form in ("ours", "paper")
    )
    dense = fmean(error.dense for error in found["ours"].values())
    every = [one for all_ in passes.values() for one in all_]
    costs = fit_costs("ours", every, *layers)
    begin = time.perf_counter()
    for each in every:
        predict_pass(each.spans, costs, each.works)
    us = 1e6 * (time.perf_counter() - begin) / len(every)
    found_here = f"{layer:.1%}, {layer / paper:.2f} of {paper:.1%}"
    sampling = [
        StageClaim(
            f"sampling, {kind}: mean error",
            "<= 5%",
            f"{error.sampling:.1%} (the paper's form: {found['paper'][kind].sampling:.1%}); "
            f"two plays differ by {apart[kind].sampling:.1%}",
            error.sampling <= 0.05,
        )
        for kind, error in found["ours"].items()
    ]
    return [
        StageClaim(
            "layer, held-out passes: mean error",
            "<= 7%, <= 0.35 of the paper's form",
            f"{found_here}; two plays differ by {floor.layer:.1%}",
            layer <= 0.07 and layer <= 0.35 * paper,
        ),
        StageClaim(
            "dense layer, held-out passes: mean error",
            "<= 7%",
            f"{dense:.1%}; two plays differ by {floor.dense:.1%}",
            dense <= 0.07,
        ),
        StageClaim("a prediction, mean", "<= 20 us", f"{us:.1f} us", us <= 20),
        *sampling,
    ]


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
    with in_process(config, checkpoint) as (service, _):
        yield service


def first_token_s(service: Service, ids: Sequence[int]) -> float:
    """Seconds from the request to its one token."""
    begin = time.perf_counter()
    with Client(service.address) as client:
        for _ in client.generate(ids, max_tokens=1, temperature=0.0, timeout_s=600):
            pass
    return time.perf_counter() - begin


@contextmanager
def on_one_core() -> Iterator[None]:
    """Let every thread of this process, and all that they start, share a core."""

    def pin(cores: set[int]) -> None:
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), cores)

    cores = os.sched_getaffinity(0)
    pin({min(cores)})
    try:
        yield
    finally:
        pin(cores)


def two_stages(checkpoint: Path, length: int, num_rounds: int) -> tuple[float, float]:
    """Two stages against the embedded prefill, in turn, over so many rounds.

    Returns ratios: of prompt tokens/s with four prompts, and of the time to the first token of a
    prompt of this length.
    """
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
    return min(four_s[1]) / min(four_s[2]), min(long_s[2]) / min(long_s[1])


def part_prefill(checkpoint: Path, is_quick: bool, here: TwoProcesses) -> list[StageClaim]:
    """Two stages against the embedded prefill; as a control, on one core, where nothing is won.

    here: what two processes do on this machine, which bounds what two stages can.
    """
    length, num_rounds = (256, 1) if is_quick else (4096, 3)
    rate, ttft = two_stages(checkpoint, length, num_rounds)
    claims = []
    if not is_quick:
        with on_one_core():
            no_rate, no_ttft = two_stages(checkpoint, length // 4, num_rounds=2)
        claims.append(
            StageClaim(
                "control, both stages on one core: prompt tokens/s, time to first token",
                "<= 1.1x, >= 0.9",
                f"{no_rate:.2f}x, {no_ttft:.2f}",
                no_rate <= 1.1 and no_ttft >= 0.9,
            )
        )
    what = "prefill, 2 stages: prompt tokens/s against the embedded prefill, 4 prompts"
    more = StageClaim(what, ">= 1.7x", f"{rate:.2f}x", rate >= 1.7)
    what = f"prefill, 2 stages: time to first token of {length} tokens"
    sooner = StageClaim(what, "<= 0.65", f"{ttft:.2f}", ttft <= 0.65)
    return [
        more.unless("" if more.holds else here.why_not(1.7)),
        sooner.unless("" if sooner.holds else here.why_not(1 / 0.65)),
        *claims,
    ]


# --- the table


class Subjects:
    """What parts measure: checkpoints, and passes. Each is made when it is first asked for."""

    def __init__(self, folder: Path, is_quick: bool, here: TwoProcesses) -> None:
        self._folder, self._is_quick, self._here = folder, is_quick, here
        self.preset = "tiny" if is_quick else "small"

    def _checkpoint(self, preset: str, vocab_size: int, **widths: int) -> Path:
        path = self._folder / "-".join(map(str, (preset, vocab_size, *widths.values())))
        if not path.exists():
            overrides = {"num_hidden_layers": NUM_LAYERS, "vocab_size": vocab_size} | widths
            make_checkpoint(path, preset, overrides=overrides)
        return path

    @property
    def big(self) -> Path:
        """A checkpoint with a large vocabulary."""
        return self._checkpoint(self.preset, BIG_VOCABULARY[self.preset])

    @property
    def small(self) -> Path:
        """A checkpoint with a small vocabulary."""
        return self._checkpoint(self.preset, SMALL_VOCABULARY)

    @property
    def wide(self) -> Path:
        """A checkpoint whose rows are wide beside what its layers compute."""
        return self._checkpoint("tiny", SMALL_VOCABULARY, **WIDE)

    def costs(self, checkpoint: Path) -> PassCosts:
        """Constants fitted to greedy requests."""
        passes, _ = measure(checkpoint, ("greedy",), is_quick=self._is_quick)
        return fit_costs("ours", passes["greedy"], *layers_of(checkpoint))

    def run(self, part: str) -> list[StageClaim]:
        """Measure a part."""
        is_quick = self._is_quick
        match part:
            case "predictor":
                return part_predictor(self.big, layers_of(self.big), is_quick)
            case "layouts":
                moving = Layouts(self.big, self.costs(self.big), is_quick)
                claim, head = moving.decode()
                claims = [claim, moving.phases(head), moving.pre_copy()]
                calm = Layouts(self.small, self.costs(self.small), is_quick)
                return claims + calm.many_rows()
            case "prefill":
                return part_prefill(self.small, is_quick, self._here)
        return part_link(self.wide, self.small, self.costs, is_quick)


def layers_of(checkpoint: Path) -> tuple[int, int, int]:
    """Experts of a layer, how many of them a token visits, and how many layers are dense."""
    model = ModelConfig.from_folder(checkpoint)
    return model.num_experts, model.num_experts_per_token, NUM_DENSE


@bench("Preset tiny, few passes; judges nothing.")
def main(
    run: BenchRun, only: Annotated[list[Part] | None, "A part; may be given again."] = None
) -> None:
    """Measure every part, and say what is asked beside what was found.

    A part that fails is a claim that does not hold; the others are measured.
    """
    here = two_processes()
    run.say(f"two processes over one: {here}")
    with tempfile.TemporaryDirectory() as folder:
        subjects = Subjects(Path(folder), run.is_quick, here)
        for part in (each for each in get_args(Part) if each in (only or get_args(Part))):
            begin = time.monotonic()
            try:
                claims = subjects.run(part)
            except Exception as error:
                traceback.print_exc()
                claims = [StageClaim(f"part {part}", "ends", f"{error!r}", False)]
            else:
                claims = [claim.unless(run.too_quick) for claim in claims]
            run.say(f"part {part}: {time.monotonic() - begin:.0f} s")
            run.keep(*map(asdict, claims), two_processes_over_one=here._asdict())
            run.judge(Claim(f"{c.claim}: {c.found}; asked: {c.asked}", c.holds) for c in claims)


if __name__ == "__main__":
    main()
