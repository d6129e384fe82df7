"""The exchange's kernels and whole decode steps on one GPU, at DeepSeek-V3's layer shapes.

    PYTHONPATH=.:tests python3 benchmarks/gpu_step.py --json PATH [--limit-s 400] [--tiny]

Put, take, wait and merge against the card's copy ceiling; a captured step against an eager one (61
layers, 8 experts here, weights shared by all layers of a kind); rows with a draft over rows
without; graphs and bytes at the paper's bounds; the latent and the absorbed wire form between two
instances on the card. Needs torch and Triton, no network, no Ray.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch
from gpu_attention import measure_ceilings, rates, replay_us
from gpu_shapes import FULL, TINY, StepShapes, latent, random_weights
from kit import BenchRun, Claim, Result, at_most, bench

from data_plane.attention.triton_merge import merge_routed
from data_plane.attention.triton_mla import TritonMla
from data_plane.graph.buckets import Bucket, BucketTable
from data_plane.graph.cuda_graphs import CudaGraphs, eager
from data_plane.model.config import ModelConfig
from data_plane.startup.gpu_parts import GpuParts, gpu_parts
from data_plane.transport.exchange import Channel, row_bytes
from data_plane.transport.peer_memory import PeerMemory
from data_plane.transport.regions import step_layout
from harness.exchange_cases import ExchangeCase, Widths
from nanocp.config.cluster import ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.values.plan import PAGE_SIZE

MAX_CPU_US, MAX_GRAPHS, MAX_GRAPH_GIB = 100, 48, 5.32
"""The claims: processor time of a replayed step; graphs and memory at the paper's bounds (its Table
2)."""


class Card:
    """The GPU, or the CPU that plays one."""

    def __init__(self, shapes: StepShapes) -> None:
        self.shapes = shapes
        self.is_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if self.is_gpu else torch.device("cpu")
        self.num_parts = None if self.is_gpu else 2
        self.dtype = getattr(torch, shapes.dtype)

    def sync(self) -> None:
        """Wait for everything."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def us(self, *calls: Callable[[], Any]) -> float:
        """Measure a call, median microseconds; all are in one graph.

        So launches cost as they do in a step.
        """
        return replay_us(list(calls), self.shapes.rounds)

    def host_us(self, call: Callable[[], Any]) -> tuple[float, float]:
        """Measure a call that returns before the device is done.

        Returns (processor time of this thread for it, time until the device is done).
        """
        call()
        self.sync()
        cpu, whole = [], []
        for _ in range(self.shapes.rounds):
            begin, begin_cpu = time.perf_counter(), time.thread_time()
            call()
            cpu.append((time.thread_time() - begin_cpu) * 1e6)
            self.sync()
            whole.append((time.perf_counter() - begin) * 1e6)
        return median(cpu), median(whole)

    def graphs(self, parts: GpuParts) -> Any:
        """What captures a step: on the CPU it does not."""
        if self.is_gpu:
            return CudaGraphs(parts.pool, parts.step.run)
        return eager(parts.pool, parts.step.run)

    def parts(
        self, model: ModelConfig, num_instances: int, num_frames: int, max_len: int, **keys: Any
    ) -> list[GpuParts]:
        """Make instances on this card, attached to each other.

        All layers' frames are the same memory, as their weights are.
        """
        shapes, made = self.shapes, []
        if self.is_gpu:
            # What the last ones held; a pool of frames for all layers is a large piece.
            gc.collect()
            torch.cuda.empty_cache()
        cluster = ClusterConfig(num_instances, num_instances, 1, max_len, bounds=shapes.bounds)
        data_plane = DataPlaneConfig(device="cuda", dtype=shapes.dtype, **keys)
        kind = latent(model)
        attention = TritonMla(kind.kv_lora_rank, kind.rope_dim, kind.num_heads, self.num_parts)
        share = model.num_experts // num_instances
        for instance in range(num_instances):
            experts = range(instance * share, (instance + 1) * share)
            weights = random_weights(model, self.dtype, self.device, experts)
            own = replace(cluster, num_frames=num_frames)
            made.append(gpu_parts(own, data_plane, model, weights, attention, 2000.0))
            frames = made[-1].frames
            shared = torch.randn(1, *frames.layers.shape[1:], dtype=self.dtype, device=self.device)
            frames.layers = shared.expand(model.num_layers, -1, -1, -1)
            frames.slots = frames.layers.flatten(1, 2).unbind()
        for parts, memory in zip(
            made, PeerMemory.create_all(made[0].places, self.device), strict=True
        ):
            parts.exchange.attach(memory)
        return made


def fill(
    parts: GpuParts,
    num_rows: int,
    context: int,
    targets: dict[int, int],
    sources: dict[int, int],
    width: int = 1,
) -> None:
    """Fill the tables of one window: num_rows own step rows of one context.

    The first of them go to peers (targets); others come from peers (sources), with their KV in
    frames of this instance. width: so many step rows next to each other have the same pages.
    """
    tables, state = parts.pool.staging[0], parts.pool.rows
    pages, next_frame = -(-context // PAGE_SIZE), 0
    num_frames = parts.frames.scratch_slot // PAGE_SIZE
    tables.num_rows[0] = num_rows
    state.live[:num_rows], state.position[:num_rows] = True, context - 1
    tables.own.num_pages[:] = tables.received.num_pages[:] = 0
    tables.num_sent[:] = tables.num_received[:] = 0
    for peer, count in targets.items():
        tables.num_sent[peer], tables.send_row[peer, :count] = count, range(count)
    for peer, count in sources.items():
        tables.num_received[peer] = count
    for local, count in ((tables.own, num_rows), (tables.received, sum(sources.values()))):
        for row in range(count):
            local.num_pages[row], local.page[row, :pages] = pages, range(pages)
            begin = next_frame + row // width * pages
            local.frame[row, :pages] = [(begin + page) % num_frames for page in range(pages)]
        next_frame += count // width * pages
    parts.pool.upload(0)
    parts.pool.adopt(0)


def measure_exchange(card: Card, ceilings: Result) -> Iterator[Result]:
    """Measure put, take and merge alone, then a layer of all.

    The instances are on this card, in turn on one stream.
    """
    shapes, kind = card.shapes, latent(card.shapes.model)
    num_instances, slots = shapes.exchange
    widths = Widths(
        q=kind.q_latent_dim, kv=kind.kv_width, heads=kind.num_heads, value=kind.value_dim
    )
    case = ExchangeCase(num_instances, slots, widths, card.device, timeout_ms=2000, max_rows=slots)
    generator = torch.Generator().manual_seed(0)
    everybody = tuple(range(num_instances))
    case.fill([(i, i % num_instances, everybody) for i in range(num_instances * slots)], generator)
    case.run_layer()
    case.check()
    sizes, links = row_bytes(case.layout), (num_instances - 1) * slots
    names = ("put Q", "wait Q", "take Q", "put RES", "wait RES", "take RES")
    phases = dict(zip(names, case.phases(), strict=True))
    for name in ("put Q", "take Q", "put RES", "take RES"):
        us = card.us(lambda phase=phases[name]: phase(0))
        num_bytes = 2 * links * sizes[Channel.Q if name.endswith("Q") else Channel.RES]
        yield rates("exchange", name, us, num_bytes, 0, ceilings, rows=links)
    count_N, num_rows = case.num_sent[0], slots
    slot_NB = torch.full((num_instances, num_rows), -1, dtype=torch.int32, device=card.device)
    slot_NB[1:] = torch.arange(num_rows, device=card.device, dtype=torch.int32)
    out = torch.randn(num_rows, kind.num_heads, kind.value_dim, device=card.device).bfloat16()
    lse = torch.randn(num_rows, kind.num_heads, device=card.device)
    partial = torch.randn(links, kind.num_heads, kind.value_dim, device=card.device).bfloat16()
    partial_lse = torch.randn(links, kind.num_heads, device=card.device)
    us = card.us(lambda: merge_routed(out, lse, partial, partial_lse, count_N, slot_NB))
    num_bytes = partial.nbytes + partial_lse.nbytes + 2 * (out.nbytes + lse.nbytes)
    yield rates("exchange", "merge", us, num_bytes, 0, ceilings, rows=num_rows)
    us = card.us(case.run_layer)
    case.check()
    num_bytes = 4 * num_instances * links * (sizes[Channel.Q] + sizes[Channel.RES])
    yield rates("exchange", "a layer of all", us, num_bytes, 0, ceilings, rows=links)
    empty = torch.zeros_like(count_N)
    us = card.us(lambda: case.members[0].wait(Channel.Q, empty))
    yield {"kind": "exchange", "backend": "wait for nobody", "us": round(us, 2)}


def measure_step(card: Card, ceilings: Result) -> Iterator[Result]:
    """A whole step of one instance: replayed, and launched kernel by kernel."""
    shapes = card.shapes
    for num_rows, context in shapes.batches:
        pages = -(-context // PAGE_SIZE)
        (parts,) = card.parts(shapes.model, 1, num_rows * pages, context + PAGE_SIZE)
        bucket = parts.pool.context(Bucket(num_rows, 0))
        fill(parts, num_rows, context, {}, {})
        launch = eager(parts.pool, parts.step.run)(bucket)
        launch()
        card.sync()
        eager_cpu_us, eager_us = card.host_us(launch)
        capture = card.graphs(parts)
        cpu_us, whole_us = card.host_us(capture(bucket))
        parts.step.check()
        yield {
            "kind": "step",
            "rows": num_rows,
            "context": context,
            "layers": shapes.model.num_layers,
            "moe_layers": shapes.model.num_layers - shapes.model.num_dense_layers,
            "replay_cpu_us": round(cpu_us, 1),
            "replay_us": round(whole_us, 1),
            "eager_cpu_us": round(eager_cpu_us, 1),
            "eager_us": round(eager_us, 1),
        }
        del parts, bucket, launch, capture


def measure_widths(card: Card, ceilings: Result) -> Iterator[Result]:
    """A step of rows with a draft each, which read their pages once or twice, over one without."""
    shapes = card.shapes
    for num_rows, context in shapes.batches:
        pages = -(-context // PAGE_SIZE)
        (parts,) = card.parts(shapes.model, 1, num_rows * pages, context + PAGE_SIZE)
        found = {}
        for name, count, width in (("one", 1, 1), ("two", 2, 2), ("two_apart", 2, 1)):
            fill(parts, count * num_rows, context, {}, {}, count)
            bucket = parts.pool.context(Bucket(count * num_rows, 0, width))
            _, found[name] = card.host_us(card.graphs(parts)(bucket))
        parts.step.check()
        yield {
            "kind": "widths",
            "rows": num_rows,
            "context": context,
            "us": round(found["one"], 1),
            "two_queries": round(found["two"] / found["one"], 3),
            "two_queries_apart": round(found["two_apart"] / found["one"], 3),
        }
        del parts, bucket


def measure_graphs(card: Card, ceilings: Result) -> Iterator[Result]:
    """Every bucket at the paper's bounds captured."""
    shapes, bounds = card.shapes, card.shapes.bounds
    (parts,) = card.parts(shapes.model, 1, shapes.max_pages, shapes.max_pages * PAGE_SIZE)
    capture = card.graphs(parts)
    buckets = BucketTable(bounds.max_rows, bounds.max_attention_rows, shapes.row_buckets).all()
    begin = time.monotonic()
    # A replay that is let go takes its graph along. The next capture then gets that memory, and
    # counts it once more.
    replays = [capture(parts.pool.context(bucket)) for bucket in buckets]
    card.sync()
    parts.step.check()
    yield {
        "kind": "graphs",
        "graphs": len(replays),
        "gib": round((getattr(capture, "num_bytes", 0) + parts.pool.num_bytes) / 2**30, 3),
        "tables_gib": round(parts.pool.num_bytes / 2**30, 3),
        "seconds": round(time.monotonic() - begin, 1),
        "layers": shapes.model.num_layers,
    }


def measure_wire(card: Card, ceilings: Result) -> Iterator[Result]:
    """Measure a step of two instances in both wire forms; all rows of each are read at both.

    They run in turn on one stream.
    """
    shapes = card.shapes
    model = replace(shapes.model, num_layers=min(4, shapes.model.num_layers), num_dense_layers=1)
    model = replace(model, num_experts=2 * model.num_experts) if card.is_gpu else model
    context = 4096 if card.is_gpu else 70
    for wire_form in ("latent", "absorbed"):
        count = shapes.linked_rows
        both = card.parts(
            model, 2, 2 * count * -(-context // PAGE_SIZE), context + PAGE_SIZE, wire_form=wire_form
        )
        contexts = []
        for index, parts in enumerate(both):
            fill(parts, count, context, {1 - index: count}, {1 - index: count})
            parts.pool.start()
            contexts.append(parts.pool.context(Bucket(count, count)))

        def step(both: list[GpuParts] = both, contexts: list[Any] = contexts) -> None:
            steps = [
                parts.step.phases(context) for parts, context in zip(both, contexts, strict=True)
            ]
            while steps:
                steps = [step for step in steps if next(step, StopIteration) is not StopIteration]

        us = card.us(step)
        for parts in both:
            parts.step.check()
        layout = step_layout(
            shapes.bounds,
            DataPlaneConfig(device="cuda", dtype=shapes.dtype, wire_form=wire_form),
            model,
        )
        sizes = row_bytes(layout)
        yield {
            "kind": "wire",
            "wire_form": wire_form,
            "rows": count,
            "context": context,
            "us": round(us / model.num_layers / 2, 2),
            "bytes": sizes[Channel.Q] + sizes[Channel.RES],
            "note": "us of one instance's layer; on one card the wire is its memory",
        }
        del both, contexts


MEASURES = (measure_exchange, measure_step, measure_widths, measure_graphs, measure_wire)


def claims(results: Sequence[Result]) -> Iterator[Claim]:
    """What is claimed of steps and graphs."""
    for result in results:
        if result["kind"] == "step":
            us = result["replay_cpu_us"]
            what = f"{result['rows']} rows: {us} us of processor time, under {MAX_CPU_US}"
            yield Claim(what, us < MAX_CPU_US)
        if result["kind"] == "graphs":
            yield at_most("graphs", result["graphs"], MAX_GRAPHS)
            yield at_most("GiB of graphs", result["gib"], MAX_GRAPH_GIB)


@bench(on_gpu_s=400)
def main(run: BenchRun) -> None:
    """Measure the exchange and whole steps on this machine's GPU."""
    card = Card(TINY if run.is_tiny else FULL)
    if not run.results:
        run.keep(measure_ceilings(run.is_tiny))
    for measure in MEASURES:
        kind = measure.__name__.removeprefix("measure_")
        if not any(result["kind"] == kind for result in run.results):
            run.attempt(kind, partial(measure, card, run.results[0]))
    if not run.is_tiny:
        run.judge(claims(run.results))


if __name__ == "__main__":
    main()
