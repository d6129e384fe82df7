"""Instances that measure: one process each, with the service's own step, but no service.

Frames, buckets and exchange are the service's too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from data_plane.graph.buckets import BucketTable
from data_plane.graph.engine import GraphEngine
from data_plane.graph.pool_cpu import ContextPool, LocalPages, StepTables
from data_plane.instance.lanes import run_in_turns
from data_plane.instance.sampler import sample_rows
from data_plane.instance.step_lane import DraftingStep, StepLane
from data_plane.kv.frame_pool import FramePool
from data_plane.member.lifetime import sentence
from data_plane.model.weights import expert_range, load_weights
from data_plane.moe.mixture import MoeSchedule
from data_plane.profiling.batch import Batch, BatchRequest, num_frames
from data_plane.profiling.late_puts import LateExchange
from data_plane.profiling.phase_clock import PhaseClock, PhaseTimes
from data_plane.startup.cpu_parts import cpu_parts
from data_plane.startup.shared_parts import model_of, moe_backends, torch_dtype
from data_plane.step.cpu import CpuStep
from data_plane.step.cpu_kernels import Arithmetic, cpu_mixtures, fused_obstacle
from data_plane.transport.exchange import in_two_lanes
from data_plane.transport.regions import TensorExchange, region_layout
from data_plane.transport.segments import Segments
from data_plane.transport.shared_memory import unlink_cluster
from data_plane.transport.shm import ShmExchange
from nanocp.config.whole import Config
from nanocp.values.plan import PAGE_SIZE
from nanocp.values.sampling import SamplingParams

_NUM_WARM_STEPS = 2
_INGEST_PAGES = 64
_GREEDY = SamplingParams(temperature=0.0)


class LaneTimes(NamedTuple):
    """The fastest step of a batch, in microseconds."""

    one_us: float
    two_us: float
    one_waited_us: float = 0.0
    """Time without an arrived put."""
    two_waited_us: float = 0.0
    """Time without an arrived put in two lanes."""


class MeasuringCluster:
    """Instances that are ready to measure batches."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def measure(self, batch: Batch, num_steps: int) -> list[PhaseTimes]:
        """Run the batch in lock-step; return each instance's median step. Raises RuntimeError."""
        return self._ask("measure", batch, num_steps)

    def measure_lanes(self, batch: Batch, num_steps: int, ns_per_byte: float = 0.0) -> LaneTimes:
        """Run the batch in one lane and in two, alternately; return the slowest instance's times.

        ns_per_byte: of each instance's link. The configuration must have lanes. Raises RuntimeError
        if an instance fails.
        """
        times = self._ask("measure_lanes", batch, num_steps, ns_per_byte)
        return LaneTimes(*map(max, zip(*times, strict=True)))

    def measure_drafts(self, batch: Batch, num_drafts: int, num_steps: int) -> tuple[float, float]:
        """Return microseconds of a step on the slowest instance: without drafts, and with.

        The configuration must have drafts. Raises RuntimeError if an instance fails.
        """
        times = self._ask("measure_drafts", batch, num_drafts, num_steps)
        without_us, with_us = map(max, zip(*times, strict=True))
        return without_us, with_us

    def ingest_gb_per_s(self) -> float:
        """Return the rate of page copies of the slowest instance, in 10^9 bytes a second."""
        slowest: float = min(self._ask("ingest_gb_per_s"))
        return slowest

    def _ask(self, *question: object) -> list[Any]:
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(question)
        return _answers(self._pipes)


@contextlib.contextmanager
def measuring(
    config: Config, checkpoint: Path, environment: Mapping[str, str]
) -> Iterator[MeasuringCluster]:
    """Yield the instances, from ready to stopped; environment: set before they import torch.

    Raises RuntimeError with an instance's sentence if it cannot start.
    """
    cluster_id = secrets.token_hex(4)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        with _environment(environment):
            for instance in range(config.cluster.num_instances):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_run_instance,
                    args=(config, instance, cluster_id, checkpoint, theirs),
                    daemon=True,
                )
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
        _answers(pipes)
        yield MeasuringCluster(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()
        unlink_cluster(cluster_id)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _answers(pipes: Sequence[Connection]) -> list[Any]:
    """Return one answer of every instance; RuntimeError for the first failed one."""
    answers: dict[int, Any] = {}
    while len(answers) < len(pipes):
        for ready in wait([pipe for instance, pipe in enumerate(pipes) if instance not in answers]):
            instance = pipes.index(ready)
            try:
                is_good, answers[instance] = pipes[instance].recv()
            except EOFError:
                raise RuntimeError(f"instance {instance} died while it measured") from None
            if not is_good:
                raise RuntimeError(f"instance {instance}: {answers[instance]}")
    return [answers[instance] for instance in range(len(pipes))]


def _run_instance(
    config: Config, instance: int, cluster_id: str, checkpoint: Path, pipe: Connection
) -> None:
    """Answer questions until killed: a method of _Instance, and its arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is for the command
    try:
        measured = _Instance(config, instance, cluster_id, checkpoint)
        pipe.send((True, None))
        while True:
            method, *arguments = pipe.recv()
            pipe.send((True, getattr(measured, method)(*arguments)))
    except EOFError:
        return
    except Exception as error:
        pipe.send((False, sentence(error)))


class _Instance:
    """An instance of startup/cpu.py with a clock."""

    def __init__(self, config: Config, instance: int, cluster_id: str, checkpoint: Path) -> None:
        torch.set_num_threads(config.data_plane.threads_per_instance)
        # For the noise in the frames: the same experts are visited every time.
        torch.manual_seed(instance)
        cluster, bounds = config.cluster, config.cluster.bounds
        model = model_of(config, checkpoint)
        dtype = torch_dtype(config.data_plane)
        kernels, attention, _ = cpu_parts(config.data_plane, model, checkpoint)
        experts = expert_range(model, instance, cluster.num_instances)
        moe = moe_backends(config, model, experts, torch.device("cpu"), fused_obstacle(kernels))
        weights = load_weights(checkpoint, model, dtype, experts, packing=kernels)
        layout = region_layout(cluster, config.data_plane, model)
        has_lanes = config.scheduler.has_lanes
        schedule = moe.schedule
        if schedule is not None and not has_lanes:
            # Where rows are awaited inside the call, waits would count as experts.
            schedule = MoeSchedule.BARRIER
        exchange = (LateExchange if has_lanes else ShmExchange).create(
            Segments(cluster_id),
            instance,
            cluster.num_instances,
            in_two_lanes(layout) if has_lanes else layout,
            config.limits,
        )
        self._instance = instance
        self._model = model
        self._frames = FramePool(
            model.num_kept_layers, cluster.num_frames, model.attention.kv_width, dtype
        )
        self._num_filled = 0
        self._exchange = exchange
        self._clock = PhaseClock()

        def lane(number: int) -> StepLane:
            tensors = TensorExchange(exchange, layout, number)
            step = CpuStep(
                Arithmetic(model, kernels, attention),
                weights,
                self._frames,
                tensors,
                cpu_mixtures(
                    schedule, tensors, model, weights, kernels, bounds.max_rows, self._clock
                ),
                config.data_plane.wire_form,
                bounds,
                self._clock,
            )
            buckets = BucketTable(
                bounds.max_rows, bounds.max_attention_rows, config.data_plane.row_buckets
            )
            return StepLane(GraphEngine(ContextPool(cluster), buckets, step.capture), step, tensors)

        self._lanes = [lane(number) for number in range(1 + has_lanes)]
        exchange.connect(config.limits.start_timeout_ms)
        for each in self._lanes:
            each.engine.prepare()
        self._window = 0

    def measure(self, batch: Batch, num_steps: int) -> PhaseTimes:
        """Return the median of every phase over the steps."""
        self._fill(num_frames(batch, self._instance))
        rows = self._load(self._lanes[0].engine, batch)
        steps = []
        for _ in range(_NUM_WARM_STEPS + num_steps):
            self._clock.start()
            self._run_step(rows)
            steps.append(self._clock.times(self._model))
        return PhaseTimes(*map(median, zip(*steps[_NUM_WARM_STEPS:], strict=True)))

    @torch.inference_mode()
    def measure_lanes(self, batch: Batch, num_steps: int, ns_per_byte: float) -> LaneTimes:
        """Return the fastest steps in one lane and in two, run alternately."""
        assert isinstance(self._exchange, LateExchange), "the configuration has one lane"
        self._exchange.ns_per_byte = ns_per_byte
        self._fill(num_frames(batch, self._instance))
        halves: tuple[list[BatchRequest], ...] = ([], [])
        num_rows: Counter[tuple[int, int]] = Counter()
        for request in batch:
            # Each lane has half of the links too, as the scheduler gives them: a lane without any
            # would have fewer waits than the other, and hide few of those.
            kind = request.moe_binding, len(request.kv_binding)
            halves[num_rows[kind] & 1].append(request)
            num_rows[kind] += 1
        best = [(float("inf"), 0.0)] * 2
        for number in range(_NUM_WARM_STEPS + num_steps):
            for index, parts in enumerate(((batch,), halves)):
                for lane, part in zip(self._lanes, parts, strict=False):
                    self._load(lane.engine, part)
                begin_ns, waited_ns = time.perf_counter_ns(), self._exchange.waited_ns
                steps: list[Any] = [lane.engine.next_step() for lane in self._lanes[: len(parts)]]
                if len(parts) == 1:
                    steps[0]()
                else:
                    run_in_turns([step.phases() for step in steps], self._exchange)
                us = (time.perf_counter_ns() - begin_ns) / 1000
                waited_us = (self._exchange.waited_ns - waited_ns) / 1000
                if number >= _NUM_WARM_STEPS:
                    best[index] = min(best[index], (us, waited_us))
        (one_us, one_waited_us), (two_us, two_waited_us) = best
        return LaneTimes(one_us, two_us, one_waited_us, two_waited_us)

    @torch.inference_mode()
    def measure_drafts(self, batch: Batch, num_drafts: int, num_steps: int) -> tuple[float, float]:
        width = 1 + num_drafts
        wide = [request for request in batch for _ in range(width)]
        self._fill(num_frames(wide, self._instance))
        best = [float("inf")] * 2
        for number in range(_NUM_WARM_STEPS + num_steps):
            for index, (part, turns) in enumerate(((batch, 0), (wide, num_drafts))):
                rows = self._load(self._lanes[0].engine, part)
                begin_ns = time.perf_counter_ns()
                self._run_step(rows)
                for turn in range(turns):
                    self._run_turn(rows, width if turn else 1)
                if number >= _NUM_WARM_STEPS:
                    best[index] = min(best[index], (time.perf_counter_ns() - begin_ns) / 1000)
        return best[0], best[1]

    def _run_step(self, rows: int) -> None:
        engine, step, _ = self._lanes[0]
        engine.replay()
        nothing: list[list[int]] = [[]] * rows
        sample_rows(step.logits_of(list(range(rows))), [_GREEDY] * rows, nothing, nothing)

    def _run_turn(self, rows: int, stride: int) -> None:
        engine, lane_step, _ = self._lanes[0]
        step = cast(DraftingStep, lane_step)
        engine.rows.live[:rows] = np.arange(rows) % stride == 0
        captured: Any = engine.next_step()
        run_in_turns([captured.draft_phases()], self._exchange)
        step.draft_logits_of(list(range(0, rows, stride))).argmax(dim=-1)

    def _load(self, engine: GraphEngine, batch: Batch) -> int:
        rows = [request for request in batch if request.moe_binding == self._instance]
        self._stage(engine.stage(self._window), batch)
        engine.staged()
        self._window += 1
        state = engine.rows
        state.live[:] = False
        state.live[: len(rows)] = True
        state.position[: len(rows)] = [request.length - 1 for request in rows]
        # Other tokens visit other experts.
        state.token[: len(rows)] = np.random.default_rng(self._instance).integers(
            self._model.vocab_size, size=len(rows)
        )
        return len(rows)

    def ingest_gb_per_s(self) -> float:
        page = np.zeros(self._frames.page_bytes, np.uint8)
        frames = range(min(_INGEST_PAGES, self._frames.scratch_slot // PAGE_SIZE))
        begin_ns = time.perf_counter_ns()
        for frame in frames:
            self._frames.write_payload(frame, PAGE_SIZE, page)
        gb_per_s = len(frames) * len(page) / (time.perf_counter_ns() - begin_ns)
        self._num_filled = 0
        return gb_per_s

    def _fill(self, count: int) -> None:
        """Write noise into the first `count` frames: unwritten memory is read too fast."""
        if count > self._num_filled:
            self._frames.layers[:, self._num_filled : count].uniform_(-0.5, 0.5)
            self._num_filled = count

    def _stage(self, tables: StepTables, batch: Batch) -> None:
        here = self._instance
        tables.num_rows[0] = 0
        tables.num_sent[:] = 0
        tables.num_received[:] = 0
        tables.own.num_pages[:] = 0
        tables.received.num_pages[:] = 0
        next_frame = num_received = 0
        for request in batch:
            if request.moe_binding != here:
                continue
            row = int(tables.num_rows[0])
            tables.num_rows[0] += 1
            next_frame = _fill_row(tables.own, row, request.pages_of(here), next_frame)
            tables.tail_page[row] = (request.length - 1) // PAGE_SIZE
            tables.tail_holder[row] = here
            for peer in request.kv_binding[1:]:
                tables.send_row[peer, tables.num_sent[peer]] = row
                tables.num_sent[peer] += 1
        for request in sorted(batch, key=lambda request: request.moe_binding):
            if here in request.kv_binding[1:]:
                tables.num_received[request.moe_binding] += 1
                next_frame = _fill_row(
                    tables.received, num_received, request.pages_of(here), next_frame
                )
                num_received += 1


def _fill_row(local: LocalPages, row: int, pages: range, first_frame: int) -> int:
    local.num_pages[row] = len(pages)
    local.page[row, : len(pages)] = pages
    local.frame[row, : len(pages)] = range(first_frame, first_frame + len(pages))
    return first_frame + len(pages)
