"""A mixture of experts on CPUs: one native call against its parts, and two processors against one.

    python benchmarks/moe_cpu.py [--quick] [--only PART ...] [--json PATH]

Enters: nothing; weights are drawn, in the widths of preset `small`. Only whole steps need its
checkpoint. Leaves: tables, and a list of {part, instances, rows, late_ms, straggler_ms, is_tcp,
variant, min_us, median_us, us}; exit status 1 if a claim does not hold. Does not know: how tasks
are made.

Variants of a point run turn by turn, so that a drift of the machine meets all alike; a ratio is the
median of the rounds' ratios. All points are visited three times, because what other tenants of a
machine do to its memory lasts for minutes. Each instance is a process. Times are of one layer, in
microseconds; in the parts `step` and `service` of a step.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from intervals import median_interval
from machine import TwoProcesses, describe, two_processes, write_results
from moe_points import (
    CALL,
    EARLY,
    PART_NAMES,
    PARTS,
    POINTS,
    TWO,
    WHOLE_STEPS,
    MixturePoint,
    claims,
    result_of,
)
from rich.console import Console
from rich.table import Table
from service import checkpoint_of, decode, random_prompts

from data_plane.model.config import ModelConfig
from data_plane.model.weights import LayerWeights, MlpWeights, MoeWeights, slots_of
from data_plane.moe.all_to_all_cpu import ExpertExchange
from data_plane.moe.mixture import MoeSchedule
from data_plane.native.kernels import NativeKernels
from data_plane.native.mixture import NativeMixtures
from data_plane.native.receiver import receive_puts
from data_plane.profiling.batch import BatchRequest
from data_plane.profiling.cluster import measuring
from data_plane.profiling.late_puts import LateExchange
from data_plane.transport.regions import TensorExchange, step_layout
from data_plane.transport.segments import Segments
from data_plane.transport.shared_memory import unlink_cluster
from data_plane.transport.shm import ShmExchange
from data_plane.transport.tcp_server import TcpSegmentServer
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.limits import LimitsConfig
from nanocp.config.whole import Config
from nanocp.serve.process import serving
from nanocp.serve.service import member_environment
from nanocp.values.experts import home_experts
from nanocp.values.members import Peer

MAX_ROWS = 128
STEP_LENGTH = 256
REPEATS = 3
"""How often the layers follow each other in what is timed: its ends count little."""
_LATE = "late"
"""The end of the name of segments that puts reach late."""
Times = dict[tuple[MixturePoint, str], list[float]]
"""(point, variant) -> microseconds, one for each round."""


def main(
    quick: Annotated[
        bool,
        typer.Option(
            help="Under a minute: few rounds; no whole step unless --only asks for it; no claim."
        ),
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Measure only this part: {', '.join(PART_NAMES)}.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    kernels: Annotated[str, typer.Option(help="Instructions: avx2, avx512, amx.")] = "",
    json: Annotated[
        Path | None, typer.Option(help="Write the results here, the machine beside it.")
    ] = None,
) -> None:
    """Measure every point, show the ratios, judge the claims."""
    console, load_before = Console(), os.getloadavg()[0]
    wanted = set(only or PART_NAMES) - set(WHOLE_STEPS if quick and not only else ())
    unknown = wanted - set(PART_NAMES)
    if unknown:
        raise typer.BadParameter(f"{unknown}; parts are {', '.join(PART_NAMES)}", param_hint="only")
    here = two_processes()
    visits, rounds, layers = (1, 8, 2) if quick else (3, 20, 8)
    times: dict[tuple[MixturePoint, str], list[float]] = defaultdict(list)
    for visit in range(visits):
        console.print(f"visit {visit + 1} of {visits}")
        for instances, is_tcp in ((1, False), (2, False), (2, True), (4, False)):
            alike = [p for p in POINTS if (p.instances, p.is_tcp) == (instances, is_tcp)]
            if points := [p for p in alike if p.part in wanted - set(WHOLE_STEPS)]:
                with members(instances, is_tcp, layers, dtype, kernels) as pipes:
                    for point in points:
                        measure(pipes, point, rounds, console, times)
        if "step" in wanted:
            measure_steps([p for p in POINTS if p.part == "step"], dtype, times)
        if "service" in wanted:
            points = [p for p in POINTS if p.part == "service"]
            measure_services(points, max(1, rounds // 4), dtype, console, times)
    results = [result_of(point, variant, us) for (point, variant), us in times.items()]
    wrong = show(results, console, here)
    if json is not None:
        about = {"layers": layers, "dtype": dtype, "kernels": kernels or "fastest"}
        machine = describe(load_before) | {"two_processes_over_one": here._asdict()}
        write_results(json, results, machine | about)
    if quick:
        console.print("--quick: two layers, few rounds. The claims are about the full run.")
    raise typer.Exit(bool(wrong) and not quick)


# --- mixtures


@contextmanager
def members(
    num_instances: int, is_tcp: bool, num_layers: int, dtype: str, kernels: str
) -> Iterator[list[Connection]]:
    """Processes with an instance's mixtures each, ready to run them."""
    context, cluster_id = multiprocessing.get_context("spawn"), secrets.token_hex(4)
    pipes, processes = [], []
    try:
        for instance in range(num_instances):
            ours, theirs = context.Pipe()
            where = (instance, num_instances, cluster_id, is_tcp, num_layers, dtype, kernels)
            process = context.Process(target=_run_member, args=(*where, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        addresses = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(addresses)
        for pipe in pipes:
            pipe.recv()
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()
        unlink_cluster(cluster_id)
        unlink_cluster(cluster_id + _LATE)


def in_turn(variants: Sequence[str], number: int) -> Sequence[str]:
    """The order of a round: every second one runs them backwards, so that drift hits all alike."""
    return variants[:: -1 if number % 2 else 1]


def measure(
    pipes: Sequence[Connection], point: MixturePoint, rounds: int, console: Console, times: Times
) -> None:
    """Run the variants of a point turn by turn; the slowest instance counts."""
    with console.status(f"{point.part}: {point.instances} instances, {point.rows} rows"):
        for number in range(rounds + 1):
            for variant in in_turn(point.variants, number):
                for pipe in pipes:
                    pipe.send((variant, point.rows, point.late_ms, point.straggler_ms))
                slowest = max(pipe.recv() for pipe in pipes)
                if number:
                    times[point, variant].append(slowest)


def _run_member(
    instance: int,
    num_instances: int,
    cluster_id: str,
    is_tcp: bool,
    num_layers: int,
    dtype: str,
    kernels: str,
    pipe: Connection,
) -> None:
    torch.set_num_threads(1)
    late = Segments(cluster_id + _LATE)
    if is_tcp:
        server = TcpSegmentServer("127.0.0.1", receive_puts)
        late = Segments(late.cluster_id, server, node=f"node {instance}")
    pipe.send(late.address)
    addresses = pipe.recv()
    if is_tcp:
        late.meet([Peer(f"node {i}", address) for i, address in enumerate(addresses)])
    at_once = Segments(cluster_id)
    member = _Member(instance, num_instances, at_once, late, num_layers, dtype, kernels)
    pipe.send(None)
    while True:
        pipe.send(member.run(*pipe.recv()))


class _Member:
    """An instance that has mixtures and nothing else."""

    def __init__(
        self,
        instance: int,
        num_instances: int,
        at_once: Segments,
        late: Segments,
        num_layers: int,
        dtype: str,
        kernels: str,
    ) -> None:
        self._instance, self._num_instances = instance, num_instances
        model = ModelConfig.from_folder(checkpoint_of("small"))
        self._dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        one = NativeKernels(self._dtype, kernels)
        layers = _draw(model, one, instance, num_instances, num_layers, self._dtype)
        bounds = BoundsConfig(max_rows=MAX_ROWS, max_attention_rows=MAX_ROWS)
        layout = step_layout(bounds, DataPlaneConfig(dtype=dtype), model)
        where = (instance, num_instances, layout, LimitsConfig())
        self._late = LateExchange.create(late, *where)
        self._late.connect(60_000)
        shared = ShmExchange.create(at_once, *where)
        shared.connect(60_000)
        exchange = TensorExchange(shared, layout)

        def in_one_call(
            kernels: NativeKernels,
            schedule: MoeSchedule = MoeSchedule.BARRIER,
            exchange: TensorExchange = exchange,
        ) -> NativeMixtures:
            return NativeMixtures(exchange, model, layers, kernels, MAX_ROWS, _quiet, schedule)

        self._mixtures: dict[str, Any] = {
            PARTS: ExpertExchange(exchange, model, layers, one, _quiet),
            CALL: in_one_call(one),
            EARLY: in_one_call(one, MoeSchedule.ARRIVAL),
        }
        later = TensorExchange(self._late, layout)
        self._late_mixtures = {
            CALL: in_one_call(one, exchange=later),
            EARLY: in_one_call(one, MoeSchedule.ARRIVAL, later),
        }
        if num_instances == 1:
            self._mixtures[TWO] = in_one_call(NativeKernels(self._dtype, kernels, 2))
        generator = torch.Generator().manual_seed(instance)
        self._rows = torch.randn(num_layers, MAX_ROWS, model.hidden_size, generator=generator)
        self._rows = self._rows.to(self._dtype)
        self._live = torch.ones(MAX_ROWS, dtype=torch.bool)

    @torch.inference_mode()
    def run(self, variant: str, rows: int, late_ms: float, straggler_ms: float) -> float:
        """Microseconds of a layer, the mean over all layers."""
        self._late.late_s = late_ms / 1000
        mixtures = self._late_mixtures[variant] if late_ms else self._mixtures[variant]
        live = self._live[:rows]
        began = time.perf_counter()
        for layer in [*range(len(self._rows))] * REPEATS:
            if straggler_ms and layer % self._num_instances == self._instance:
                time.sleep(straggler_ms / 1000)
            x_BX = self._rows[layer, :rows]
            for _ in mixtures.phases(x_BX, x_BX, live, layer):
                pass
        return (time.perf_counter() - began) / len(self._rows) / REPEATS * 1e6


def _quiet(phase: str) -> None:
    pass


def _draw(
    model: ModelConfig,
    kernels: NativeKernels,
    instance: int,
    num_instances: int,
    num_layers: int,
    dtype: torch.dtype,
) -> list[LayerWeights]:
    """Draw the mixtures of an instance: experts lie apart, but have equal values."""
    generator = torch.Generator().manual_seed(0)
    hidden, inner, experts = model.hidden_size, model.expert_size, model.num_experts
    gate_up = (torch.randn(2 * inner, hidden, generator=generator) * hidden**-0.5).to(dtype)
    down = (torch.randn(hidden, inner, generator=generator) * inner**-0.5).to(dtype)

    def mlp() -> MlpWeights:
        return MlpWeights(kernels.linear(gate_up), kernels.linear(down))

    here = home_experts(experts, instance, num_instances)
    moes = [
        MoeWeights(
            # Scores of 1 would be ties, which the experts of the first instance win.
            gate=kernels.gate_weight(
                torch.randn(experts, hidden, generator=generator) * hidden**-0.5
            ),
            gate_bias=torch.zeros(experts),
            slot_E=slots_of(here, experts),
            mlps=[mlp() for _ in here],
            shared=mlp() if model.num_shared_experts else None,
        )
        for _ in range(num_layers)
    ]
    nothing: Any = None
    return [LayerWeights(nothing, nothing, nothing, nothing, nothing, moe) for moe in moes]


# --- whole steps


def measure_steps(points: Sequence[MixturePoint], dtype: str, times: Times) -> None:
    """Time whole steps of one instance; each variant is a process of its own."""
    settings = {PARTS: (1, "exchange"), CALL: (1, "fused"), TWO: (2, "fused")}
    base = Config(cluster=ClusterConfig(num_instances=1, num_frames=256))
    for variant, (threads, dispatch) in settings.items():
        data_plane = replace(
            base.data_plane,
            dtype=dtype,
            threads_per_instance=threads,
            dispatch_backend=dispatch,
        )
        config = replace(base, data_plane=data_plane)
        checkpoint = checkpoint_of("small")
        with measuring(config, checkpoint, member_environment(config)) as cluster:
            for point in points:
                batch = [BatchRequest(STEP_LENGTH, (0,)) for _ in range(point.rows)]
                (phases,) = cluster.measure(batch, 9)
                model = ModelConfig.from_folder(checkpoint)
                dense = sum(phases[:3]) * model.num_layers
                moe = sum(phases[3:5]) * (model.num_layers - model.num_dense_layers)
                times[point, variant].append(dense + moe + phases.step_us)


def measure_services(
    points: Sequence[MixturePoint], rounds: int, dtype: str, console: Console, times: Times
) -> None:
    """Time steps of two services with all that a service does, moe_schedule barrier and auto."""
    checkpoint = checkpoint_of("small")
    with ExitStack() as held:
        services = {}
        for variant, schedule in ((CALL, "barrier"), (EARLY, "auto")):
            settings = {
                "data_plane.dtype": dtype,
                "data_plane.threads_per_instance": 1,
                "data_plane.dispatch_backend": "fused",
                "data_plane.moe_schedule": schedule,
            }
            started = serving(checkpoint, points[0].instances, settings, ray=False)
            services[variant] = held.enter_context(started)
        for point in points:
            batch = point.rows * point.instances
            prompts = random_prompts(checkpoint, batch, STEP_LENGTH)
            for number in range(rounds + 1):
                for variant in in_turn(list(services), number):
                    target = services[variant].target
                    steady = asyncio.run(decode(target, prompts, 32 if number else 2))
                    if number:
                        times[point, variant].append(1e6 * batch / steady.tokens_per_s)
                console.print(f"{_name(point)}: round {number} of {rounds}")


# --- showing


def show(results: Sequence[dict[str, Any]], console: Console, here: TwoProcesses) -> list[str]:
    """Print a line for each variant, with its ratio to the first; returns the claims that fail.

    A ratio is the median of the rounds', and beside it stands its 95% interval. A bound that is
    below the median but within the interval is not judged.

    here: what two processes do on this machine. That two processors win less than is asked is not
    judged if these do less.
    """
    table = Table(title=f"microseconds of a layer, of a step in {', '.join(WHOLE_STEPS)}")
    for name in ("point", "variant", "min", "median", "of the first"):
        table.add_column(name, justify="left" if name in ("point", "variant") else "right")
    judged, wrong = [], []
    for point in POINTS:
        of_point = {
            r["variant"]: r
            for r in results
            if all(r[name] == getattr(point, name) for name in point._fields if name in r)
        }
        for variant in (variant for variant in point.variants if variant in of_point):
            result, first = of_point[variant], of_point[point.variants[0]]
            table.add_row(
                _name(point) if result is first else "",
                variant,
                f"{result['min_us']:.0f}",
                f"{result['median_us']:.0f}",
                f"{median(ratios_of(result, first)):.3f}",
            )
        for claim in claims(point) if of_point else []:
            ratios = ratios_of(of_point[claim.variant], of_point[claim.other])
            ratio, (low, high) = median(ratios), median_interval(np.array(ratios))
            said = f"{_name(point)}: {claim.variant} takes {ratio:.3f} of {claim.other}"
            said = f"{said} ({low:.3f} to {high:.3f}), at most {claim.at_most}"
            if ratio <= claim.at_most:
                judged.append(f"holds: {said}")
                continue
            reason = here.why_not(1 / claim.at_most) if claim.variant == TWO else ""
            if low <= claim.at_most:
                reason = reason or "not judged: the bound is in the interval"
            judged.append(f"{reason or 'DOES NOT HOLD'}: {said}")
            if not reason:
                wrong.append(said)
    console.print(table)
    console.print(f"two processes over one: {here}")
    for sentence in judged:
        console.print(sentence)
    return wrong


def ratios_of(result: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """Divide times of one round, which drift together."""
    return [one / of for one, of in zip(result["us"], other["us"], strict=True)]


def _name(point: MixturePoint) -> str:
    parts = [f"{point.part}, {point.rows} rows"]
    if point.straggler_ms:
        parts.append(f"a straggler of {point.straggler_ms} ms")
    if point.late_ms:
        parts.append(f"puts {point.late_ms} ms late")
    return ", ".join(parts)


if __name__ == "__main__":
    typer.run(main)
