"""What a CP degree of 2 does to one long request beside short rows: step time on two instances.

Enters: a preset's checkpoint, its context length lifted. Leaves: step time and exchange share at
degree 1 and 2, and their ratio. Does not know: how a step is computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.kit.bench import BenchRun, at_most, bench
from benchmarks.kit.service import checkpoint_of, decode, random_prompts
from nanocp.serve.process import Serving, serving

NUM_INSTANCES = 2
NUM_SHORT_ROWS = 8
SHORT_LEN = 200
MAX_TOKENS = 512
"""Limit of every request: the short rows run while the long one's KV is filled."""
MAX_RATIO = 0.65
"""Claim: step time at degree 2 over that at degree 1."""


@dataclass(frozen=True, slots=True)
class ContextShape:
    """What is measured."""

    preset: str
    long_len: int
    num_tokens: int
    """Steps of each measurement."""
    rounds: int
    """Measurements at each degree, in turn; their median counts."""


FULL = ContextShape("small", 128 * 1024, 16, 3)
QUICK = ContextShape("tiny", 16 * 1024, 16, 1)


@bench("Under a minute: preset tiny, 16k tokens, one round; judges no claim.")
def main(run: BenchRun) -> None:
    """Measure degree 1 and degree 2 in turn, so that a drift of the machine meets both."""
    shape = QUICK if run.is_quick else FULL
    steps = measure(shape, run.track([1, 2] * shape.rounds, "steps"))
    results = [_result(shape, degree, steps[degree]) for degree in sorted(steps)]
    ratio = results[1]["step_ms"] / results[0]["step_ms"]
    run.table(f"one long request beside {NUM_SHORT_ROWS} short rows", results)
    run.keep(*results, preset=shape.preset, ratio=round(ratio, 3))
    run.judge([at_most("step time at degree 2 / degree 1", ratio, MAX_RATIO)], run.too_quick)


def measure(shape: ContextShape, degrees: Iterable[int]) -> dict[int, list[dict[str, float]]]:
    """By degree, the mean step of a measurement each time that the degree is named."""
    checkpoint = long_checkpoint(shape.preset, shape.long_len)
    steps: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    for degree in degrees:
        with _serving(checkpoint, shape, degree) as service:
            steps[degree].append(_measure(service, checkpoint, shape))
    return steps


def long_checkpoint(preset: str, long_len: int) -> Path:
    """The preset's checkpoint with room for the long request: the same files but for config.json.

    With synthetic KV nothing was trained on any length, and rope stretches to every position.
    """
    source = checkpoint_of(preset)
    path = source.with_name(f"{preset}-long")
    path.mkdir(exist_ok=True)
    for file in source.iterdir():
        if file.name != "config.json" and not (path / file.name).is_symlink():
            (path / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text())
    config["max_position_embeddings"] = _max_model_len(long_len)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    return path


def _max_model_len(long_len: int) -> int:
    return long_len + MAX_TOKENS


@contextlib.contextmanager
def _serving(checkpoint: Path, shape: ContextShape, degree: int) -> Iterator[Serving]:
    """Serve on two instances of one thread, each alone on its core.

    The long request is over `degree` of them, the short ones are on one.
    """
    profile = {"cp_degree_buckets": [[shape.long_len, 1]], "cp_degree_max": degree}
    settings = {
        "cluster.max_model_len": _max_model_len(shape.long_len),
        # All of it on one instance, and the short rows.
        "cluster.num_frames": (shape.long_len + (1 + NUM_SHORT_ROWS) * (SHORT_LEN + MAX_TOKENS))
        // 64
        + 2 * 9,
        "cluster.bounds.max_rows": 16,
        "data_plane.threads_per_instance": 1,
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump({"scheduler": profile}, file)
        file.flush()
        with serving(
            checkpoint,
            NUM_INSTANCES,
            settings | {"scheduler.profile": file.name},
            *("--policy", "dual_balanced"),
            ray=False,
        ) as service:
            cores = sorted(os.sched_getaffinity(0))
            for pid, core in zip(service.instance_pids(), itertools.cycle(cores), strict=False):
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    os.sched_setaffinity(int(thread.name), {core})
            yield service


def _measure(service: Serving, checkpoint: Path, shape: ContextShape) -> dict[str, float]:
    """The slower instance's step, the mean wait for the exchange, the long request's TPOT."""
    prompts = random_prompts(checkpoint, 1, shape.long_len) + random_prompts(
        checkpoint, NUM_SHORT_ROWS, SHORT_LEN
    )
    samples: list[dict[tuple[str, str], float]] = []

    def at_edge() -> None:
        samples.append(service.metrics())

    state = asyncio.run(decode(service.target, prompts, shape.num_tokens, MAX_TOKENS, at_edge))

    def spent(name: str) -> list[float]:
        keys = [(f"nanocp:{name}", str(instance)) for instance in range(NUM_INSTANCES)]
        return [samples[1][key] - samples[0][key] for key in keys]

    spent_s, counts = spent("step_seconds_sum"), spent("step_seconds_count")
    step_s = [seconds / count for seconds, count in zip(spent_s, counts, strict=True)]
    share = sum(spent("step_exchange_seconds_sum")) / sum(spent_s)
    inside = [at for at in state.arrivals_s[0] if state.begin_s <= at <= state.end_s]
    tpot_ms = 1000 * (inside[-1] - inside[0]) / (len(inside) - 1)
    return {"step_ms": 1000 * max(step_s), "exchange_share": share, "tpot_ms": tpot_ms}


def _result(shape: ContextShape, degree: int, steps: list[dict[str, float]]) -> dict[str, Any]:
    about = {"instances": NUM_INSTANCES, "cp_degree": degree, "kv_tokens": shape.long_len}
    medians = {
        name: round(median(step[name] for step in steps), 3 if name == "exchange_share" else 2)
        for name in steps[0]
    }
    return about | {"short_rows": NUM_SHORT_ROWS} | medians


if __name__ == "__main__":
    main()
