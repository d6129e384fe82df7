"""Instances that measure: one process each, with the service's step, frames and exchange."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from data_plane.graph.engine import GraphEngine
from data_plane.graph.pool_cpu import LocalPages, StepTables
from data_plane.instance.lanes import run_in_turns
from data_plane.instance.sampler import sample_rows
from data_plane.instance.step_lane import DraftingStep
from data_plane.member.lifetime import sentence
from data_plane.model.weights import say_nothing
from data_plane.profiling.batch import Batch, BatchRequest, num_frames
from data_plane.profiling.late_puts import LateExchange
from data_plane.profiling.phase_clock import Clock, EventClock, PartClock, PhaseClock, PhaseTimes
from data_plane.startup.cpu import build_cpu_instance
from data_plane.startup.shared_parts import model_of
from data_plane.transport.segments import Segments
from data_plane.transport.shared_memory import unlink_cluster
from data_plane.transport.shm import ShmExchange
from nanocp.config.whole import Config
from nanocp.overlap.policies.registry import lane_policy
from nanocp.values.plan import PAGE_SIZE
from nanocp.values.sampling import SamplingParams

_NUM_WARM_STEPS = 2
_INGEST_PAGES = 64
_GREEDY = SamplingParams(temperature=0.0)


class LaneTimes(NamedTuple):
    """The fastest step of a batch, in microseconds."""

    us: float
    waited_us: float = 0.0
    """Time without an arrived put."""
    parts: Mapping[str, tuple[float, float]] = {}
    """Times of a lane's operators by tag, where nothing else is measured."""


class MeasuringCluster:
    """Instances that are ready to measure batches."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def measure(self, batch: Batch, num_steps: int) -> list[PhaseTimes]:
        """Return each instance's median step. Raises RuntimeError."""
        return self._ask("measure", batch, num_steps)

    def measure_lanes(
        self,
        batch: Batch,
        num_steps: int,
        ns_per_byte: float = 0.0,
        orders: Sequence[str] = ("behind_first",),
    ) -> list[LaneTimes]:
        """Return the slowest instance's times in one lane, and in two by each order, alternately.

        ns_per_byte: of each link. The configuration must have lanes. Raises RuntimeError.
        """
        found = self._ask("measure_lanes", batch, num_steps, ns_per_byte, orders)
        return [max(of_way, key=itemgetter(0)) for of_way in zip(*found, strict=True)]

    def measure_drafts(self, batch: Batch, num_drafts: int, num_steps: int) -> tuple[float, float]:
        """Return the slowest instance's step in microseconds: without drafts, and with them."""
        times = self._ask("measure_drafts", batch, num_drafts, num_steps)
        without_us, with_us = map(max, zip(*times, strict=True))
        return without_us, with_us

    def device_name(self) -> str:
        """Return the GPU's name."""
        name: str = self._ask("device_name")[0]
        return name

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
    """Yield the instances; environment: set before they import torch. Raises RuntimeError."""
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
    """Return an answer of each; RuntimeError for the first failed one."""
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
    def __init__(self, config: Config, instance: int, cluster_id: str, checkpoint: Path) -> None:
        torch.set_num_threads(config.data_plane.threads_per_instance)
        # For the noise in the frames: the same experts are visited every time.
        torch.manual_seed(instance)
        data_plane = config.data_plane
        # Of all buckets only those of the batches are captured.
        config = replace(config, data_plane=replace(data_plane, eager=True))
        # A peer may compile a step's kernels meanwhile, not all the same if it has no row.
        longest_ms = max(config.limits.start_timeout_ms, config.limits.exchange_timeout_ms)
        config = replace(config, limits=replace(config.limits, exchange_timeout_ms=longest_ms))
        site = config, instance, Segments(cluster_id), checkpoint, say_nothing
        self._clock: Clock
        self._captures = data_plane.device == "cuda" and not data_plane.eager
        if data_plane.device == "cuda":
            from data_plane.startup.gpu import build_gpu_instance

            self._clock = EventClock()
            built = build_gpu_instance(*site, probe=self._clock)
        else:
            self._clock = PhaseClock()
            kind = LateExchange if config.scheduler.has_lanes else ShmExchange
            built = build_cpu_instance(*site, probe=self._clock, exchange=kind)
        built.connect()
        self._built, self._instance = built, instance
        self._model = model_of(config, checkpoint)
        self._lanes, self._frames = built.startup.lanes, built.startup.frames
        self._exchange = built.startup.ends.exchange
        self._num_filled = 0
        self._window = 0

    def device_name(self) -> str:
        """Return the GPU's name."""
        name: str = torch.cuda.get_device_name()
        return name

    def measure(self, batch: Batch, num_steps: int) -> PhaseTimes:
        """Return the median of every phase over the steps."""
        self._fill(num_frames(batch, self._instance))
        rows = self._load(self._lanes[0].engine, batch)
        replay = self._captured() if self._captures else self._lanes[0].engine.replay
        steps = []
        for _ in range(_NUM_WARM_STEPS + num_steps):
            self._clock.start()
            self._run_step(replay, rows)
            steps.append(self._clock.times(self._model))
        return PhaseTimes(*map(median, zip(*steps[_NUM_WARM_STEPS:], strict=True)))

    def _captured(self) -> Callable[[], None]:
        from data_plane.graph.cuda_graphs import CudaGraphs

        assert isinstance(self._clock, EventClock)
        engine, step, _ = cast(tuple[GraphEngine, Any, Any], self._lanes[0])
        graphs = CudaGraphs((cast(Any, engine.pool), step))
        graphs.warm(engine.replay)
        self._clock.capture()
        return graphs.capture(engine.pool.context(engine.bucket))

    @torch.inference_mode()
    def measure_lanes(
        self, batch: Batch, num_steps: int, ns_per_byte: float, orders: Sequence[str]
    ) -> list[LaneTimes]:
        """Return the fastest steps."""
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
        policies = [clock := PartClock(), *map(lane_policy, orders)]
        best = [LaneTimes(float("inf"))] * len(policies)
        for number in range(_NUM_WARM_STEPS + num_steps):
            for index, policy in enumerate(policies):
                parts = halves if index else (batch,)
                for lane, part in zip(self._lanes, parts, strict=False):
                    self._load(lane.engine, part)
                begin_ns, waited_ns = time.perf_counter_ns(), self._exchange.waited_ns
                steps: list[Any] = [lane.engine.next_step() for lane in self._lanes[: len(parts)]]
                if index or not orders:
                    run_in_turns([step.phases() for step in steps], self._exchange, policy)
                else:
                    steps[0]()
                us = (time.perf_counter_ns() - begin_ns) / 1000
                waited_us = (self._exchange.waited_ns - waited_ns) / 1000
                if number >= _NUM_WARM_STEPS:
                    times = LaneTimes(us, waited_us, {} if index or orders else clock.parts)
                    best[index] = min(best[index], times, key=itemgetter(0))
        return best

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
                self._run_step(self._lanes[0].engine.replay, rows)
                for turn in range(turns):
                    self._run_turn(rows, width if turn else 1)
                if number >= _NUM_WARM_STEPS:
                    best[index] = min(best[index], (time.perf_counter_ns() - begin_ns) / 1000)
        return best[0], best[1]

    def _run_step(self, replay: Callable[[], None], rows: int) -> None:
        step = self._lanes[0].step
        replay()
        step.check()
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
        """Write noise into frames: unwritten memory is read too fast."""
        if count > self._num_filled and self._frames.layers.is_floating_point():
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
