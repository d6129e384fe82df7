"""Decode on the CPU, in tokens a second: the whole service beside `transformers` and vLLM.

Enters: a preset's checkpoint. Leaves: a table, the ratios, and a list of {engine, instances,
threads, dtype, stored, batch, tokens_per_s}. Does not know: how any engine decodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple

from benchmarks.cpu.peers import DEFAULT_VLLM_ENV, UP_TO_AVX2, PeerEngine, peer, vllm_python
from benchmarks.kit.bench import BenchRun, Claim, at_least, bench
from benchmarks.kit.service import checkpoint_of, decode, random_prompts
from nanocp.cli.options.console import progress
from nanocp.serve.process import Serving, serving

PROMPT_LEN = 200
MIN_OVER_TRANSFORMERS = 2.0
"""Claim: one instance over `transformers` with as many threads, at batch 32."""
MIN_FOUR_OVER_ONE = 0.85
"""Claim: four instances over one, each with one thread, on the same two cores, at batch 32."""
CLAIMED_BATCH = 32
MIN_OVER_VLLM = 0.9
"""Claim: one instance over vLLM with as many threads, at every batch, with the native kernels."""
MIN_OVER_TORCH = 1.4
"""Claim: one instance with native kernels over one with torch's, at the batches that it names."""
BATCHES_OVER_TORCH = (8, 32)
TORCH = "nanocp torch"
"""The engine's name of our service with torch's kernels."""


class MeasuredPoint(NamedTuple):
    """One line of the table."""

    engine: str
    instances: int
    threads: int
    """Threads of one instance."""
    dtype: str
    """What is computed in."""
    stored: str
    """The dtype of the checkpoint's weights: every engine has the same folder."""
    batch: int


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What is measured."""

    preset: str
    dtypes: tuple[str, ...]
    batches: tuple[int, ...]
    layouts: tuple[tuple[int, int], ...]
    """(instances, threads of each) of our service."""
    peer_threads: tuple[int, ...]
    num_tokens: int
    """Tokens of each stream in the steady state."""
    num_peer_tokens: int
    rounds: int
    """Measurements of each point of our service; their median counts."""
    peer_rounds: int
    """Rounds of the peers, which take longer and are further from what is claimed."""
    stored: str = "bfloat16"
    """Dtype of the checkpoint's weights, by default that of nearly all published ones."""


FULL = DecodeShape(
    "small", ("float32", "bfloat16"), (1, 8, 32), ((1, 1), (4, 1)), (1,), 32, 8, 7, 2
)
QUICK = DecodeShape("tiny", ("float32",), (8, 32), ((1, 1), (4, 1)), (1,), 32, 8, 1, 1)

Rates = dict[MeasuredPoint, list[float]]


@bench("Under a minute: preset tiny, fp32, one round; judges no claim.")
def main(
    run: BenchRun,
    vllm: Annotated[bool, "Measure vLLM too; makes its environment if absent."] = False,
    kernels: Annotated[
        str,
        "data_plane.cpu_kernels of our service. avx2 also keeps torch and the peers from using "
        "AVX-512.",
    ] = "auto",
    beside_torch: Annotated[bool, "Measure one instance with torch's kernels too."] = False,
    dtype: Annotated[Literal["float32", "bfloat16"] | None, "Measure only this one."] = None,
    stored: Annotated[
        Literal["float32", "bfloat16"], "Dtype of the checkpoint's weights."
    ] = "bfloat16",
    preset: Annotated[str | None, "Measure a checkpoint of this preset, as small-llama."] = None,
    threads: Annotated[
        int,
        "Threads of one instance and of each peer. More than 1: one instance only, and as many "
        "cores must be there.",
    ] = 1,
) -> None:
    """Measure turn by turn, so that a drift of the machine meets all layouts alike."""
    if run.is_quick and vllm:
        run.refuse("--vllm: vLLM's attention on the CPU does not take the widths of preset tiny")
    num_cores = len(os.sched_getaffinity(0))
    if not 1 <= threads <= num_cores:
        run.refuse(
            f"--threads: {threads} on {num_cores} cores would measure the operating system; 1 to "
            f"{num_cores}"
        )
    shape = QUICK if run.is_quick else FULL
    dtypes = (dtype,) if dtype else shape.dtypes
    shape = replace(shape, stored=stored, preset=preset or shape.preset, dtypes=dtypes)
    if threads > 1:
        shape = replace(shape, layouts=((1, threads),), peer_threads=(threads,))
    if kernels == "avx2":
        os.environ.update(UP_TO_AVX2)
    python = _vllm_or_none(run.say) if vllm else None
    rates, versions = measure(shape, kernels, python, run.say, beside_torch)
    results = [
        point._asdict() | {"tokens_per_s": round(median(values), 1)}
        for point, values in rates.items()
    ]
    run.table("decode, tokens/s (median)", results)
    run.keep(*results, preset=shape.preset, kernels=kernels, engines=versions)
    run.judge(ratios(results), run.too_quick)


def _vllm_or_none(say: Callable[[str], None]) -> str | None:
    try:
        return vllm_python(DEFAULT_VLLM_ENV)
    except RuntimeError as error:
        say(f"going on without vLLM: {error}")
        return None


def measure(
    shape: DecodeShape,
    kernels: str,
    vllm: str | None,
    say: Callable[[str], None],
    beside_torch: bool = False,
) -> tuple[Rates, dict[str, str]]:
    """tokens/s of every round at every point, and the peers' versions; a line for each."""
    checkpoint = checkpoint_of(shape.preset, shape.stored)
    rates: Rates = {}
    versions: dict[str, str] = {}
    num_peers = len(shape.peer_threads) * (2 if vllm else 1)
    layouts = [("nanocp", kernels, *layout) for layout in shape.layouts]
    if beside_torch:
        layouts.append((TORCH, "torch", 1, 1))
    rounds_each = len(layouts) * shape.rounds + num_peers * shape.peer_rounds
    total = len(shape.dtypes) * len(shape.batches) * rounds_each
    with progress() as bar:
        task = bar.add_task("starting", total=total)
        for dtype in shape.dtypes:
            with contextlib.ExitStack() as stack:
                peers = [stack.enter_context(one) for one in _peers(shape, checkpoint, dtype, vllm)]
                versions |= {one.engine: one.version for one in peers}
                services = {}
                for engine, name, instances, threads in layouts:
                    settings = {
                        "data_plane.dtype": dtype,
                        "data_plane.cpu_kernels": name,
                        "data_plane.threads_per_instance": threads,
                    }
                    # Ray has no part in a step, and two services would share one.
                    service = serving(checkpoint, instances, settings, ray=False)
                    services[engine, instances, threads] = stack.enter_context(service)
                for point, rate in _in_turn(shape, checkpoint, dtype, services, peers, say):
                    rates.setdefault(point, []).append(rate)
                    where = f"{point.engine} {dtype} batch {point.batch}"
                    bar.update(task, advance=1, description=where)
                    done = sum(map(len, rates.values()))
                    say(f"{done} of {total}: {where}, {rate:.1f} tokens/s")
    return rates, versions


def _peers(
    shape: DecodeShape, checkpoint: Path, dtype: str, vllm: str | None
) -> Iterator[contextlib.AbstractContextManager[PeerEngine]]:
    for threads in shape.peer_threads:
        yield peer("transformers", checkpoint, dtype, threads)
        if vllm is not None:
            yield peer("vllm", checkpoint, dtype, threads, vllm)


def _in_turn(
    shape: DecodeShape,
    checkpoint: Path,
    dtype: str,
    services: dict[tuple[str, int, int], Serving],
    peers: list[PeerEngine],
    say: Callable[[str], None],
) -> Iterator[tuple[MeasuredPoint, float]]:
    """Measure batch by batch: our layouts turn by turn, and in some rounds the peers.

    What waits for its turn uses no core. A peer that fails or does not answer in time is left out
    from then on.
    """
    for batch in shape.batches:
        prompts = random_prompts(checkpoint, batch, PROMPT_LEN, seed=batch)
        for round_ in range(shape.rounds):
            for (engine, instances, threads), service in services.items():
                rate = _ours(service, prompts, shape.num_tokens, warm=round_ == 0)
                point = MeasuredPoint(engine, instances, threads, dtype, shape.stored, batch)
                yield point, rate
            if round_ * shape.peer_rounds % shape.rounds >= shape.peer_rounds:
                continue
            for one in list(peers):
                try:
                    answer = one.measure(prompts, shape.num_peer_tokens)
                except RuntimeError as error:
                    say(f"going on without {one.engine}: {error}")
                    peers.remove(one)
                    continue
                point = MeasuredPoint(one.engine, 1, one.threads, dtype, shape.stored, batch)
                yield point, float(answer["tokens_per_s"])


def _ours(service: Serving, prompts: list[list[int]], num_tokens: int, warm: bool) -> float:
    """`warm`: decode a little first, uncounted; the peers do so too."""
    if warm:
        asyncio.run(decode(service.target, prompts, 2))
    return asyncio.run(decode(service.target, prompts, num_tokens)).tokens_per_s


PAIRS = (
    ("transformers", (1, 1), ("transformers", 1, 1), MIN_OVER_TRANSFORMERS, (CLAIMED_BATCH,)),
    ("transformers", (1, 2), ("transformers", 1, 2), MIN_OVER_TRANSFORMERS, (CLAIMED_BATCH,)),
    ("one instance", (4, 1), ("nanocp", 1, 1), MIN_FOUR_OVER_ONE, (CLAIMED_BATCH,)),
    ("vLLM", (1, 1), ("vllm", 1, 1), MIN_OVER_VLLM, ()),
    ("torch's kernels", (1, 1), (TORCH, 1, 1), MIN_OVER_TORCH, BATCHES_OVER_TORCH),
)
"""(what is beside ours, our instances and threads, its engine, instances and threads, the least
ratio, batches; all that were measured if none is named)."""


def ratios(results: Sequence[dict[str, Any]]) -> Iterator[Claim]:
    """What is claimed of every measured pair; both had the same folder."""
    rates = {
        MeasuredPoint(*(result[name] for name in MeasuredPoint._fields)): result["tokens_per_s"]
        for result in results
    }
    folders = dict.fromkeys((point.dtype, point.stored) for point in rates)
    for folder in folders:
        for name, ours, theirs, least, batches in PAIRS:
            for batch in batches or sorted({point.batch for point in rates}):
                of_ours = rates.get(MeasuredPoint("nanocp", *ours, *folder, batch))
                of_theirs = rates.get(MeasuredPoint(*theirs, *folder, batch))
                if of_ours is None or of_theirs is None:
                    continue
                dtype, stored = folder
                what = f"{dtype}, stored {stored}, batch {batch}: {ours[0]} of {ours[1]} threads"
                yield at_least(f"{what} over {name}: {{}}", of_ours / of_theirs, least)


if __name__ == "__main__":
    main()
