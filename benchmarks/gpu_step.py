"""The exchange's kernels and whole decode steps on one GPU, at DeepSeek-V3's layer shapes.

    PYTHONPATH=.:tests python3 benchmarks/gpu_step.py --json PATH [--limit-s 400] [--tiny]

Whole steps, captured and eager (61 layers, 8 experts here, weights shared by all layers of a kind),
by our kernels and by the packages that are installed, with their kernels by part; graphs and bytes
at the paper's bounds; put, take, wait and merge against the card's copy ceiling; rows with a draft
over rows without; the latent and the absorbed wire form between two instances on the card. Needs
torch and Triton, no network, no Ray.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch
from gpu_attention import measure_ceilings, rates, replay_us
from gpu_kernels import kernels_by_part
from gpu_shapes import FULL, TINY, StepShapes, latent, random_weights
from kit import BenchRun, Claim, Result, at_most, bench

from data_plane.attention.paged import Attention
from data_plane.attention.triton_mla import TritonMla
from data_plane.graph.buckets import Bucket, BucketTable
from data_plane.graph.cuda_graphs import CudaGraphs, eager
from data_plane.model.config import ModelConfig
from data_plane.model.fp8_weight import Fp8DenseGemm
from data_plane.model.linear import LinearLayer, PlainLinear
from data_plane.moe.grouped import GroupedGemm
from data_plane.moe.kernels.gemm import TritonGemm
from data_plane.startup.gpu_parts import GpuParts, gpu_parts
from data_plane.step.triton_returned import merge_returned
from data_plane.transport.exchange import Channel, row_bytes
from data_plane.transport.peer_memory import PeerMemory
from data_plane.transport.regions import step_layout
from harness.exchange_cases import ExchangeCase, Widths
from harness.kernel_cases import in_fp8
from nanocp.config.cluster import ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.values.plan import PAGE_SIZE

MAX_CPU_US, MAX_GRAPHS, MAX_GRAPH_GIB = 100, 48, 2.0
"""The claims: processor time of a replayed step; graphs and memory at the paper's bounds (its Table
2 has 5.32 GiB)."""
MAX_MS = {"flashmla": 38, "flashmla, FP8 experts": 35, "flashmla, all in FP8": 35}
"""The claims for a step of 64 rows of 8,192 tokens, in ms."""
Measure = Callable[[], Iterator[Result]]
NUM_LINKED = 2
"""Instances of the cluster whose graphs are counted: an instance alone has no links."""


class Card:
    """The GPU, or the CPU that plays one."""

    def __init__(self, shapes: StepShapes) -> None:
        self.shapes = shapes
        self.is_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if self.is_gpu else torch.device("cpu")
        self.num_parts = None if self.is_gpu else 2
        self.dtype = getattr(torch, shapes.dtype)
        self.attention: Callable[[], Attention] | None = None
        """Makes what attends; None: our kernel."""
        self.gemm: GroupedGemm = TritonGemm()
        self.linear: Callable[[torch.Tensor], LinearLayer] = PlainLinear

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
        self,
        model: ModelConfig,
        num_instances: int,
        num_frames: int,
        max_len: int,
        num_here: int = 0,
        **keys: Any,
    ) -> list[GpuParts]:
        """Make instances on this card, attached to each other.

        All layers' frames are the same memory, as their weights are. num_here: so many of the
        cluster's instances, the others being in no term; 0: all.
        """
        shapes, made = self.shapes, []
        if self.is_gpu:
            # What the last ones held; a pool of frames for all layers is a large piece.
            gc.collect()
            torch.cuda.empty_cache()
        cluster = ClusterConfig(num_instances, num_instances, 1, max_len, bounds=shapes.bounds)
        data_plane = DataPlaneConfig(device="cuda", dtype=shapes.dtype, **keys)
        kind = latent(model)
        attention: Attention = (
            self.attention()
            if self.attention
            else TritonMla(kind.kv_lora_rank, kind.rope_dim, kind.num_heads, self.num_parts)
        )
        share = model.num_experts // num_instances
        here = range(num_here or num_instances)
        for instance in here:
            experts = range(instance * share, (instance + 1) * share)
            weights = random_weights(
                model, self.dtype, self.device, experts, self.gemm, num_instances == 1, self.linear
            )
            own = replace(cluster, num_frames=num_frames)
            made.append(gpu_parts(own, data_plane, model, weights, attention, 2000.0))
            frames = made[-1].frames
            shared = torch.randn(1, *frames.layers.shape[1:], dtype=self.dtype, device=self.device)
            frames.layers = shared.expand(model.num_layers, -1, -1, -1)
            frames.slots = frames.layers.flatten(1, 2).unbind()
        memories = PeerMemory.create_all(made[0].places, self.device, list(here))
        for parts, memory in zip(made, memories, strict=True):
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
    num_rows = slots
    slot_NB = torch.full((num_instances, num_rows), -1, dtype=torch.int32, device=card.device)
    slot_NB[1:] = torch.arange(num_rows, device=card.device, dtype=torch.int32)
    out = torch.randn(num_rows, kind.num_heads, kind.value_dim, device=card.device).bfloat16()
    lse = torch.randn(num_rows, kind.num_heads, device=card.device)
    us = card.us(lambda: merge_returned(out, lse, case.members[0], slot_NB))
    num_bytes = links * sizes[Channel.RES] + 2 * (out.nbytes + lse.nbytes)
    yield rates("exchange", "merge", us, num_bytes, 0, ceilings, rows=num_rows)
    us = card.us(case.run_layer)
    case.check()
    num_bytes = 4 * num_instances * links * (sizes[Channel.Q] + sizes[Channel.RES])
    yield rates("exchange", "a layer of all", us, num_bytes, 0, ceilings, rows=links)
    empty = torch.zeros_like(case.num_sent[0])
    us = card.us(lambda: case.members[0].wait(Channel.Q, empty))
    yield {"kind": "exchange", "backend": "wait for nobody", "us": round(us, 2)}


def variants(card: Card) -> Iterator[str]:
    """Let the card compute with each set of what is installed; yield its name."""
    yield "triton"
    if not card.is_gpu or find_spec("flash_mla") is None:
        return
    from data_plane.attention.flashmla import FlashMla

    card.attention = lambda: FlashMla(latent(card.shapes.model).kv_lora_rank)
    yield "flashmla"
    if find_spec("deep_gemm") is not None:
        from data_plane.moe.deep_gemm import DeepGemm

        gemm = card.gemm = DeepGemm(64)
        yield "flashmla, FP8 experts"
        card.linear = partial(dense_in_fp8, gemm)
        yield "flashmla, all in FP8"
    card.attention, card.gemm, card.linear = None, TritonGemm(), PlainLinear


def dense_in_fp8(gemm: Fp8DenseGemm, weight: torch.Tensor) -> LinearLayer:
    """Make a dense layer of a weight in FP8."""
    stacked = in_fp8(weight[None].float(), (128, 128))
    layer = gemm.dense(stacked._replace(values=stacked.values[0], scale=stacked.scale[0]))
    assert layer is not None, weight.shape
    return layer


def measure_step(card: Card, name: str, num_rows: int, context: int) -> Iterator[Result]:
    """Time a whole step of one instance, replayed and launched kernel by kernel, by a variant."""
    shapes, pages = card.shapes, -(-context // PAGE_SIZE)
    (parts,) = card.parts(shapes.model, 1, num_rows * pages, context + PAGE_SIZE)
    bucket = parts.pool.context(Bucket(num_rows, 0, has_links=False))
    fill(parts, num_rows, context, {}, {})
    launch = eager(parts.pool, parts.step.run)(bucket)
    launch()
    card.sync()
    eager_cpu_us, eager_us = card.host_us(launch)
    replay = card.graphs(parts)(bucket)
    cpu_us, whole_us = card.host_us(replay)
    parts.step.check()
    layers = shapes.model.num_layers
    yield {
        "kind": "step",
        "variant": name,
        "rows": num_rows,
        "context": context,
        "layers": layers,
        "moe_layers": layers - shapes.model.num_dense_layers,
        "replay_cpu_us": round(cpu_us, 1),
        "replay_us": round(whole_us, 1),
        "eager_cpu_us": round(eager_cpu_us, 1),
        "eager_us": round(eager_us, 1),
    }
    if card.is_gpu:
        about = {"variant": name, "rows": num_rows, "context": context}
        yield {"kind": "kernels", **about, **kernels_by_part(replay, layers)}


def measure_widths(card: Card, ceilings: Result) -> Iterator[Result]:
    """A step of rows with a draft each, which read their pages once or twice, over one without."""
    shapes = card.shapes
    for num_rows, context in shapes.batches:
        pages = -(-context // PAGE_SIZE)
        (parts,) = card.parts(shapes.model, 1, num_rows * pages, context + PAGE_SIZE)
        found = {}
        for name, count, width in (("one", 1, 1), ("two", 2, 2), ("two_apart", 2, 1)):
            fill(parts, count * num_rows, context, {}, {}, count)
            bucket = parts.pool.context(Bucket(count * num_rows, 0, width, has_links=False))
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
    model = replace(shapes.model, num_experts=NUM_LINKED * shapes.model.num_experts)
    most = shapes.max_pages
    (parts,) = card.parts(model, NUM_LINKED, most, most * PAGE_SIZE, num_here=1)
    capture = card.graphs(parts)
    buckets = BucketTable(
        bounds.max_rows, bounds.max_attention_rows, shapes.row_buckets, num_instances=NUM_LINKED
    ).all()
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


def measures(card: Card, ceilings: Result) -> Iterator[tuple[Result, Measure]]:
    """List what is measured, most valuable first: (what its results have, what measures it)."""
    for name in variants(card):
        for rows, context in card.shapes.batches:
            about = {"kind": "step", "variant": name, "rows": rows, "context": context}
            yield about, partial(measure_step, card, name, rows, context)
    for measure in (measure_graphs, measure_exchange, measure_widths, measure_wire):
        kind = measure.__name__.removeprefix("measure_")
        yield {"kind": kind}, partial(measure, card, ceilings)


def claims(results: Sequence[Result]) -> Iterator[Claim]:
    """What is claimed of steps and graphs."""
    for result in results:
        if result["kind"] == "step":
            us = result["replay_cpu_us"]
            about = f"{result['variant']}, {result['rows']} rows x {result['context']}"
            what = f"{about}: {us} us of processor time, under {MAX_CPU_US}"
            yield Claim(what, us < MAX_CPU_US)
            if (result["rows"], result["context"]) == (64, 8192) and result["variant"] in MAX_MS:
                ms = result["replay_us"] / 1e3
                yield at_most(f"{about}: ms of a step", ms, MAX_MS[result["variant"]])
        if result["kind"] == "graphs":
            yield at_most("graphs", result["graphs"], MAX_GRAPHS)
            yield at_most("GiB of graphs", result["gib"], MAX_GRAPH_GIB)


@bench(on_gpu_s=400)
def main(run: BenchRun) -> None:
    """Measure the exchange and whole steps on this machine's GPU."""
    card = Card(TINY if run.is_tiny else FULL)
    if not run.results:
        run.keep(measure_ceilings(run.is_tiny))
    for about, measure in measures(card, run.results[0]):
        if not any(about == {key: result.get(key) for key in about} for result in run.results):
            run.attempt(" ".join(map(str, about.values())), measure)
    if not run.is_tiny:
        run.judge(claims(run.results))


if __name__ == "__main__":
    main()
