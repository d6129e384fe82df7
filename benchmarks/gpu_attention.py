"""Attention, LSE merge and expert GEMMs on one GPU, against its measured copy and matmul ceilings.

    PYTHONPATH=. python3 benchmarks/gpu_attention.py --json PATH [--quick] [--limit-s 450] [--tiny]

Needs torch and Triton, no network, no Ray; FlashMLA and DeepGEMM run beside ours where they are
installed. What PATH holds already is not measured again, so a run that ended at its limit goes on
where it stopped. --tiny: small shapes, on the CPU under TRITON_INTERPRET=1 too, where its times
mean nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import machine
import torch

from data_plane.attention.fp8_latent import quantise
from data_plane.model.page_bytes import token_bytes


@dataclass(frozen=True)
class AttentionShapes:
    """What is measured: DeepSeek-V3's widths, or small ones."""

    rank: int
    rope: int
    heads: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    pool_tokens: dict[str, int]
    figure_3a_tokens: int
    """The batch effect: the same KV in all, held by every batch's rows."""
    merged_rows: int
    experts: tuple[int, int, int, int]
    """Experts of one layer here; hidden size, expert size, slots of an expert."""
    expert_rows: tuple[int, ...]
    """Rows of each expert."""
    rounds: int = 20


FULL = AttentionShapes(
    512, 64, 128, (1, 4, 16, 32, 64, 128, 256), (2**11, 2**13, 2**15, 2**16, 2**17, 2**18, 2**20),
    {"bf16": 2**25, "fp8": 2**24}, 2**20, 64, (8, 7168, 2048, 512), (8, 32, 128),
)  # fmt: skip
TINY = AttentionShapes(
    32, 16, 2, (1, 2), (64, 128), {"bf16": 256, "fp8": 128}, 128, 2, (2, 32, 16, 4), (2, 4),
    rounds=1,
)  # fmt: skip
COLD_BYTES = 2**28
"""Cells with less KV rotate among several sets of frames, so that no run finds its KV in the cache.
"""
LONG_CONTEXT = 2**16
MIN_OF_CEILING, MIN_OF_FLASHMLA = 0.80, 0.85
"""The claims, at LONG_CONTEXT and above."""

Result = dict[str, Any]


def cells(shapes: AttentionShapes, quick: bool = False) -> list[tuple[str, int, int]]:
    """(KV format, batch, context): what fits the pool, long contexts first."""
    grid = [(batch, context) for context in reversed(shapes.contexts) for batch in shapes.batches]
    figure = [(batch, shapes.figure_3a_tokens // batch) for batch in shapes.batches]
    if quick:
        grid, figure = [(1, 2**17), (16, 2**16), (128, 2**13)], []
    chosen = list(dict.fromkeys([*grid, *figure]))
    return [
        (kv, *cell)
        for kv in ("bf16", "fp8")
        for cell in chosen
        if cell[0] * cell[1] <= shapes.pool_tokens[kv]
    ]


def work(shapes: AttentionShapes, kv: str, batch: int, context: int) -> tuple[int, int]:
    """(fewest bytes to move, floating-point operations): KV and queries read, outputs written."""
    rank, rope = shapes.rank, shapes.rope
    kv_bytes = token_bytes(rank, rope) if kv == "fp8" else 2 * (rank + rope)
    rows = 2 * batch * shapes.heads * (rank + rope + rank)
    return batch * context * kv_bytes + rows, rows * context


def rates(
    kind: str, name: str, us: float, num_bytes: int, flops: int, ceilings: Result, **what: Any
) -> Result:
    """A result: what was reached, and what share of the nearer of the two ceilings."""
    floor_us = max(
        num_bytes / ceilings["copy_gb_per_s"] / 1e3, flops / ceilings["matmul_tflop_per_s"] / 1e6
    )
    return {
        "kind": kind,
        "backend": name,
        **what,
        "us": round(us, 2),
        "gb_per_s": round(num_bytes / us / 1e3, 1),
        "tflop_per_s": round(flops / us / 1e6, 1),
        "of_ceiling": round(floor_us / us, 3),
    }


def broken_claims(results: list[Result]) -> list[str]:
    """Sentences on what was claimed and did not hold."""
    long = [r for r in results if r["kind"] == "attention" and r["context"] >= LONG_CONTEXT]
    flashmla_us = {
        (r["kv"], r["batch"], r["context"]): r["us"] for r in long if r["backend"] == "flashmla"
    }
    broken = []
    for result in long:
        if result["backend"] != "triton":
            continue
        where = f"{result['kv']}, batch {result['batch']}, context {result['context']}"
        if result["of_ceiling"] < MIN_OF_CEILING:
            broken.append(
                f"{where}: {result['of_ceiling']} of the nearer ceiling, not {MIN_OF_CEILING}"
            )
        peer_us = flashmla_us.get((result["kv"], result["batch"], result["context"]))
        if peer_us is not None and peer_us / result["us"] < MIN_OF_FLASHMLA:
            broken.append(f"{where}: {peer_us / result['us']:.2f}x FlashMLA, not {MIN_OF_FLASHMLA}")
    return broken


def replay_us(calls: list[Callable[[], Any]], rounds: int = 20) -> float:
    """Measure one call, median microseconds, all calls captured in one graph.

    So launches cost as they do in a step. Without a GPU it is one round of calls.
    """
    begun = time.perf_counter()
    for call in calls:
        call()
    if not torch.cuda.is_available():
        return (time.perf_counter() - begun) * 1e6 / len(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(rounds + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return median(times[3:])


def measure_ceilings(is_tiny: bool) -> Result:
    """Measure this card's copy (bytes read and written) and bf16 matmul on random data.

    With small shapes the numbers mean nothing.
    """
    if is_tiny:
        return {"kind": "ceilings", "copy_gb_per_s": 1.0, "matmul_tflop_per_s": 1.0}
    source = torch.empty(2**31, dtype=torch.int16, device="cuda").random_(0, 2**14)
    target = torch.empty_like(source)
    # By a kernel: a graph's copy node moves 2.7 TB/s on an H200, a kernel 4.2.
    copy_us = replay_us([lambda: torch.add(source, 1, out=target)])
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    matmul_us = replay_us([lambda: a @ b] * 4)
    return {
        "kind": "ceilings",
        "copy_gb_per_s": round(2 * source.nbytes / copy_us / 1e3, 1),
        "matmul_tflop_per_s": round(2 * 8192**3 / matmul_us / 1e6, 1),
    }


def device() -> torch.device:
    """The GPU, or the CPU that plays one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def large_tiles(*arguments: Any) -> Any:
    """Make our FP8 backend with tiles of 64 tokens: half the rescalings, but spilled registers."""
    from data_plane.attention import triton_mla

    class LargeTiles(triton_mla.TritonMla):
        def run(self, *arguments: Any) -> Any:
            small, triton_mla.TILES_FP8 = (
                triton_mla.TILES_FP8,
                replace(triton_mla.TILES_FP8, block_tokens=64),
            )
            try:
                return super().run(*arguments)
            finally:
                triton_mla.TILES_FP8 = small

    return LargeTiles(*arguments)


class AttentionCells:
    """One pool of frames that all cells of a KV format read."""

    def __init__(self, shapes: AttentionShapes, kv: str) -> None:
        from data_plane.attention.flashmla import FlashMla
        from data_plane.attention.triton_mla import TritonMla

        self.shapes, self.kv, self.num_frames = shapes, kv, shapes.pool_tokens[kv] // 64
        rank, rope = shapes.rank, shapes.rope
        width, dtype = (
            (token_bytes(rank, rope), torch.uint8) if kv == "fp8" else (rank + rope, torch.bfloat16)
        )
        self.pool = torch.empty(self.num_frames, 64, width, dtype=dtype, device=device())
        for part in self.pool.split(2**14):
            noise = torch.randn(len(part), 64, rank + rope, dtype=torch.bfloat16, device=device())
            part.copy_(quantise(noise, rank) if kv == "fp8" else noise)
        self.order = torch.randperm(self.num_frames, device=device()).int()
        ours = rank, rope, shapes.heads, None if torch.cuda.is_available() else 2
        self.backends: dict[str, Any] = {"triton": TritonMla(*ours)}
        if kv == "fp8":
            self.backends["triton, 64 tokens"] = large_tiles(*ours)
        if kv == "bf16" and find_spec("flash_mla"):
            self.backends["flashmla"] = FlashMla(rank)

    def measure(self, name: str, batch: int, context: int) -> float:
        """Microseconds of one layer's attention, planned before."""
        backend, pages, shapes = self.backends[name], context // 64, self.shapes
        num_bytes, _ = work(shapes, self.kv, batch, context)
        num_sets = max(1, min(8, -(-COLD_BYTES // num_bytes), self.num_frames // (batch * pages)))
        q = torch.randn(
            batch, shapes.heads, shapes.rank + shapes.rope, dtype=torch.bfloat16, device=device()
        )
        length = torch.full((batch,), context, dtype=torch.int32, device=device())
        tables = self.order[: num_sets * batch * pages].view(num_sets, batch, pages)
        plans = [backend.plan(table, length) for table in tables]
        return replay_us(
            [lambda plan=plan: backend.run(q, self.pool, plan, 0.04) for plan in plans],
            shapes.rounds,
        )


def measure_merge(shapes: AttentionShapes, ceilings: Result) -> Iterator[Result]:
    """LSE merge of 8 partials of some rows."""
    from data_plane.attention.triton_merge import merge_partials

    rows, heads = shapes.merged_rows, shapes.heads
    for width in (128, 512):
        parts = torch.randn(8, rows, heads, width, dtype=torch.bfloat16, device=device())
        lse = torch.randn(8, rows, heads, device=device())
        us = replay_us([lambda parts=parts, lse=lse: merge_partials(parts, lse)] * 4, shapes.rounds)
        num_bytes = parts.nbytes + lse.nbytes + 4 * rows * heads * (width + 1)
        yield rates("merge", "triton", us, num_bytes, 0, ceilings, width=width)


def measure_experts(shapes: AttentionShapes, ceilings: Result) -> Iterator[Result]:
    """One layer's experts, those of one instance: the weights are what takes the time."""
    from data_plane.moe.deep_gemm import DeepGemm
    from data_plane.moe.grouped import GroupedExperts, GroupedMm
    from data_plane.moe.triton_gemm import TritonGemm

    num_experts, hidden, size, slots = shapes.experts
    gate_up = (
        torch.randn(num_experts, 2 * size, hidden, dtype=torch.bfloat16, device=device())
        / hidden**0.5
    )
    down = torch.randn(num_experts, hidden, size, dtype=torch.bfloat16, device=device()) / size**0.5
    gemms: dict[str, Any] = {"triton": TritonGemm(), "grouped_mm": GroupedMm()}
    if find_spec("deep_gemm"):
        gemms["deep_gemm"] = DeepGemm(32)
    for rows in shapes.expert_rows:
        x = torch.randn(num_experts, slots, hidden, dtype=torch.bfloat16, device=device())
        count = torch.full((num_experts,), rows, dtype=torch.int32, device=device())
        for name, gemm in gemms.items():
            experts = GroupedExperts(gemm, range(num_experts), gate_up, down)
            us = replay_us(
                [lambda experts=experts, x=x, count=count: experts.run_grouped(x, count)],
                shapes.rounds,
            )
            weights = gate_up.nbytes + down.nbytes
            flops = 2 * num_experts * rows * 3 * hidden * size
            yield rates(
                "experts",
                name,
                us,
                weights // (2 if name == "deep_gemm" else 1),
                flops,
                ceilings,
                rows=rows,
            )


def attempt(what: str, measure: Callable[[], Any]) -> Any:
    """What it measures; None if it failed, which is said: all else is measured still."""
    try:
        return measure()
    except Exception:
        print(f"FAILED {what}\n{traceback.format_exc(limit=-3)}", flush=True)
        return None


def options(
    description: str, limit_s: int, arguments: Sequence[str] | None, has_quick: bool = False
) -> argparse.Namespace:
    """Parse a GPU benchmark's options by argparse: a GPU machine may have torch and Triton only."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="results; what it holds is not measured again"
    )
    if has_quick:
        parser.add_argument(
            "--quick", action="store_true", help="three shapes, under a minute; breaks no claim"
        )
    parser.add_argument("--tiny", action="store_true", help="small shapes: does it run at all?")
    parser.add_argument(
        "--limit-s", type=int, default=limit_s, help="begin no further measurement after so long"
    )
    chosen = parser.parse_args(arguments)
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not torch.cuda.is_available() and not (chosen.tiny and is_interpreted):
        sys.exit(
            f"{Path(parser.prog).stem}: no NVIDIA GPU is here (torch sees none); run it on a "
            "machine that has one"
        )
    return chosen


def describe() -> Result:
    """This machine, with its GPU."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return machine.describe(os.getloadavg()[0]) | {"gpu": name}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure attention, LSE merge and expert GEMMs on this machine's GPU."""
    chosen = options((__doc__ or "").splitlines()[0], 450, arguments, has_quick=True)
    deadline, described = time.monotonic() + chosen.limit_s, describe()
    shapes = TINY if chosen.tiny else FULL
    results: list[Result] = machine.read_results(chosen.json)
    num_failed = 0

    def keep(result: Result) -> None:
        results.append(result)
        print(" ".join(f"{key}={value}" for key, value in result.items()), flush=True)
        if chosen.json:
            machine.write_results(chosen.json, results, described)

    if not results:
        keep(measure_ceilings(chosen.tiny))
    ceilings, done = (
        results[0],
        {(r.get("backend"), r.get("kv"), r.get("batch"), r.get("context")) for r in results},
    )
    for measure in (measure_merge, measure_experts):
        kind = measure.__name__.removeprefix("measure_")
        if not any(kind == result["kind"] for result in results):
            found = attempt(
                kind, lambda measure=measure: list(measure(shapes, ceilings))
            )  # whole, or not at all
            num_failed += found is None
            for result in found or ():
                keep(result)
    group: AttentionCells | None = None
    for kv, batch, context in cells(shapes, chosen.quick):
        if time.monotonic() > deadline:
            print(f"{chosen.limit_s} s are over; the same command goes on where this one stopped")
            break
        if group is None or group.kv != kv:
            group = None  # before the next pool is allocated
            group = AttentionCells(shapes, kv)
        for name in group.backends:
            if (name, kv, batch, context) in done:
                continue
            where = {"kv": kv, "batch": batch, "context": context}
            us = attempt(f"{name} {where}", partial(group.measure, name, batch, context))
            num_failed += us is None
            if us is not None:
                keep(
                    rates(
                        "attention", name, us, *work(shapes, kv, batch, context), ceilings, **where
                    )
                )
    broken = [] if chosen.tiny else broken_claims(results)
    print("\n".join(broken) or "every claim holds for what was measured")
    sys.exit(1 if num_failed or (broken and not chosen.quick) else 0)


if __name__ == "__main__":
    main()
