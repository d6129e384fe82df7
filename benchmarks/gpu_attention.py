"""Attention, LSE merge and expert GEMMs on one GPU, against its measured copy and matmul ceilings.

    PYTHONPATH=. python3 benchmarks/gpu_attention.py --json PATH [--quick] [--limit-s 450]

Needs torch and Triton, no network, no Ray; FlashMLA and DeepGEMM run beside ours where they are installed. What PATH
holds already is not measured again, so a run that ended at its limit goes on where it stopped.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import machine
import torch
import typer

from data_plane.attention.fp8_latent import quantise, token_bytes

RANK, ROPE, HEADS = 512, 64, 128
"""DeepSeek-V3's."""
BATCHES = (1, 4, 16, 32, 64, 128, 256)
CONTEXTS = (2**11, 2**13, 2**15, 2**16, 2**17, 2**18, 2**20)
POOL_TOKENS = {"bf16": 2**25, "fp8": 2**24}
FIGURE_3A_TOKENS = 2**20
"""The batch effect: the same KV in all, held by 1 to 256 rows."""
COLD_BYTES = 2**28
"""Cells with less KV rotate among several sets of frames, so that no run finds its KV in the cache."""
LONG_CONTEXT = 2**16
MIN_OF_CEILING, MIN_OF_FLASHMLA = 0.80, 0.85
"""The claims, at LONG_CONTEXT and above."""

Result = dict[str, Any]


def cells(quick: bool) -> list[tuple[str, int, int]]:
    """(KV format, batch, context): what fits the pool, long contexts first."""
    grid = [(batch, context) for context in reversed(CONTEXTS) for batch in BATCHES]
    figure = [(batch, FIGURE_3A_TOKENS // batch) for batch in BATCHES]
    if quick:
        grid, figure = [(1, 2**17), (16, 2**16), (128, 2**13)], []
    chosen = list(dict.fromkeys([*grid, *figure]))
    return [(kv, *cell) for kv in ("bf16", "fp8") for cell in chosen if cell[0] * cell[1] <= POOL_TOKENS[kv]]


def work(kv: str, batch: int, context: int) -> tuple[int, int]:
    """(fewest bytes to move, floating-point operations): KV and queries read, outputs written."""
    kv_bytes = token_bytes(RANK, ROPE) if kv == "fp8" else 2 * (RANK + ROPE)
    rows = 2 * batch * HEADS * (RANK + ROPE + RANK)
    return batch * context * kv_bytes + rows, rows * context


def rates(kind: str, name: str, us: float, num_bytes: int, flops: int, ceilings: Result, **what: Any) -> Result:
    """A result: what was reached, and what share of the nearer of the two ceilings."""
    floor_us = max(num_bytes / ceilings["copy_gb_per_s"] / 1e3, flops / ceilings["matmul_tflop_per_s"] / 1e6)
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
    flashmla_us = {(r["kv"], r["batch"], r["context"]): r["us"] for r in long if r["backend"] == "flashmla"}
    broken = []
    for result in long:
        if result["backend"] != "triton":
            continue
        where = f"{result['kv']}, batch {result['batch']}, context {result['context']}"
        if result["of_ceiling"] < MIN_OF_CEILING:
            broken.append(f"{where}: {result['of_ceiling']} of the nearer ceiling, not {MIN_OF_CEILING}")
        peer_us = flashmla_us.get((result["kv"], result["batch"], result["context"]))
        if peer_us is not None and peer_us / result["us"] < MIN_OF_FLASHMLA:
            broken.append(f"{where}: {peer_us / result['us']:.2f}x FlashMLA, not {MIN_OF_FLASHMLA}")
    return broken


def replay_us(calls: list[Callable[[], Any]], rounds: int = 20) -> float:
    """Median microseconds of one call, all of them captured in one graph: launches cost as they do in a step."""
    for call in calls:
        call()
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


def measure_ceilings() -> Result:
    """This card's copy (bytes read and written) and bf16 matmul on random data."""
    source = torch.empty(2**31, dtype=torch.int16, device="cuda").random_(0, 2**14)
    target = torch.empty_like(source)
    copy_us = replay_us([lambda: target.copy_(source)])
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    matmul_us = replay_us([lambda: a @ b] * 4)
    return {
        "kind": "ceilings",
        "copy_gb_per_s": round(2 * source.nbytes / copy_us / 1e3, 1),
        "matmul_tflop_per_s": round(2 * 8192**3 / matmul_us / 1e6, 1),
    }


def large_tiles(rank: int, rope: int, heads: int) -> Any:
    """Ours over FP8 with tiles of 64 tokens: half as many rescalings of the sums, and spilled registers in the loop."""
    from data_plane.attention import triton_mla

    class LargeTiles(triton_mla.TritonMla):
        def run(self, *arguments: Any) -> Any:
            small, triton_mla.TILES_FP8 = triton_mla.TILES_FP8, replace(triton_mla.TILES_FP8, block_tokens=64)
            try:
                return super().run(*arguments)
            finally:
                triton_mla.TILES_FP8 = small

    return LargeTiles(rank, rope, heads)


class AttentionCells:
    """One pool of frames that all cells of a KV format read."""

    def __init__(self, kv: str) -> None:
        from data_plane.attention.flashmla import FlashMla
        from data_plane.attention.triton_mla import TritonMla

        self.kv, self.num_frames = kv, POOL_TOKENS[kv] // 64
        width, dtype = (token_bytes(RANK, ROPE), torch.uint8) if kv == "fp8" else (RANK + ROPE, torch.bfloat16)
        self.pool = torch.empty(self.num_frames, 64, width, dtype=dtype, device="cuda")
        for part in self.pool.split(2**14):
            noise = torch.randn(len(part), 64, RANK + ROPE, dtype=torch.bfloat16, device="cuda")
            part.copy_(quantise(noise, RANK) if kv == "fp8" else noise)
        self.order = torch.randperm(self.num_frames, device="cuda").int()
        self.backends: dict[str, Any] = {"triton": TritonMla(RANK, ROPE, HEADS)}
        if kv == "fp8":
            self.backends["triton, 64 tokens"] = large_tiles(RANK, ROPE, HEADS)
        if kv == "bf16" and find_spec("flash_mla"):
            self.backends["flashmla"] = FlashMla(RANK)

    def measure(self, name: str, batch: int, context: int) -> float:
        """Microseconds of one layer's attention, planned before."""
        backend, pages = self.backends[name], context // 64
        num_bytes, _ = work(self.kv, batch, context)
        num_sets = max(1, min(8, -(-COLD_BYTES // num_bytes), self.num_frames // (batch * pages)))
        q = torch.randn(batch, HEADS, RANK + ROPE, dtype=torch.bfloat16, device="cuda")
        length = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        tables = self.order[: num_sets * batch * pages].view(num_sets, batch, pages)
        plans = [backend.plan(table, length) for table in tables]
        return replay_us([lambda plan=plan: backend.run(q, self.pool, plan, 0.04) for plan in plans])


def measure_merge(ceilings: Result) -> Iterator[Result]:
    """LSE merge of 8 partials of 64 rows."""
    from data_plane.triton_merge import merge_partials

    for width in (128, 512):
        partial = torch.randn(8, 64, HEADS, width, dtype=torch.bfloat16, device="cuda")
        lse = torch.randn(8, 64, HEADS, device="cuda")
        us = replay_us([lambda partial=partial, lse=lse: merge_partials(partial, lse)] * 4)
        num_bytes = partial.nbytes + lse.nbytes + 4 * 64 * HEADS * (width + 1)
        yield rates("merge", "triton", us, num_bytes, 0, ceilings, width=width)


def measure_experts(ceilings: Result) -> Iterator[Result]:
    """One layer's experts at DeepSeek-V3's shapes, 8 experts here: the weights are what takes the time."""
    from data_plane.moe.deep_gemm import DeepGemm
    from data_plane.moe.grouped import GroupedExperts, GroupedMm
    from data_plane.moe.triton_gemm import TritonGemm

    num_experts, hidden, size = 8, 7168, 2048
    gate_up = torch.randn(num_experts, 2 * size, hidden, dtype=torch.bfloat16, device="cuda") / 85
    down = torch.randn(num_experts, hidden, size, dtype=torch.bfloat16, device="cuda") / 45
    gemms: dict[str, Any] = {"triton": TritonGemm(), "grouped_mm": GroupedMm()}
    if find_spec("deep_gemm"):
        gemms["deep_gemm"] = DeepGemm(32)
    for rows in (8, 32, 128):
        x = torch.randn(num_experts, 512, hidden, dtype=torch.bfloat16, device="cuda")
        count = torch.full((num_experts,), rows, dtype=torch.int32, device="cuda")
        for name, gemm in gemms.items():
            experts = GroupedExperts(gemm, range(num_experts), gate_up, down)
            us = replay_us([lambda experts=experts, x=x, count=count: experts.run_grouped(x, count)])
            weights = gate_up.nbytes + down.nbytes
            flops = 2 * num_experts * rows * 3 * hidden * size
            yield rates("experts", name, us, weights // (2 if name == "deep_gemm" else 1), flops, ceilings, rows=rows)


def main(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Results; what it holds is not measured again.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Three shapes, under a minute.")] = False,
    limit_s: Annotated[int, typer.Option(help="Begin no further cell after so long.")] = 450,
) -> None:
    """Measure attention, LSE merge and expert GEMMs on this machine's GPU."""
    if not torch.cuda.is_available():
        sys.exit("gpu_attention: no NVIDIA GPU is here (torch sees none); run it on a machine that has one")
    deadline, load_before = time.monotonic() + limit_s, os.getloadavg()[0]
    described = machine.describe(load_before) | {"gpu": torch.cuda.get_device_name()}
    results: list[Result] = machine.read_results(json_path)

    def keep(result: Result) -> None:
        results.append(result)
        print(" ".join(f"{key}={value}" for key, value in result.items()), flush=True)
        if json_path:
            machine.write_results(json_path, results, described)

    if not results:
        keep(measure_ceilings())
    ceilings, done = results[0], {(r.get("backend"), r.get("kv"), r.get("batch"), r.get("context")) for r in results}
    for measure in (measure_merge, measure_experts):
        if not any(measure.__name__ == f"measure_{result['kind']}" for result in results):
            for result in measure(ceilings):
                keep(result)
    group: AttentionCells | None = None
    for kv, batch, context in cells(quick):
        if time.monotonic() > deadline:
            print(f"{limit_s} s are over; the same command goes on where this one stopped")
            break
        if group is None or group.kv != kv:
            group = None  # before the next pool is allocated
            group = AttentionCells(kv)
        for name in group.backends:
            if (name, kv, batch, context) not in done:
                us = group.measure(name, batch, context)
                keep(
                    rates(
                        "attention", name, us, *work(kv, batch, context), ceilings, kv=kv, batch=batch, context=context
                    )
                )
    broken = broken_claims(results)
    print("\n".join(broken) or "every claim holds for what was measured")
    sys.exit(1 if broken and not quick else 0)


if __name__ == "__main__":
    typer.run(main)
