"""What overlap is worth on one GPU: interference, the engine's streams, two lanes in one graph.

    PYTHONPATH=. python3 -m benchmarks.gpu.gpu_overlap --json PATH [--limit-s 480] [--tiny]

Needs torch, no network. Waits for a peer are a kernel that spins for a given time.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from statistics import median, pstdev
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.kit.bench import BenchRun, Claim, Result, at_least, at_most, bench
from data_plane.graph.cuda_graphs import CudaGraphs
from data_plane.graph.lane_parts import OTHER, LanePart
from nanocp.overlap.engine.backend import overlap
from nanocp.overlap.engine.engine import OverlapEngine
from nanocp.overlap.engine.streams import CudaStreams
from nanocp.overlap.interference import Interference
from nanocp.overlap.ops import SplitFunc
from nanocp.overlap.paper import TABLE_3
from nanocp.overlap.policies.orders import NETWORK, NanoFlow

GEMMS = ((64, 7168, 2048), (512, 7168, 2048), (2048, 8192, 3584))
"""(rows, inputs, outputs): DeepSeek-V3's experts, LLaMA-2 70B's up and gate on one of eight."""
NUM_SMS = (8, 16, 32, 64)
MAX_LANES = 0.85
"""Claim: two lanes take at most this much of one lane where waits are as long as compute."""
MAX_OF_WHOLE = 1.0
"""Claim: the engine's halves take at most this much of the model's whole batch, where what it sends
takes as long as it computes. Neither is captured: the time is from the first launch to the end."""
MAX_STD = 0.05
"""The paper's: how far R -> P differs between shapes (N 4.1.1)."""
ROUNDS = 30
_CYCLES_PER_LAUNCH = 40_000
"""More than a launch takes: about 20 us."""
_CALLS = 20
"""Calls of one measurement: the two sides of a pair run for about as long."""


def interference(mechanism: str, shape: tuple[int, int, int]) -> Iterator[Result]:
    """A GEMM beside a kernel that reads memory, and beside a copy to the host."""
    rows, inputs, outputs = shape
    left = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda")
    right = torch.randn(inputs, outputs, dtype=torch.bfloat16, device="cuda")
    memory = torch.zeros(2**28, dtype=torch.uint8, device="cuda")
    host = torch.empty(2**24, dtype=torch.uint8, pin_memory=True)
    result = torch.empty(rows, outputs, dtype=torch.bfloat16, device="cuda")
    others: dict[str, Callable[[], Any]] = {
        "memory": lambda: memory.view(torch.int64).sum(),
        "copy to the host": lambda: host.copy_(memory[: host.numel()], non_blocking=True),
    }
    for name, other in others.items():
        pair = beside(lambda: torch.mm(left, right, out=result), other, mechanism)
        yield {"kind": "interference", "mechanism": mechanism, "shape": shape, "of": name, **pair}


def beside(gemm: Callable[[], Any], other: Callable[[], Any], mechanism: str) -> Result:
    """R, the GEMM's speed beside the other over that alone, and P, the other's."""
    streams = streams_by(mechanism)
    alone = [_us(partial(_repeat, call, _CALLS)) / _CALLS for call in (gemm, other)]
    # Both sides run for as long, so that each is beside the other from its begin to its end.
    counts = [max(1, round(_CALLS * max(alone) / us)) for us in alone]
    ends_us = [0.0, 0.0]
    for _ in range(ROUNDS):
        for side, us in enumerate(_together((gemm, other), counts, streams)):
            ends_us[side] += us / ROUNDS
    shortest = min(ends_us)
    # What is left of the longer side after the shorter one's end runs alone.
    speeds = []
    for side in (0, 1):
        work_us = counts[side] * alone[side]
        speeds.append(round((work_us - (ends_us[side] - shortest)) / shortest, 3))
    return {"r": speeds[0], "p": speeds[1], "alone_us": [round(us, 1) for us in alone]}


def _together(
    calls: Sequence[Callable[[], Any]], counts: Sequence[int], streams: CudaStreams
) -> list[float]:
    """Microseconds from the common begin to the end of each side."""
    begin = torch.cuda.Event(enable_timing=True)
    ends = [torch.cuda.Event(enable_timing=True) for _ in calls]
    torch.cuda.synchronize()
    torch.cuda._sleep(_CYCLES_PER_LAUNCH * sum(counts))  # meanwhile both sides are queued
    begin.record()
    with streams.forked():
        for name, call, count, end in zip(("gemm", "other"), calls, counts, ends, strict=True):
            with streams.on(name):
                _repeat(call, count)
                end.record()
    torch.cuda.synchronize()
    return [1000 * begin.elapsed_time(end) for end in ends]


class PartStreams(CudaStreams):
    """Streams of which `other` has so many multiprocessors to itself."""

    def __init__(self, device: torch.device, num_sms: int) -> None:
        super().__init__(device)
        self._context = green_context(num_sms, device)  # the stream ends with it
        self._streams["other"] = self._context.Stream()


def green_context(num_sms: int, device: torch.device) -> Any:
    """A green context with that many multiprocessors.

    Raises RuntimeError if torch or the driver lacks them.
    """
    from torch.cuda import green_contexts

    made = green_contexts.GreenContext
    if not green_contexts.SUPPORTED or not hasattr(made, "Stream"):
        raise RuntimeError(f"torch {torch.__version__} has no streams of green contexts")
    known = inspect.signature(made.create).parameters
    number = "device_id" if "device_id" in known else "device"
    arguments: dict[str, Any] = {"num_sms": num_sms, number: device.index or 0}
    return made.create(**arguments)


def streams_by(mechanism: str) -> CudaStreams:
    """Two streams; with `N SMs` the second one has so many multiprocessors to itself."""
    device = torch.device("cuda", 0)
    if mechanism == "two streams":
        return CudaStreams(device)
    return PartStreams(device, int(mechanism.split()[0]))


@torch.library.custom_op("overlap_benchmark::sent", mutates_args=())
def sent(rows: Tensor, cycles: int, cycles_per_row: int) -> Tensor:
    """Stands for a collective: a kernel on one block that takes as long as a link would."""
    torch.cuda._sleep(1 + cycles + cycles_per_row * rows.shape[0])
    return rows.clone()


@sent.register_fake
def _(rows: Tensor, cycles: int, cycles_per_row: int) -> Tensor:
    return torch.empty_like(rows)


class Layers(nn.Module):
    """GEMMs, each of whose results is sent over a link with latency and a rate."""

    cycles = cycles_per_row = 0

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = sent(torch.relu(layer(rows)), self.cycles, self.cycles_per_row)
        return rows


@torch.no_grad()
def lanes(rows: int, width: int, waits_of_compute: float) -> Result:
    """A step in two lanes, captured as one graph, against the whole step captured."""
    model = Layers(width, 8).to("cuda", torch.bfloat16).eval()
    batch = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda")
    pool: Any = SimpleNamespace(device=torch.device("cuda", 0), start=lambda: None)
    compute_us = _us(_captured(pool, model, [batch]))
    cycles = _cycles_per_us() * waits_of_compute * compute_us / 8
    model.cycles = round(cycles)  # each lane waits as often as the whole
    one_us = _us(_captured(pool, model, [batch]))
    two_us = _us(_captured(pool, model, list(batch.chunk(2))))
    return {
        "kind": "lanes",
        "rows": rows,
        "waits_of_compute": waits_of_compute,
        "one_us": round(one_us, 1),
        "two_us": round(two_us, 1),
        "ratio": round(two_us / one_us, 3),
        "hidden": round((one_us - two_us) / max(one_us - compute_us, 1e-3), 3),
    }


def _captured(pool: Any, model: nn.Module, parts: Sequence[Tensor]) -> Callable[[], None]:
    for part in parts:
        model(part)
    torch.cuda.synchronize()
    contexts: list[Any] = list(parts)
    return CudaGraphs(*[(pool, OnePart(model))] * len(parts)).capture(*contexts)


class OnePart(NamedTuple):
    """A model as the step of a lane, in one part."""

    run: Callable[[Any], Any]
    tags: Sequence[str] = (OTHER.tag,)

    def phases(self, context: Any) -> Iterator[LanePart]:
        """Yield the part, then run it."""
        yield OTHER
        self.run(context)


@torch.no_grad()
def engine(rows: int, width: int) -> Result:
    """The overlap engine in halves, with communication on a stream of its own; whole beside it."""
    torch._dynamo.reset()
    model = Layers(width, 8).to("cuda", torch.bfloat16).eval()
    batch = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda")
    compute_us = _us(lambda: model(batch))
    model.cycles_per_row = round(_cycles_per_us() * compute_us / 8 / rows)
    engines: list[OverlapEngine] = []
    halves = overlap(model, NanoFlow((SplitFunc("sent.*", NETWORK),)), engines.append)
    is_equal = torch.equal(halves(batch), model(batch)) and torch.equal(halves(batch), model(batch))
    (engine,) = engines
    assert all(engine.recordings.values()), "the batch was not split"
    whole_us, halves_us = _us(lambda: model(batch)), _us(lambda: halves(batch))
    return {
        "kind": "engine",
        "rows": rows,
        "equal": is_equal,
        "whole_us": round(whole_us, 1),
        "halves_us": round(halves_us, 1),
        "ratio": round(halves_us / whole_us, 3),
    }


def claims(results: Sequence[Result]) -> Iterator[Claim]:
    """What is claimed of lanes and of the engine; one fails if none of them was measured."""
    claimed = [result for result in results if result["kind"] in ("lanes", "engine")]
    if not claimed:
        yield Claim("something that is claimed was measured", False)
    for result in claimed:
        rows = f"{result['rows']} rows"
        if result["kind"] == "engine":
            yield Claim(f"{rows}: halves give the bits of the whole", result["equal"])
            yield at_most(f"{rows}: halves take {{}} of the whole", result["ratio"], MAX_OF_WHOLE)
        elif 0.7 <= result["waits_of_compute"] <= 1.2:
            what = f"{rows}, waits of {result['waits_of_compute']} of compute"
            yield at_most(f"{what}: two lanes take {{}} of one", result["ratio"], MAX_LANES)
            yield at_least(f"{what}: {{}} of the waits are hidden", result["hidden"], 0.5)


def spread(results: Sequence[Result]) -> Iterator[str]:
    """R + P by mechanism, and how much it differs between shapes; the paper's bound beside it."""
    pairs: dict[tuple[str, str], list[float]] = {}
    for result in results:
        if result["kind"] == "interference":
            key = result["mechanism"], result["of"]
            pairs.setdefault(key, []).append(result["r"] + result["p"])
    for (mechanism, other), sums in pairs.items():
        mean = sum(sums) / len(sums)
        yield (
            f"{mechanism}, beside {other}: R + P is {mean:.2f}, its deviation between shapes "
            f"{pstdev(sums) / mean:.1%} (paper: {MAX_STD:.0%})"
        )


def table(results: Sequence[Result]) -> str:
    """A cluster file's `interference`, with the network of an A100."""
    points = [(0.0, 0.0)]
    for share, speed in sorted(
        (round(1 - each["r"], 3), each["p"])
        for each in results
        if each["kind"] == "interference"
        and (each["mechanism"], each["of"]) == ("two streams", "memory")
    ):
        if points[-1][0] < share < 1 and points[-1][1] <= speed <= 1:
            points.append((share, speed))
    measured = Interference(
        (*points, (1.0, 1.0)), TABLE_3.network, "here by memory, on an A100 by the network"
    )
    return f"interference: {json.dumps(asdict(measured))}\n"


def _repeat(call: Callable[[], Any], count: int) -> None:
    for _ in range(count):
        call()


def _us(call: Callable[[], Any]) -> float:
    """Microseconds of a call, the median of some."""
    call()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * begin.elapsed_time(end))
    return median(times)


def _cycles_per_us() -> float:
    cycles = 1_000_000
    return cycles / _us(lambda: torch.cuda._sleep(cycles))


def measurements(is_tiny: bool) -> Iterator[tuple[tuple[Any, ...], Callable[[], list[Result]]]]:
    """(what, how) of everything that is measured, most wanted first."""
    rows, width = ((64,), 256) if is_tiny else ((64, 256, 1024), 4096)
    for count in rows:
        for share in (0.0, 0.7, 1.0, 1.2, 2.0):
            yield ("lanes", count, share), lambda n=count, s=share: [lanes(n, width, s)]
        yield ("engine", count), lambda n=count: [engine(n, width)]
    # Green contexts ended the process on an H200, so nothing else comes after them.
    for mechanism in ("two streams", *(f"{count} SMs" for count in NUM_SMS)):
        for shape in ((64, 256, 256),) if is_tiny else GEMMS:
            how = partial(interference, mechanism, shape)
            yield ("interference", mechanism, *shape), lambda how=how: list(how())


@bench(on_gpu_s=480)
def main(run: BenchRun) -> None:
    """Measure on this machine's GPU."""
    done = {tuple(result["what"]) for result in run.results}
    for what, measure in measurements(run.is_tiny):
        if what not in done:
            run.attempt(what, lambda w=what, m=measure: [{"what": [*w], **each} for each in m()])
    run.say("\n".join(spread(run.results)))
    if any(result["kind"] == "interference" for result in run.results):
        run.say("For a cluster file:\n" + table(run.results))
    if not run.is_tiny:
        run.judge(claims(run.results))


if __name__ == "__main__":
    main()
