"""A fused mixture of experts against the split path on one GPU, at DeepSeek-V3's layer.

    PYTHONPATH=.:tests python3 -m benchmarks.gpu.gpu_moe --json PATH [--limit-s 400] [--tiny]

The split path is the gate, the exchange's dispatch, the grouped GEMM, the shared expert and the
combine, each a few launches. The fused one is one launch for all. Results are compared, and must be
equal bit by bit over replays with a late stream; a peer that stays away must be an error. Times of
captured layers, of the experts' products alone, the share of time that programs have tasks, what
was read and sent, and operations of the GPU. Needs torch and Triton, no network, no Ray.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.gpu_attention import replay_us
from benchmarks.gpu.gpu_moe_case import FULL, TINY, MoeCase, MoeShapes
from benchmarks.kit.bench import BenchRun, Claim, Result, at_least, at_most, bench, none
from data_plane.moe.fused.state import CHOOSE, DISPATCH, GATE, INNER, OUTPUT, ROUTE
from data_plane.moe.gpu.gemm import grouped_gemm_kernel
from data_plane.transport.exchange import ExchangeTimeout
from harness.kernels import fused_roles

MAX_SMALL, MAX_ANY, SMALL_ROWS = 0.85, 1.0, 32
"""The claims: time of a fused layer over the split one's, up to SMALL_ROWS rows and above."""
LEAST_GEMM, LEAST_BUSY, BUSY_ROWS = 0.9, 0.85, 128
"""Weight bytes a second over the grouped GEMM's; share of programs' time in tasks at that batch."""

CELL = ("form", "experts", "instances", "rows")
"""What names a measurement, beside its kind."""


def cells(shapes: MoeShapes, kind: str) -> Iterator[Result]:
    """Name what is measured of a kind: what runs several instances, or one layer of each form."""
    has_all = kind == "right"
    is_once = kind in ("late", "operations")
    for form in shapes.forms[:1] if is_once else shapes.forms:
        for experts in shapes.local_experts[:1] if is_once else shapes.local_experts:
            for instances in shapes.instances if has_all else ((2,) if kind == "late" else (1,)):
                for rows in shapes.rows[-1:] if is_once else shapes.rows:
                    yield dict(zip(CELL, (form, experts, instances, rows), strict=True))


def case_of(shapes: MoeShapes, cell: Result) -> MoeCase:
    """Make the case of a cell, when the one before is gone."""
    gc.collect()
    torch.cuda.empty_cache()
    return MoeCase(shapes, cell["instances"], cell["experts"], cell["rows"], cell["form"])


def sync() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def captured(case: MoeCase) -> Callable[[int | None], list[Tensor]]:
    """Capture a fused layer of every instance on a stream of its own.

    Returns what replays them all, one of them late, and gives their sums.
    """
    graphs, sums = [], []
    for i in case.everyone:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            rows, weights = case.arguments(i)
            case.fused[i].launch(rows, weights)
        graphs.append((graph, stream))
        sums.append(rows.out)

    def replay(late: int | None = None) -> list[Tensor]:
        for i, (graph, stream) in enumerate(graphs):
            with torch.cuda.stream(stream):
                if i == late:
                    torch.cuda._sleep(200_000)
                graph.replay()
        torch.cuda.synchronize()
        return sums

    return replay


def rows_to_send(case: MoeCase) -> int:
    """Count the rows that travel in a layer of all instances: to each holder once, and back."""
    num_visits = 0
    for fused in case.fused:
        state = fused.state()
        seat_BK = state.chosen[: case.num_rows] // fused.shape.num_here
        num_visits += sum(len(set(seats)) for seats in seat_BK.tolist())
    return 2 * num_visits


def rows_sent(case: MoeCase) -> int:
    """Count the rows that the kernels of all instances have sent since the start."""
    return sum(int(fused.statistic[3]) for fused in case.fused)


def measure_right(shapes: MoeShapes, cell: Result) -> Result:
    """Compare sums with the split path's, and those of replays with each other, bit by bit."""
    case = case_of(shapes, cell)
    expected, found = case.run_split(), case.run_fused()
    case.check()
    num_sent = rows_sent(case)
    worst = max(
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(found, expected, strict=True)
    )
    replay = captured(case) if case.is_card else lambda late: case.run_fused()
    num_different = 0
    num_replays = shapes.replays if cell["rows"] in shapes.rows[1:3] else 2
    for number in range(num_replays):
        sums = replay(number % (len(case.everyone) + 1))
        num_different += any(not a.equal(b) for a, b in zip(sums, found, strict=True))
    case.check()
    return {"error": worst, "replays": num_replays, "different": num_different,
            "sent": num_sent, "to_send": rows_to_send(case)}  # fmt: skip


def measure_late(shapes: MoeShapes, cell: Result) -> Result:
    """Let one of two instances stay away: the other's wait must end, and the card go on."""
    case = case_of(shapes, cell)
    case.run_fused()
    begin, words = time.perf_counter(), ""
    case.layer(0)()
    try:
        case.check()
    except ExchangeTimeout as error:
        words = str(error)
    seconds = time.perf_counter() - begin
    again = case_of(shapes, cell)
    again.run_fused()
    again.check()
    return {"ms": round(seconds * 1e3, 1), "limit_ms": shapes.timeout_ms, "error": words}


def measure_time(shapes: MoeShapes, cell: Result) -> Result:
    """Time a layer of one instance in both forms, and count what a fused one does."""
    case = case_of(shapes, cell)
    case.run_fused(), case.run_split()
    fused = case.fused[0]
    split_us = replay_us([case.run_split] * 4)
    fused_us = replay_us([case.layer(0)] * 4)
    before = fused.statistic.clone(), int(fused.epoch)
    case.layer(0)()
    case.check()
    sweeps, waves, polls, sent, busy, spent = (fused.statistic - before[0]).tolist()
    epochs = int(fused.epoch) - before[1]
    return {
        "split_us": round(split_us, 1),
        "fused_us": round(fused_us, 1),
        "ratio": round(fused_us / split_us, 3),
        "replay_cpu_us": round(replay_cpu_us(case), 1),
        "busy": round(busy / spent, 3) if spent else 0.0,
        "sweeps": sweeps / epochs,
        "waves": waves / epochs,
        "polls": polls / epochs,
        # A row travels once to an instance and once back.
        "rows_sent": sent / epochs,
        "of_a_copy_an_expert": sent / epochs / (2 * case.num_rows * fused.shape.per_row),
    }


def replay_cpu_us(case: MoeCase, rounds: int = 20) -> float:
    """Measure the processor time of a replayed fused layer, median; 0 without a GPU."""
    if not case.is_card:
        return 0.0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.layer(0)()
    times = []
    for _ in range(rounds):
        begin = time.thread_time()
        graph.replay()
        times.append((time.thread_time() - begin) * 1e6)
        sync()
    case.check()
    return median(times)


def measure_operations(shapes: MoeShapes, cell: Result) -> Result:
    """Count a layer's operations on the GPU in both forms; 0 without one."""
    case = case_of(shapes, cell)
    case.run_fused(), case.run_split()
    return {"split": num_operations(case.run_split), "fused": num_operations(case.layer(0))}


def num_operations(call: Callable[[], Any]) -> int:
    """Count the kernels and copies that a call has a GPU run."""
    activities = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    if not activities:
        return 0
    with torch.profiler.profile(activities=activities) as profile:
        call()
        sync()
    on_gpu = torch.autograd.DeviceType.CUDA
    return sum(event.device_type == on_gpu for event in profile.events())


def measure_gemm(shapes: MoeShapes, cell: Result) -> Result:
    """Time the experts' products alone: those of the fused kernel and of the grouped GEMM."""
    case = case_of(shapes, cell)
    fused, (rows, weights), experts = case.fused[0], case.arguments(0), case.experts[0]
    state, shape = fused.state(), fused.shape

    def run(*queues: Any, programs: int) -> None:
        for queue in queues:
            fused_roles.queue_role[(programs,)](
                state, rows, weights, 0, case.num_rows, QUEUE=queue.value, S=shape,
                num_warps=fused.tiles.num_warps, num_stages=fused.tiles.num_stages,
            )  # fmt: skip

    fused_roles.start_role[(1,)](state, case.num_rows, S=shape)
    run(GATE, CHOOSE, ROUTE, DISPATCH, programs=1)
    fused_roles.take_in_role[(1,)](state, weights, 0, S=shape)
    prepared = fused.counter.clone()

    def reset() -> None:
        fused.counter.copy_(prepared)

    def reset_and_run() -> None:
        reset()
        run(INNER, OUTPUT, programs=fused.num_programs)

    both = replay_us([reset_and_run])
    fused_us = both - replay_us([reset])
    count = prepared[shape.at_expert :][: case.num_here].clone()
    x = case.x[0].expand(case.num_here, -1, -1).contiguous()
    split_us = replay_us([partial(experts.run_grouped, x, count)])
    num_bytes = int((count > 0).sum()) * case.expert_bytes()
    return {
        "fused_gb_per_s": round(num_bytes / fused_us / 1e3, 1),
        "grouped_gb_per_s": round(num_bytes / split_us / 1e3, 1),
        "ratio": round(split_us / fused_us, 3),
        "grouped": grouped_gemm_kernel.__name__,
    }


MEASURES = {
    "right": measure_right,
    "late": measure_late,
    "time": measure_time,
    "gemm": measure_gemm,
    "operations": measure_operations,
}
"""Kind -> what measures a cell of it."""


def claims(results: Sequence[Result]) -> Iterator[Claim]:
    """What is claimed of times."""
    for result in results:
        what = " ".join(f"{name}={result[name]}" for name in CELL if name in result)
        match result["kind"]:
            case "time":
                most = MAX_SMALL if result["rows"] <= SMALL_ROWS else MAX_ANY
                yield at_most(f"{what}: {{}} of the split path's time", result["ratio"], most)
                if result["rows"] == BUSY_ROWS:
                    yield at_least(f"{what}: in tasks of the time", result["busy"], LEAST_BUSY)
            case "gemm":
                yield at_least(f"{what}: of the grouped GEMM's rate", result["ratio"], LEAST_GEMM)
            case "operations":
                yield at_most(f"{what}: operations of a fused layer", result["fused"], 1)


def faults(results: Sequence[Result]) -> Iterator[Claim]:
    """What must not be, whatever the machine."""
    for result in results:
        if result["kind"] == "right":
            is_wrong = result["different"] or not result["error"] < 2e-2
            yield none("sum is wrong, or different from replay to replay", is_wrong and result)
            is_more = result["sent"] != result["to_send"]
            yield none("row travels more than once to a holder and back", is_more and result)
        if result["kind"] == "late":
            is_said = "did not come" in result["error"]
            yield none("instance stays away without an error", not is_said and result)
            if torch.cuda.is_available():
                yield at_most("ms of a wait", result["ms"], 2 * result["limit_ms"] + 100)


@bench(on_gpu_s=400)
def main(run: BenchRun) -> None:
    """Measure a fused mixture on this machine's GPU."""
    shapes, names = TINY if run.is_tiny else FULL, ("kind", *CELL)
    measured = [{name: result[name] for name in names} for result in run.results]
    for kind, measure in MEASURES.items():
        for name in ({"kind": kind, **cell} for cell in cells(shapes, kind)):
            if name not in measured:
                run.attempt(name, lambda name=name, m=measure: [name | m(shapes, name)])
    run.judge(faults(run.results))
    if not run.is_tiny:
        run.judge(claims(run.results))


if __name__ == "__main__":
    main()
