"""Compares the cost model and the search's bound with the NanoFlow paper's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from nanocp.overlap import paper
from nanocp.overlap.interference import COMPUTE, NETWORK, RESOURCES
from nanocp.overlap.operations import cut
from nanocp.overlap.roofline import MODELS, Machine, demands, kv_gb
from nanocp.overlap.search import fluid_bound, sequence, totals


class Comparison(NamedTuple):
    """One number of the paper and ours."""

    table: str
    what: str
    paper: str
    here: str
    holds: bool | None
    """Whether they differ by no more than the tolerance. None: not judged."""


def compare() -> list[Comparison]:
    """Compare tables, Figures 2 and 3, the optimal throughput and the ablation."""
    return [*_table_1(), *_figures(), *_table_2(), *_throughput(), *_ablation()]


def _table_1() -> Iterator[Comparison]:
    for gpu, printed in paper.TABLE_1:
        ratios = (
            gpu.mem_gb / gpu.mem_gb_per_s,
            gpu.fp16_gflop_per_s / gpu.mem_gb_per_s,
            gpu.net_gb_per_s / gpu.mem_gb_per_s,
        )
        names = ("MemSize / MemBW", "Compute / MemBW", "NetBW / MemBW")
        for name, text, ratio in zip(names, printed, ratios, strict=True):
            # The paper rounds some ratios and cuts others: the last digit may differ by one.
            digits = len(text.partition(".")[2])
            holds = abs(ratio - float(text)) <= max(10.0**-digits, 0.01 * ratio)
            what = f"{gpu.vendor} {gpu.name}: {name}"
            yield Comparison("Table 1", what, text, f"{ratio:.{digits}f}", holds)


def _figures() -> Iterator[Comparison]:
    """Ratios at the largest batch; the paper prints colours."""
    for model in MODELS:
        machine = Machine(paper.MACHINE.gpu, 1 if "8B" in model.name else paper.MACHINE.num_gpus)
        for name, requests in paper.WORKLOADS.items():
            batch = machine.kv_room_gb(model) / kv_gb(model, requests, 1)
            times = machine.iteration(model, batch)
            ratio, is_near = times.memory_of_compute, machine.num_gpus == 1 and name[:3] == "512"
            holds = abs(ratio - 1) < 0.2 if is_near else ratio < 1
            printed = "about 1" if is_near else "below 1"
            yield Comparison("Figure 3", f"{model.name}, {name}", printed, f"{ratio:.2f}", holds)
        if machine.num_gpus > 1:
            ratio = times.network_ms / times.compute_ms
            yield Comparison("Figure 2", model.name, "below 1", f"{ratio:.2f}", ratio < 1)


def _table_2() -> Iterator[Comparison]:
    ours = demands(paper.LLAMA_2_70B, paper.REQUESTS, paper.BATCH, paper.MACHINE.num_gpus)
    for line, demand in zip(paper.TABLE_2, ours, strict=True):
        times = paper.MACHINE.times(demand)
        names = ("GFLOP", "memory, GB", "network, GB", "compute, ms", "memory, ms", "network, ms")
        for name, printed, value in zip(names, line[1:7], (*demand[1:], *times), strict=True):
            # Prefill attention's bytes cannot be found again: 2.0 GB here, 2.1 in the paper.
            may_differ = 0.05 if line.name == "PfAttn" and "memory" in name else 0.01
            digits = 2 if name.endswith("ms") else 1
            holds = abs(value - printed) <= max(may_differ * printed, 10.0**-digits)
            here = f"{value:,.{digits}f}"
            yield Comparison("Table 2", f"{line.name}: {name}", f"{printed:,}", here, holds)


def _throughput() -> Iterator[Comparison]:
    machine, model = paper.MACHINE, paper.LLAMA_2_70B
    printed = paper.OPTIMAL_TOKENS_PER_S
    for tflop_per_s in (paper.PEAK_GFLOP_PER_S / 1e3, 260.0):
        value = machine.optimal_tokens_per_s(model, 1e3 * tflop_per_s)
        what = f"equation 5 with {tflop_per_s:.0f} TFLOP/s, tokens a second and GPU"
        # The text says 280; its result needs 260.
        holds = abs(value / printed - 1) < 0.01 if tflop_per_s == 260 else None
        yield Comparison("Optimal throughput", what, f"{printed:,}", f"{value:,.0f}", holds)


def _ablation() -> Iterator[Comparison]:
    sequential_us = sequence(paper.layer()).period_us
    iteration_s = 1e-6 * sequential_us * paper.LLAMA_2_70B.num_layers
    per_gpu = paper.BATCH / iteration_s / paper.MACHINE.num_gpus
    what = "Table 2's measured times in sequence, tokens a second and GPU"
    yield Comparison("Ablation", what, "-", f"{per_gpu:,.0f}", None)
    work_us = totals(cut(paper.layer(), {}, (0.5,)))
    for overlapping, printed, may_differ in (
        ((COMPUTE, NETWORK), paper.ABLATION["network"], 0.02),
        (RESOURCES, paper.ABLATION["network and memory"], 0.03),
    ):
        gain = sequential_us / fluid_bound(work_us, paper.TABLE_3, overlapping)
        what = f"{' and '.join(overlapping[1:])} overlap: gain"
        holds = abs(gain - printed) <= may_differ
        yield Comparison("Ablation", what, f"{printed:.2f}", f"{gain:.3f}", holds)
