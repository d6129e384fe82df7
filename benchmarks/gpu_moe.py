"""A fused mixture of experts against the split path on one GPU, at DeepSeek-V3's layer.

    PYTHONPATH=.:tests python3 benchmarks/gpu_moe.py --json PATH [--limit-s 400] [--tiny]

The split path is the exchange's dispatch, the grouped GEMM and its combine, each a few launches.
The fused one is one launch. Both get the gate's choice. Sums are compared, and must be equal bit by
bit over replays with a late stream; a peer that stays away must become the error. Then times of
captured layers, of the experts' products alone, the share of time that programs have tasks, and
what was read and sent. Needs torch and Triton, no network, no Ray. What PATH holds of this code is
not measured again. --tiny: small shapes, on the CPU under TRITON_INTERPRET=1 too, where its times
mean nothing.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import gpu_attention
import machine
import torch
from torch import Tensor

from data_plane.model.fp8_weight import Fp8Weight
from data_plane.model.weights import slots_of
from data_plane.moe.all_to_all_gpu import GpuExpertExchange
from data_plane.moe.fused import FusedMoe, FusedTiles, fused_experts
from data_plane.moe.fused_tasks import INNER, OUTPUT
from data_plane.moe.grouped import GroupedExperts
from data_plane.moe.triton_gemm import TritonGemm, grouped_gemm_kernel
from data_plane.transport.cuda_ipc import GpuExchange, PeerMemory, RegionPlaces
from data_plane.transport.exchange import ExchangeTimeout
from data_plane.transport.regions import mixture_layout
from harness import fused_roles
from harness.kernel_cases import in_fp8
from nanocp.experts import home_experts

MAX_SMALL, MAX_ANY, SMALL_ROWS = 0.85, 1.0, 32
"""The claims: time of a fused layer over the split one's, up to SMALL_ROWS rows and above."""
LEAST_GEMM, LEAST_BUSY, BUSY_ROWS = 0.9, 0.85, 128
"""Weight bytes a second over the grouped GEMM's; share of programs' time in tasks at that batch."""

Result = dict[str, Any]


@dataclass(frozen=True)
class MoeShapes:
    """What is measured: DeepSeek-V3's layer, or a small one."""

    hidden: int
    width: int
    per_row: int
    local_experts: tuple[int, ...]
    instances: tuple[int, ...]
    rows: tuple[int, ...]
    forms: tuple[str, ...]
    """bf16, fp32 or fp8: dtype of the weights; with fp8 rows are bf16, or fp32 if tiny."""
    fp8_block: tuple[int, int]
    replays: int
    tiles: FusedTiles | None
    timeout_ms: float


FULL = MoeShapes(
    7168, 2048, 8, (8, 32), (1, 2, 4), (1, 8, 32, 128, 256), ("bf16", "fp8"), (128, 128), 1000,
    None, 1000.0,
)  # fmt: skip
TINY = MoeShapes(
    32, 16, 2, (2,), (1, 2), (2,), ("fp32", "fp8"), (16, 64), 2,
    FusedTiles(4, 16, 16, 32, 1, 4, 1), 0.02,
)  # fmt: skip


class MoeCase:
    """Instances on this card, each with a layer's rows and experts, in both forms."""

    def __init__(
        self, shapes: MoeShapes, num_instances: int, num_here: int, num_rows: int, form: str
    ) -> None:
        self.shapes, self.num_rows, self.num_here = shapes, num_rows, num_here
        self.is_card = torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if self.is_card else torch.device("cpu")
        is_wide = form == "fp32" or not self.is_card
        self.dtype = torch.float32 if is_wide else torch.bfloat16
        self.everyone = range(num_instances)
        num_experts = num_instances * num_here
        per_row = min(shapes.per_row, num_experts)
        value = "float32" if is_wide else "uint16"
        layout = mixture_layout(num_rows, per_row, shapes.hidden, value)
        places = RegionPlaces(layout, num_instances)
        sizes: dict[str, Any] = {
            "num_instances": num_instances, "num_experts": num_experts, "per_row": per_row,
            "hidden_size": shapes.hidden, "max_rows": num_rows, "dtype": self.dtype,
            "device": self.device,
        }  # fmt: skip
        self.exchanges, self.split, self.fused, self.experts = [], [], [], []
        for memory in PeerMemory.create_all(places, self.device):
            exchange = GpuExchange(places, self.device, shapes.timeout_ms)
            exchange.attach(memory)
            self.exchanges.append(exchange)
            self.split.append(GpuExpertExchange(exchange, **sizes))
        for memory in PeerMemory.create_all(places, self.device):
            # Epochs of the two forms differ, so each has memory of its own.
            exchange = GpuExchange(places, self.device, shapes.timeout_ms)
            exchange.attach(memory)
            self.exchanges.append(exchange)
            self.fused.append(
                FusedMoe(
                    exchange, num_here=num_here, expert_size=shapes.width, tiles=shapes.tiles,
                    fp8_block=shapes.fp8_block if form == "fp8" else None, **sizes,
                )
            )  # fmt: skip
            programs = self.fused[-1].num_programs // num_instances
            self.fused[-1].num_programs = max(1, programs)
        for instance in self.everyone:
            self.experts.append(self._experts(instance, num_instances, form))
        self.x = torch.randn(num_instances, num_rows, shapes.hidden, device=self.device)
        self.x = self.x.to(self.dtype)
        order = torch.rand(num_instances, num_rows, num_experts, device=self.device).argsort(-1)
        self.expert = order[..., :per_row].contiguous()
        self.weight = torch.rand(num_instances, num_rows, per_row, device=self.device)
        self.live = torch.ones(num_instances, num_rows, dtype=torch.bool, device=self.device)

    def _experts(self, instance: int, num_instances: int, form: str) -> GroupedExperts:
        shapes, num_experts = self.shapes, num_instances * self.num_here
        home = home_experts(num_experts, instance, num_instances)
        place_E = slots_of(home, num_experts).to(self.device)

        def weight(rows: int, columns: int) -> Tensor | Fp8Weight:
            drawn = torch.randn(self.num_here, rows, columns, device=self.device) * columns**-0.5
            return in_fp8(drawn, shapes.fp8_block) if form == "fp8" else drawn.to(self.dtype)

        gate_up, down = weight(2 * shapes.width, shapes.hidden), weight(shapes.hidden, shapes.width)
        return GroupedExperts(TritonGemm(), place_E, gate_up, down)

    def run_split(self, y: list[Tensor] | None = None) -> list[Tensor]:
        """Run a layer of all instances by its parts, in turn."""
        arguments = [
            (self.x[i], self.expert[i], self.weight[i], self.live[i]) for i in self.everyone
        ]
        sent = [self.split[i].dispatch(*arguments[i]) for i in self.everyone]
        for i in self.everyone:
            self.split[i].run_experts(sent[i], self.experts[i])
        return [self.split[i].combine(sent[i]) for i in self.everyone]

    def route(self, instance: int) -> Any:
        """Find where an instance's rows go."""
        i = instance
        return self.fused[i].route(self.x[i], self.expert[i], self.weight[i], self.live[i])

    def run_fused(self) -> list[Tensor]:
        """Run a layer of all instances as one launch each, in turns."""
        rows = [self.route(i) for i in self.everyone]
        turns = [
            self.fused[i].turns(rows[i], fused_experts(self.experts[i])) for i in self.everyone
        ]
        while turns:
            turns = [turn for turn in turns if next(turn, StopIteration) is not StopIteration]
        return [each.out for each in rows]

    def layer(self, instance: int) -> Callable[[], Any]:
        """Make what one instance does in a layer, to be captured: it waits for its peers."""
        experts = fused_experts(self.experts[instance])
        return lambda: self.fused[instance].launch(self.route(instance), experts)

    def check(self) -> None:
        """Raise what ended a wait."""
        for exchange in self.exchanges:
            exchange.check()

    def weight_bytes(self) -> int:
        """Bytes of the weights of an instance's experts."""
        experts = fused_experts(self.experts[0])
        return int(experts.gate_up.nbytes + experts.down.nbytes)


def cases(shapes: MoeShapes, all_instances: bool) -> Iterator[tuple[MoeCase, Result]]:
    """Make the cases, one after another, each with what names it."""
    for form in shapes.forms:
        for num_here in shapes.local_experts:
            for num_instances in shapes.instances if all_instances else (1,):
                for num_rows in shapes.rows:
                    gc.collect()
                    torch.cuda.empty_cache()
                    yield (
                        MoeCase(shapes, num_instances, num_here, num_rows, form),
                        {"form": form, "experts": num_here, "instances": num_instances,
                         "rows": num_rows},
                    )  # fmt: skip


def captured(case: MoeCase) -> Callable[[int | None], list[Tensor]]:
    """Capture a fused layer of every instance on a stream of its own.

    Returns what replays them all, one of them late, and gives their sums.
    """
    graphs, sums = [], []
    for i in case.everyone:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            rows = case.route(i)
            case.fused[i].launch(rows, fused_experts(case.experts[i]))
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


def measure_right(shapes: MoeShapes) -> Iterator[Result]:
    """Compare sums with the split path's, and those of replays with each other, bit by bit."""
    for case, name in cases(shapes, all_instances=True):
        expected, found = case.run_split(), case.run_fused()
        case.check()
        worst = max(
            float((a.float() - b.float()).norm() / b.float().norm())
            for a, b in zip(found, expected, strict=True)
        )
        replay = captured(case) if case.is_card else lambda late, case=case: case.run_fused()
        num_different = 0
        num_replays = shapes.replays if name["rows"] in shapes.rows[1:3] else 2
        for number in range(num_replays):
            sums = replay(number % (len(case.everyone) + 1))
            num_different += any(not a.equal(b) for a, b in zip(sums, found, strict=True))
        case.check()
        yield {"kind": "right", **name, "error": worst, "replays": num_replays,
               "different": num_different}  # fmt: skip


def measure_late(shapes: MoeShapes) -> Iterator[Result]:
    """Let one of two instances stay away: the other's wait must end, and the card go on."""
    case = MoeCase(shapes, 2, shapes.local_experts[0], shapes.rows[-1], shapes.forms[0])
    case.run_fused()
    begin, words = time.perf_counter(), ""
    case.layer(0)()
    try:
        case.check()
    except ExchangeTimeout as error:
        words = str(error)
    seconds = time.perf_counter() - begin
    again = MoeCase(shapes, 2, shapes.local_experts[0], shapes.rows[-1], shapes.forms[0])
    again.run_fused()
    again.check()
    yield {"kind": "late", "ms": round(seconds * 1e3, 1), "limit_ms": shapes.timeout_ms,
           "error": words}  # fmt: skip


def measure_time(shapes: MoeShapes) -> Iterator[Result]:
    """Time a layer of one instance in both forms, and count what a fused one does."""
    for case, name in cases(shapes, all_instances=False):
        case.run_fused(), case.run_split()
        fused = case.fused[0]
        split_us = gpu_attention.replay_us([case.run_split] * 4)
        fused_us = gpu_attention.replay_us([case.layer(0)] * 4)
        before = fused.statistic.clone(), int(fused.epoch)
        case.layer(0)()
        case.check()
        sweeps, waves, polls, sent, busy, spent = (fused.statistic - before[0]).tolist()
        epochs = int(fused.epoch) - before[1]
        yield {
            "kind": "time", **name,
            "split_us": round(split_us, 1),
            "fused_us": round(fused_us, 1),
            "ratio": round(fused_us / split_us, 3),
            "busy": round(busy / spent, 3) if spent else 0.0,
            "sweeps": sweeps / epochs,
            "waves": waves / epochs,
            "polls": polls / epochs,
            # A row travels once to an instance and once back.
            "rows_sent": sent / epochs,
            "of_a_copy_an_expert": sent / epochs / (2 * case.num_rows * case.expert.shape[-1]),
        }  # fmt: skip


def measure_gemm(shapes: MoeShapes) -> Iterator[Result]:
    """Time the experts' products alone: those of the fused kernel and of the grouped GEMM."""
    for case, name in cases(shapes, all_instances=False):
        fused, experts = case.fused[0], case.experts[0]
        state, rows, weights = fused.state(), case.route(0), fused_experts(experts)
        fused_roles.dispatch_role[(1,)](state, rows, 0, S=fused.shape)
        fused_roles.take_in_role[(1,)](state, rows, weights, 0, S=fused.shape)
        prepared = fused.counter.clone()

        def products(case: MoeCase = case, arguments: Any = (state, rows, weights, 0)) -> None:
            fused = case.fused[0]
            for queue in (INNER, OUTPUT):
                fused_roles.queue_role[(fused.num_programs,)](
                    *arguments, case.num_rows, QUEUE=queue.value, S=fused.shape,
                    num_warps=fused.tiles.num_warps, num_stages=fused.tiles.num_stages,
                )  # fmt: skip

        def reset(fused: FusedMoe = fused, prepared: Tensor = prepared) -> None:
            fused.counter.copy_(prepared)

        both = gpu_attention.replay_us([lambda: (reset(), products())])
        fused_us = both - gpu_attention.replay_us([reset])
        fused.counter.zero_()
        count = torch.full((case.num_here,), case.num_rows, dtype=torch.int32, device=case.device)
        x = case.x[0].expand(case.num_here, -1, -1).contiguous()
        split_us = gpu_attention.replay_us([partial(experts.run_grouped, x, count)])
        yield {
            "kind": "gemm", **name,
            "fused_gb_per_s": round(case.weight_bytes() / fused_us / 1e3, 1),
            "grouped_gb_per_s": round(case.weight_bytes() / split_us / 1e3, 1),
            "ratio": round(split_us / fused_us, 3),
            "grouped": grouped_gemm_kernel.__name__,
        }  # fmt: skip


MEASURES = (measure_right, measure_late, measure_time, measure_gemm)


def broken_claims(results: Sequence[Result]) -> list[str]:
    """Sentences on what was claimed and did not hold."""
    broken = []
    for result in results:
        what = " ".join(f"{key}={result[key]}" for key in ("form", "experts", "instances", "rows")
                        if key in result)  # fmt: skip
        if result["kind"] == "time":
            most = MAX_SMALL if result["rows"] <= SMALL_ROWS else MAX_ANY
            if result["ratio"] > most:
                broken.append(f"{what}: {result['ratio']} of the split path's time, not {most}")
            if result["rows"] == BUSY_ROWS and result["busy"] < LEAST_BUSY:
                broken.append(f"{what}: programs have tasks {result['busy']} of the time")
        if result["kind"] == "gemm" and result["ratio"] < LEAST_GEMM:
            broken.append(f"{what}: products at {result['ratio']} of the grouped GEMM's rate")
    return broken


def wrong(results: Sequence[Result]) -> list[str]:
    """Sentences on what was wrong, whatever the machine."""
    found = []
    for result in results:
        if result["kind"] == "right" and (result["different"] or not result["error"] < 2e-2):
            found.append(f"{result}: wrong, or different from replay to replay")
        if result["kind"] == "late" and "did not come" not in result["error"]:
            found.append(f"{result}: an instance that stays away was no error")
        is_timed = result["kind"] == "late" and torch.cuda.is_available()
        if is_timed and result["ms"] > 2 * result["limit_ms"] + 100:
            found.append(f"{result}: the wait was longer than twice its limit")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure a fused mixture on this machine's GPU."""
    chosen = gpu_attention.options((__doc__ or "").splitlines()[0], 400, arguments)
    deadline, described = time.monotonic() + chosen.limit_s, gpu_attention.describe()
    shapes = TINY if chosen.tiny else FULL
    results: list[Result] = machine.read_results(chosen.json)
    num_failed = 0
    for measure in MEASURES:
        kind = measure.__name__.removeprefix("measure_")
        if any(result["kind"] == kind for result in results):
            continue
        if time.monotonic() > deadline:
            print(f"{chosen.limit_s} s are over; the same command goes on where this one stopped")
            break
        found = gpu_attention.attempt(kind, lambda measure=measure: list(measure(shapes)))
        num_failed += found is None
        results.extend(found or [])
        for result in found or []:
            print(" ".join(f"{key}={value}" for key, value in result.items()), flush=True)
        if chosen.json:
            machine.write_results(chosen.json, results, described)
    broken = wrong(results) + ([] if chosen.tiny else broken_claims(results))
    print("\n".join(broken) or "every claim holds for what was measured")
    sys.exit(1 if num_failed or broken else 0)


if __name__ == "__main__":
    main()
