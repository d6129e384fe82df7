"""A mixture of experts on CPUs: one native call against its parts, and two processors against one.

Enters: nothing; weights are drawn, in the widths of preset `small`. Only whole steps need its
checkpoint. Leaves: tables, and a list of {part, instances, rows, late_ms, straggler_ms, is_tcp,
variant, min_us, median_us, us}. Does not know: how tasks are made.

Variants of a point run turn by turn, so that a drift of the machine meets all alike; a ratio is the
median of the rounds' ratios. All points are visited three times, because what other tenants of a
machine do to its memory lasts for minutes. Each instance is a process. Times are of one layer, in
microseconds; in the parts `step` and `service` of a step.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple, get_args

import torch

from benchmarks.kit.bench import BenchRun, Claim, Interval, at_most, bench
from benchmarks.kit.machine import TwoProcesses, two_processes
from benchmarks.kit.service import checkpoint_of, decode, random_prompts
from data_plane.model.config import ModelConfig
from data_plane.model.weights import LayerWeights, MlpWeights, MoeWeights
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
from data_plane.transport.tcp.server import TcpSegmentServer
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.limits import LimitsConfig
from nanocp.config.whole import Config
from nanocp.serve.process import serving
from nanocp.serve.service import member_environment
from nanocp.values.experts import home_experts, home_table
from nanocp.values.members import Peer

PARTS, CALL, TWO, EARLY = "parts", "one call", "two processors", "arrival"
"""Variants: a call for each part of a mixture; one call, with moe_schedule barrier; that on two
processors; one call with moe_schedule arrival."""
ROWS = (8, 16, 96, 128)
"""Rows of an instance, where schedules are compared."""


class MixturePoint(NamedTuple):
    """What is measured, by every variant that it names."""

    part: str
    instances: int
    rows: int
    variants: tuple[str, ...]
    late_ms: float = 0.0
    straggler_ms: float = 0.0
    """Another instance in each layer comes so much later."""
    is_tcp: bool = False
    """Whether puts go by TCP, as between nodes."""


Part = Literal["processors", "four", "arrival", "tcp", "step", "service"]
POINTS = (
    *(MixturePoint("processors", 1, rows, (PARTS, CALL, TWO)) for rows in (1, 4, 8, 16, 32)),
    *(MixturePoint("four", 4, rows, (PARTS, CALL, EARLY)) for rows in (1, 8)),
    *(MixturePoint("arrival", 2, rows, (CALL, EARLY)) for rows in ROWS),
    *(MixturePoint("arrival", 2, rows, (CALL, EARLY), 0.0, 1.5) for rows in ROWS),
    *(MixturePoint("arrival", 2, rows, (CALL, EARLY), 1.0) for rows in ROWS),
    MixturePoint("arrival", 2, 128, (CALL, EARLY), 5.0),
    *(MixturePoint("tcp", 2, rows, (CALL, EARLY), 1.0, is_tcp=True) for rows in ROWS),
    MixturePoint("step", 1, 1, (PARTS, CALL, TWO)),
    MixturePoint("step", 1, 8, (PARTS, CALL, TWO)),
    MixturePoint("step", 1, 32, (PARTS, CALL, TWO)),
    *(MixturePoint("service", 2, rows, (CALL, EARLY)) for rows in (1, 8, 16)),
)
WHOLE_STEPS = ("step", "service")
"""Parts whose times are of a step; the others' are of a layer."""
MAX_ROWS = 128
DTYPE = "float32"
STEP_LENGTH = 256
REPEATS = 3
"""How often the layers follow each other in what is timed: its ends count little."""
_LATE = "late"
"""The end of the name of segments that puts reach late."""
Times = dict[tuple[MixturePoint, str], list[float]]
"""(point, variant) -> microseconds, one for each round."""


@bench("Under a minute: two layers, few rounds, no whole step unless --only asks for it; no claim.")
def main(
    run: BenchRun,
    only: Annotated[list[Part] | None, "Measure only this part; may be given again."] = None,
) -> None:
    """Measure every point, show the ratios, judge the claims."""
    wanted = set(only or get_args(Part)) - set(WHOLE_STEPS if run.is_quick and not only else ())
    here = two_processes()
    run.say(f"two processes over one: {here}")
    visits, rounds, layers = (1, 8, 2) if run.is_quick else (3, 20, 8)
    times: dict[tuple[MixturePoint, str], list[float]] = defaultdict(list)
    for visit in range(visits):
        run.say(f"visit {visit + 1} of {visits}")
        for instances, is_tcp in ((1, False), (2, False), (2, True), (4, False)):
            alike = [p for p in POINTS if (p.instances, p.is_tcp) == (instances, is_tcp)]
            if points := [p for p in alike if p.part in wanted - set(WHOLE_STEPS)]:
                with members(instances, is_tcp, layers) as pipes:
                    for point in points:
                        measure(pipes, point, rounds, times)
        if "step" in wanted:
            measure_steps([p for p in POINTS if p.part == "step"], times)
        if "service" in wanted:
            points = [p for p in POINTS if p.part == "service"]
            measure_services(points, max(1, rounds // 4), run.say, times)
    results = [result_of(point, variant, us) for (point, variant), us in times.items()]
    run.table("microseconds of a layer, of a step in step and service", results)
    about = {"layers": layers, "dtype": DTYPE, "kernels": "fastest"}
    run.keep(*results, two_processes_over_one=here._asdict(), **about)
    run.judge(claims(times, here), run.too_quick)


# --- mixtures


@contextmanager
def members(num_instances: int, is_tcp: bool, num_layers: int) -> Iterator[list[Connection]]:
    """Processes with an instance's mixtures each, ready to run them."""
    context, cluster_id = multiprocessing.get_context("spawn"), secrets.token_hex(4)
    pipes, processes = [], []
    try:
        for instance in range(num_instances):
            ours, theirs = context.Pipe()
            own = MixtureMember(instance, num_instances, num_layers)
            where = (own, cluster_id, is_tcp, theirs)
            process = context.Process(target=_run_member, args=where, daemon=True)
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


def measure(pipes: Sequence[Connection], point: MixturePoint, rounds: int, times: Times) -> None:
    """Run the variants of a point turn by turn; the slowest instance counts."""
    for number in range(rounds + 1):
        for variant in in_turn(point.variants, number):
            for pipe in pipes:
                pipe.send((variant, point.rows, point.late_ms, point.straggler_ms))
            slowest = max(pipe.recv() for pipe in pipes)
            if number:
                times[point, variant].append(slowest)


class MixtureMember(NamedTuple):
    """Which instance it is of how many, and how many layers it has."""

    instance: int
    num_instances: int
    num_layers: int


def _run_member(own: MixtureMember, cluster_id: str, is_tcp: bool, pipe: Connection) -> None:
    torch.set_num_threads(1)
    late = Segments(cluster_id + _LATE)
    if is_tcp:
        server = TcpSegmentServer("127.0.0.1", receive_puts)
        late = Segments(late.cluster_id, server, node=f"node {own.instance}")
    pipe.send(late.address)
    addresses = pipe.recv()
    if is_tcp:
        late.meet([Peer(f"node {i}", address) for i, address in enumerate(addresses)])
    member = _Member(own, Segments(cluster_id), late)
    pipe.send(None)
    while True:
        pipe.send(member.run(*pipe.recv()))


class _Member:
    """An instance that has mixtures and nothing else."""

    def __init__(self, own: MixtureMember, at_once: Segments, late: Segments) -> None:
        self._own = own
        model, one = ModelConfig.from_folder(checkpoint_of("small")), NativeKernels(torch.float32)
        layers = _draw(model, one, own)
        home = home_table(model.num_experts, own.num_instances)
        bounds = BoundsConfig(max_rows=MAX_ROWS, max_attention_rows=MAX_ROWS)
        layout = step_layout(bounds, DataPlaneConfig(dtype=DTYPE), model)
        where = (own.instance, own.num_instances, layout, LimitsConfig())
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
            how = kernels, MAX_ROWS, _quiet, home, schedule
            return NativeMixtures(exchange, model, layers, *how)

        self._mixtures: dict[str, Any] = {
            PARTS: ExpertExchange(exchange, model, layers, one, _quiet, home),
            CALL: in_one_call(one),
            EARLY: in_one_call(one, MoeSchedule.ARRIVAL),
        }
        later = TensorExchange(self._late, layout)
        self._late_mixtures = {
            CALL: in_one_call(one, exchange=later),
            EARLY: in_one_call(one, MoeSchedule.ARRIVAL, later),
        }
        if own.num_instances == 1:
            self._mixtures[TWO] = in_one_call(NativeKernels(torch.float32, "", 2))
        generator = torch.Generator().manual_seed(own.instance)
        shape = (own.num_layers, MAX_ROWS, model.hidden_size)
        self._rows = torch.randn(shape, generator=generator)
        self._live = torch.ones(MAX_ROWS, dtype=torch.bool)

    @torch.inference_mode()
    def run(self, variant: str, rows: int, late_ms: float, straggler_ms: float) -> float:
        """Microseconds of a layer, the mean over all layers."""
        self._late.late_s = late_ms / 1000
        mixtures = self._late_mixtures[variant] if late_ms else self._mixtures[variant]
        live = self._live[:rows]
        began = time.perf_counter()
        for layer in [*range(len(self._rows))] * REPEATS:
            if straggler_ms and layer % self._own.num_instances == self._own.instance:
                time.sleep(straggler_ms / 1000)
            x_BX = self._rows[layer, :rows]
            for _ in mixtures.phases(x_BX, x_BX, live, layer):
                pass
        return (time.perf_counter() - began) / len(self._rows) / REPEATS * 1e6


def _quiet(phase: str) -> None:
    pass


def _draw(model: ModelConfig, kernels: NativeKernels, own: MixtureMember) -> list[LayerWeights]:
    """Draw the mixtures of an instance: experts lie apart, but have equal values."""
    generator = torch.Generator().manual_seed(0)
    hidden, inner, experts = model.hidden_size, model.expert_size, model.num_experts
    gate_up = torch.randn(2 * inner, hidden, generator=generator) * hidden**-0.5
    down = torch.randn(hidden, inner, generator=generator) * inner**-0.5

    def mlp() -> MlpWeights:
        return MlpWeights(kernels.linear(gate_up), kernels.linear(down))

    here = home_experts(experts, own.instance, own.num_instances)
    moes = [
        MoeWeights(
            # Scores of 1 would be ties, which the experts of the first instance win.
            gate=kernels.gate_weight(
                torch.randn(experts, hidden, generator=generator) * hidden**-0.5
            ),
            gate_bias=torch.zeros(experts),
            held=list(here),
            mlps=[mlp() for _ in here],
            shared=mlp() if model.num_shared_experts else None,
        )
        for _ in range(own.num_layers)
    ]
    nothing: Any = None
    return [LayerWeights(nothing, nothing, nothing, nothing, nothing, moe) for moe in moes]


# --- whole steps


def measure_steps(points: Sequence[MixturePoint], times: Times) -> None:
    """Time whole steps of one instance; each variant is a process of its own."""
    settings = {PARTS: (1, "exchange"), CALL: (1, "fused"), TWO: (2, "fused")}
    base = Config(cluster=ClusterConfig(num_instances=1, num_frames=256))
    for variant, (threads, dispatch) in settings.items():
        data_plane = replace(
            base.data_plane, dtype=DTYPE, threads_per_instance=threads, dispatch_backend=dispatch
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
    points: Sequence[MixturePoint], rounds: int, say: Callable[[str], None], times: Times
) -> None:
    """Time steps of two services with all that a service does, moe_schedule barrier and auto."""
    checkpoint = checkpoint_of("small")
    with ExitStack() as held:
        services = {}
        for variant, schedule in ((CALL, "barrier"), (EARLY, "auto")):
            settings = {
                "data_plane.dtype": DTYPE,
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
                say(f"{_name(point)}: round {number} of {rounds}")


# --- showing


def claims(times: Times, here: TwoProcesses) -> Iterator[Claim]:
    """What is claimed of the points that were measured.

    A ratio is the median of the rounds', whose times drift together. A bound that is below it but
    within its 95% interval is not judged. here: what two processes do on this machine. That two
    processors win less than is asked is not judged if these do less.
    """
    for point in POINTS:
        for variant, other, most in bounds(point) if (point, CALL) in times else ():
            pairs = zip(times[point, variant], times[point, other], strict=True)
            ratio, low, high = Interval.of([one / of for one, of in pairs])
            what = f"{_name(point)}: {variant} takes {{}} of {other} ({low:.3f} to {high:.3f})"
            claim = at_most(what, ratio, most)
            if not claim.holds:
                claim = claim.unless(here.why_not(1 / most) if variant == TWO else "")
                claim = claim.unless("the bound is in the interval" if low <= most else "")
            yield claim


def bounds(point: MixturePoint) -> list[tuple[str, str, float]]:
    """(variant, other, the most that it takes of the other's time) at a point, by docs/log.md."""
    match point:
        case MixturePoint("processors", rows=16):
            return [(TWO, CALL, 0.65)]
        case MixturePoint("processors", rows=32):
            return [(TWO, CALL, 0.60)]
        case MixturePoint("step", rows=32):
            return [(TWO, CALL, 0.80)]
        case MixturePoint("four") | MixturePoint("service"):
            return [(EARLY, CALL, 1.02)]
        case MixturePoint("arrival", late_ms=0.0, straggler_ms=0.0):
            return [(EARLY, CALL, 1.02)]
        case MixturePoint("arrival", late_ms=0.0):
            return [(EARLY, CALL, 0.93)]
        case MixturePoint("arrival") | MixturePoint("tcp", rows=8 | 16):
            return [(EARLY, CALL, 0.95)]
    return []


def result_of(point: MixturePoint, variant: str, us: Sequence[float]) -> dict[str, Any]:
    """Name what a variant took at a point."""
    fields = {name: value for name, value in point._asdict().items() if name != "variants"}
    return fields | {
        "variant": variant,
        "min_us": round(min(us), 1),
        "median_us": round(median(us), 1),
        "us": [round(each, 1) for each in us],
    }


def _name(point: MixturePoint) -> str:
    parts = [f"{point.part}, {point.rows} rows"]
    if point.straggler_ms:
        parts.append(f"a straggler of {point.straggler_ms} ms")
    if point.late_ms:
        parts.append(f"puts {point.late_ms} ms late")
    return ", ".join(parts)


if __name__ == "__main__":
    main()
