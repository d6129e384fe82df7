"""A fused mixture of experts against the split path on one GPU, at DeepSeek-V3's layer.

    PYTHONPATH=.:tests python3 benchmarks/gpu_moe.py --json PATH [--limit-s 400] [--tiny]

The split path is the gate, the exchange's dispatch, the grouped GEMM, the shared expert and the
combine, each a few launches. The fused one is one launch for all. Results are compared, and must be
equal bit by bit over replays with a late stream; a peer that stays away must be an error. Times of
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
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import gpu_attention
import machine
import torch
from gpu_shapes import deepseek_v3
from torch import Tensor

from data_plane.model.config import ModelConfig
from data_plane.model.fp8_weight import Fp8Weight
from data_plane.model.linear import PlainLinear
from data_plane.model.weights import MlpWeights, MoeWeights, slots_of
from data_plane.moe.all_to_all_gpu import GpuExpertExchange, GpuMixtures
from data_plane.moe.fused import FusedMoe, FusedTiles, GateTiles, fused_weights
from data_plane.moe.fused_state import (
    CHOOSE,
    DISPATCH,
    GATE,
    INNER,
    OUTPUT,
    ROUTE,
    FusedRows,
    FusedWeights,
)
from data_plane.moe.gpu_weights import GpuWeights
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

    layer: ModelConfig
    """The model, whatever its number of experts."""
    local_experts: tuple[int, ...]
    instances: tuple[int, ...]
    rows: tuple[int, ...]
    forms: tuple[str, ...]
    """bf16, fp32 or fp8: dtype of the weights; with fp8 rows are bf16, or fp32 if tiny."""
    replays: int
    tiles: FusedTiles | None
    timeout_ms: float

    def model(self, num_experts: int) -> ModelConfig:
        """The model with so many experts; a gate of few has no groups."""
        num_groups = 8 if num_experts >= 64 else 1
        return replace(
            self.layer,
            num_experts=num_experts,
            num_experts_per_token=min(self.layer.num_experts_per_token, num_experts),
            num_groups=num_groups,
            num_groups_per_token=-(-num_groups // 2),
        )


FULL = MoeShapes(
    replace(deepseek_v3(), fp8_block=(128, 128)), (8, 32), (1, 2, 4), (1, 8, 32, 128, 256),
    ("bf16", "fp8"), 1000, None, 1000.0,
)  # fmt: skip
TINY = MoeShapes(
    replace(
        deepseek_v3(), hidden_size=32, expert_size=16, num_experts_per_token=2, fp8_block=(16, 64)
    ),
    (2,), (1, 2), (2,), ("fp32", "fp8"), 2,
    FusedTiles(4, 16, 16, 32, 1, 4, 1, GateTiles(4, 4, 16, 2)), 0.02,
)  # fmt: skip


class MoeCase:
    """Instances on this card, each with a layer's rows and weights, in both forms."""

    def __init__(
        self, shapes: MoeShapes, num_instances: int, num_here: int, num_rows: int, form: str
    ) -> None:
        self.shapes, self.num_rows, self.num_here = shapes, num_rows, num_here
        self.is_card = torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if self.is_card else torch.device("cpu")
        is_wide = form == "fp32" or not self.is_card
        self.dtype = torch.float32 if is_wide else torch.bfloat16
        self.everyone = range(num_instances)
        self.model = model = shapes.model(num_instances * num_here)
        value, per_row = "float32" if is_wide else "uint16", model.num_experts_per_token
        layout = mixture_layout(num_rows, per_row, model.hidden_size, value)
        places = RegionPlaces(layout, num_instances)
        sizes: dict[str, Any] = {
            "num_instances": num_instances, "max_rows": num_rows, "dtype": self.dtype,
            "device": self.device,
        }  # fmt: skip
        # Epochs of the two forms differ, so each has memory of its own.
        ends: list[list[GpuExchange]] = [[], []]
        for own in ends:
            for memory in PeerMemory.create_all(places, self.device):
                own.append(GpuExchange(places, self.device, shapes.timeout_ms))
                own[-1].attach(memory)
        self.exchanges = [exchange for own in ends for exchange in own]
        gate = torch.randn(model.num_experts, model.hidden_size, device=self.device)
        self.gate = gate * model.hidden_size**-0.5
        self.split, self.fused, self.weights, self.experts = [], [], [], []
        for i, (exchange, other) in enumerate(zip(*ends, strict=True)):
            moe, fused_experts = self._weights(i, num_instances, form)
            self.weights.append(fused_weights(moe, fused_experts))
            self.fused.append(
                FusedMoe(
                    other, model, num_here=num_here, is_fp8=form == "fp8", tiles=shapes.tiles,
                    **sizes,
                )
            )  # fmt: skip
            programs = self.fused[-1].num_programs // num_instances
            self.fused[-1].num_programs = max(1, programs)
            all_to_all = GpuExpertExchange(
                exchange, num_experts=model.num_experts, per_row=per_row,
                hidden_size=model.hidden_size, **sizes,
            )  # fmt: skip
            layers: Any = SimpleNamespace(layers=[SimpleNamespace(moe=moe)])
            split = GpuWeights(layers, (self.experts[i],))
            self.split.append(GpuMixtures(all_to_all, model, split))
        self.x = torch.randn(num_instances, num_rows, model.hidden_size, device=self.device)
        self.x = self.x.to(self.dtype)
        self.residual = torch.zeros_like(self.x)
        self.live = torch.ones(num_instances, num_rows, dtype=torch.bool, device=self.device)

    def _weights(
        self, instance: int, num_instances: int, form: str
    ) -> tuple[MoeWeights, GroupedExperts]:
        """Draw a layer's weights: what both forms read, and the experts with the shared one."""
        model, num_here = self.model, self.num_here
        home = home_experts(model.num_experts, instance, num_instances)
        place_E = slots_of(home, model.num_experts).to(self.device)

        def weight(rows: int, columns: int) -> Tensor | Fp8Weight:
            drawn = torch.randn(num_here + 1, rows, columns, device=self.device) * columns**-0.5
            return in_fp8(drawn, model.fp8_block) if form == "fp8" else drawn.to(self.dtype)

        def part(weight: Tensor | Fp8Weight, which: slice | int) -> Tensor | Fp8Weight:
            if isinstance(weight, Tensor):
                return weight[which]
            return weight._replace(values=weight.values[which], scale=weight.scale[which])

        width = model.expert_size
        both = weight(2 * width, model.hidden_size), weight(model.hidden_size, width)
        routed = [part(each, slice(num_here)) for each in both]
        self.experts.append(GroupedExperts(TritonGemm(), place_E, *routed))
        plain = [
            each if isinstance(each, Tensor) else each.dequantised().to(self.dtype)
            for each in (part(each, num_here) for each in both)
        ]
        shared = MlpWeights(*map(PlainLinear, plain))
        bias = torch.zeros(model.num_experts, device=self.device)
        moe = MoeWeights(self.gate, bias, place_E, [], shared)
        return moe, GroupedExperts(TritonGemm(), place_E, *both)

    def _phases(self, mixture: GpuMixtures, i: int) -> Any:
        return mixture.phases(self.residual[i], self.x[i], self.live[i], 0)

    def run_split(self) -> list[Tensor]:
        """Run a layer of all instances by its parts, in turn."""
        return in_turn([self._phases(mixture, i) for i, mixture in enumerate(self.split)])

    def arguments(self, instance: int) -> tuple[FusedRows, FusedWeights]:
        """What a fused launch of an instance takes."""
        i = instance
        rows = self.fused[i].rows(self.residual[i], self.x[i], self.live[i])
        return rows, self.weights[i]

    def run_fused(self) -> list[Tensor]:
        """Run a layer of all instances as one launch each, in turns."""
        arguments = [self.arguments(i) for i in self.everyone]
        in_turn([self.fused[i].turns(*arguments[i]) for i in self.everyone])
        return [rows.out for rows, _ in arguments]

    def layer(self, instance: int) -> Callable[[], Any]:
        """Make what one instance does in a layer, to be captured: it waits for its peers."""
        return lambda: self.fused[instance].launch(*self.arguments(instance))

    def check(self) -> None:
        """Raise what ended a wait."""
        for exchange in self.exchanges:
            exchange.check()

    def expert_bytes(self) -> int:
        """Bytes of an expert's weights."""
        weights = self.weights[0]
        return weights.gate_up[0].nbytes + weights.down[0].nbytes


def in_turn(generators: Sequence[Generator[None, None, Any]]) -> list[Any]:
    """Run generators to their ends, each as far as it gets without the others: their values."""
    values: dict[int, Any] = {}
    while len(values) < len(generators):
        for number, each in enumerate(generators):
            if number not in values:
                try:
                    next(each)
                except StopIteration as ended:
                    values[number] = ended.value
    return [values[number] for number in range(len(generators))]


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
            "of_a_copy_an_expert": sent / epochs / (2 * case.num_rows * fused.shape.per_row),
        }  # fmt: skip


def measure_gemm(shapes: MoeShapes) -> Iterator[Result]:
    """Time the experts' products alone: those of the fused kernel and of the grouped GEMM."""
    for case, name in cases(shapes, all_instances=False):
        fused, (rows, weights), experts = case.fused[0], case.arguments(0), case.experts[0]
        state, shape = fused.state(), fused.shape
        arguments = state, rows, weights, 0, case.num_rows

        def run(
            *queues: Any, programs: int, fused: FusedMoe = fused, arguments: Any = arguments
        ) -> None:
            for queue in queues:
                fused_roles.queue_role[(programs,)](
                    *arguments, QUEUE=queue.value, S=fused.shape,
                    num_warps=fused.tiles.num_warps, num_stages=fused.tiles.num_stages,
                )  # fmt: skip

        fused_roles.start_role[(1,)](state, case.num_rows, S=shape)
        run(GATE, CHOOSE, ROUTE, DISPATCH, programs=1)
        fused_roles.take_in_role[(1,)](state, weights, 0, S=shape)
        prepared = fused.counter.clone()

        def reset(fused: FusedMoe = fused, prepared: Tensor = prepared) -> None:
            fused.counter.copy_(prepared)

        products = partial(run, INNER, OUTPUT, programs=fused.num_programs)
        both = gpu_attention.replay_us([lambda reset=reset, run=products: (reset(), run())])
        fused_us = both - gpu_attention.replay_us([reset])
        fused.counter.zero_()
        count = prepared[shape.at_expert :][: case.num_here].clone()
        x = case.x[0].expand(case.num_here, -1, -1).contiguous()
        split_us = gpu_attention.replay_us([partial(experts.run_grouped, x, count)])
        num_bytes = int((count > 0).sum()) * case.expert_bytes()
        yield {
            "kind": "gemm", **name,
            "fused_gb_per_s": round(num_bytes / fused_us / 1e3, 1),
            "grouped_gb_per_s": round(num_bytes / split_us / 1e3, 1),
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
