"""Attention, LSE merge and expert GEMMs on one GPU, against its measured copy and matmul ceilings.

    PYTHONPATH=. python3 -m benchmarks.gpu.gpu_attention --json PATH [--quick] [--limit-s 450]
    [--tiny]

Needs torch and Triton, no network, no Ray; FlashMLA and DeepGEMM run beside ours where they are
installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.kit.bench import BenchRun, Claim, Result, at_least, bench
from data_plane.attention.fp8_latent import quantise
from data_plane.model.sizes import token_bytes


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


def claims(results: Sequence[Result]) -> Iterator[Claim]:
    """What is claimed of long contexts."""
    long = [r for r in results if r["kind"] == "attention" and r["context"] >= LONG_CONTEXT]
    flashmla_us = {
        (r["kv"], r["batch"], r["context"]): r["us"] for r in long if r["backend"] == "flashmla"
    }
    for result in (result for result in long if result["backend"] == "triton"):
        cell = result["kv"], result["batch"], result["context"]
        where = f"{cell[0]}, batch {cell[1]}, context {cell[2]}"
        what = f"{where}: {{}} of the nearer ceiling"
        yield at_least(what, result["of_ceiling"], MIN_OF_CEILING)
        if cell in flashmla_us:
            what = f"{where}: {{}} of FlashMLA's rate"
            yield at_least(what, flashmla_us[cell] / result["us"], MIN_OF_FLASHMLA)


def replay_us(calls: list[Callable[[], Any]], rounds: int = 20) -> float:
    """Measure one call, median microseconds, all calls captured in one graph.

    So launches cost as they do in a step. Without a GPU it is one round of calls.
    """
    begun = perf_counter()
    for call in calls:
        call()
    if not torch.cuda.is_available():
        return (perf_counter() - begun) * 1e6 / len(calls)
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

    def results(self, name: str, batch: int, context: int, ceilings: Result) -> Iterator[Result]:
        """The result of a cell."""
        us = self.measure(name, batch, context)
        where = {"kv": self.kv, "batch": batch, "context": context}
        num = work(self.shapes, self.kv, batch, context)
        yield rates("attention", name, us, *num, ceilings, **where)


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
    from data_plane.moe.gpu.deep_gemm import DeepGemm
    from data_plane.moe.gpu.gemm import TritonGemm
    from data_plane.moe.gpu.grouped import GroupedExperts, GroupedMm
    from data_plane.moe.gpu.pairs import find_pairs

    most, hidden, size, _ = shapes.experts
    all_gate_up = (
        torch.randn(most, 2 * size, hidden, dtype=torch.bfloat16, device=device()) / hidden**0.5
    )
    all_down = torch.randn(most, hidden, size, dtype=torch.bfloat16, device=device()) / size**0.5
    gemms: dict[str, Any] = {"triton": TritonGemm(), "grouped_mm": GroupedMm()}
    if find_spec("deep_gemm"):
        gemms["deep_gemm"] = DeepGemm(32)
    # Two numbers of experts tell what one more costs from what any number does.
    for rows, num_experts in product(shapes.expert_rows, (most, most // 2)):
        gate_up, down = all_gate_up[:num_experts], all_down[:num_experts]
        x = torch.randn(rows, hidden, dtype=torch.bfloat16, device=device())
        place = torch.arange(num_experts, device=device())
        load = torch.zeros_like(place)
        pairs = find_pairs(x, place.expand(rows, -1).contiguous(), load)
        for name, gemm in gemms.items():
            experts = GroupedExperts(gemm, gate_up, down)
            us = replay_us([partial(experts.run_pairs, pairs)], shapes.rounds)
            weights = gate_up.nbytes + down.nbytes
            flops = 2 * num_experts * rows * 3 * hidden * size
            num_bytes = weights // (2 if name == "deep_gemm" else 1)
            yield rates(
                "experts", name, us, num_bytes, flops, ceilings, rows=rows, experts=num_experts
            )


@bench("Three shapes, under a minute; judges no claim.", on_gpu_s=450)
def main(run: BenchRun) -> None:
    """Measure attention, LSE merge and expert GEMMs on this machine's GPU."""
    shapes = TINY if run.is_tiny else FULL
    if not run.results:
        run.keep(measure_ceilings(run.is_tiny))
    ceilings = run.results[0]
    for measure in (measure_merge, measure_experts):
        kind = measure.__name__.removeprefix("measure_")
        if not any(kind == result["kind"] for result in run.results):
            run.attempt(kind, partial(measure, shapes, ceilings))
    names = ("backend", "kv", "batch", "context")
    done = {tuple(result.get(name) for name in names) for result in run.results}
    group: AttentionCells | None = None
    for kv, batch, context in cells(shapes, run.is_quick):
        if run.is_over:
            break
        if group is None or group.kv != kv:
            group = None  # before the next pool is allocated
            group = AttentionCells(shapes, kv)
        for name in group.backends:
            if (name, kv, batch, context) not in done:
                where = name, batch, context
                run.attempt((kv, *where), partial(group.results, *where, ceilings))
    if not run.is_tiny:
        run.judge(claims(run.results), run.too_quick)


if __name__ == "__main__":
    main()
