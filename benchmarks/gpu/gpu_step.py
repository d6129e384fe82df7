"""The exchange's kernels and whole decode steps on one GPU, at DeepSeek-V3's layer shapes.

    PYTHONPATH=.:tests python3 -m benchmarks.gpu.gpu_step --json PATH [--limit-s 400] [--tiny]

Whole steps, captured and eager (61 layers, 8 experts here, weights shared by all layers of a kind),
by our kernels and by the packages that are installed, with their kernels by part; graphs and bytes
at the paper's bounds; put, take, wait and merge against the card's copy ceiling; rows with a draft
over rows without; the latent and the absorbed wire form between two instances on the card. Needs
torch and Triton, no network, no Ray.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.gpu_attention import measure_ceilings, rates
from benchmarks.gpu.gpu_card import Card, OneStep, fill, variants
from benchmarks.gpu.gpu_kernels import kernels_by_part
from benchmarks.gpu.gpu_shapes import FULL, TINY, latent
from benchmarks.kit.bench import BenchRun, Claim, Result, at_most, bench
from data_plane.graph.buckets import Bucket, BucketTable
from data_plane.startup.gpu_parts import GpuParts
from data_plane.step.triton_returned import merge_returned
from data_plane.transport.exchange import Channel, row_bytes
from data_plane.transport.regions import step_layout
from harness.transports.exchange_cases import ExchangeCase, Widths
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


def measure_exchange(card: Card, ceilings: Result, is_packed: bool = False) -> Iterator[Result]:
    """Measure put, take and merge alone, then a layer of all.

    The instances are on this card, in turn on one stream. is_packed: the fields of a slot lie side
    by side, as between nodes.
    """
    what = "exchange, packed" if is_packed else "exchange"
    shapes, kind = card.shapes, latent(card.shapes.model)
    num_instances, slots = shapes.exchange
    widths = Widths(
        q=kind.q_latent_dim, kv=kind.kv_width, heads=kind.num_heads, value=kind.value_dim
    )
    case = ExchangeCase(
        num_instances, slots, widths, card.device, 2000, max_rows=slots, is_packed=is_packed
    )
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
        yield rates(what, name, us, num_bytes, 0, ceilings, rows=links)
    num_rows = slots
    slot_NB = torch.full((num_instances, num_rows), -1, dtype=torch.int32, device=card.device)
    slot_NB[1:] = torch.arange(num_rows, device=card.device, dtype=torch.int32)
    out = torch.randn(num_rows, kind.num_heads, kind.value_dim, device=card.device).bfloat16()
    lse = torch.randn(num_rows, kind.num_heads, device=card.device)
    us = card.us(lambda: merge_returned(out, lse, case.members[0], slot_NB))
    num_bytes = links * sizes[Channel.RES] + 2 * (out.nbytes + lse.nbytes)
    yield rates(what, "merge", us, num_bytes, 0, ceilings, rows=num_rows)
    us = card.us(case.run_layer)
    case.check()
    num_bytes = 4 * num_instances * links * (sizes[Channel.Q] + sizes[Channel.RES])
    yield rates(what, "a layer of all", us, num_bytes, 0, ceilings, rows=links)
    empty = torch.zeros_like(case.num_sent[0])
    us = card.us(lambda: case.members[0].wait(Channel.Q, empty))
    yield {"kind": what, "backend": "wait for nobody", "us": round(us, 2)}


def measure_step(card: Card, name: str, num_rows: int, context: int) -> Iterator[Result]:
    """Time a whole step of one instance, replayed and launched kernel by kernel, by a variant."""
    step, model = OneStep(card, num_rows, context), card.shapes.model
    eager_cpu_us, eager_us = card.host_us(step.launch)
    cpu_us, whole_us = card.host_us(step.replay)
    step.parts.step.check()
    yield {
        "kind": "step",
        "variant": name,
        "rows": num_rows,
        "context": context,
        "layers": model.num_layers,
        "moe_layers": model.num_layers - model.num_dense_layers,
        "replay_cpu_us": round(cpu_us, 1),
        "replay_us": round(whole_us, 1),
        "eager_cpu_us": round(eager_cpu_us, 1),
        "eager_us": round(eager_us, 1),
    }


def measure_replay(card: Card, ceilings: Result) -> Iterator[Result]:
    """Measure the processor time of a replay by its parts, over many replays of a short step."""
    num_rows, context = (64, 256) if card.is_gpu else card.shapes.batches[0]
    step = OneStep(card, num_rows, context)
    parts = {"whole": step.replay, "start": step.parts.pool.start}
    if card.is_gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step.parts.step.run(step.bucket)
        parts["graph alone"] = graph.replay
    for name, call in parts.items():
        us = sorted(card.host_us(call)[0] for _ in range(10 if card.is_gpu else 1))
        yield {
            "kind": "replay",
            "part": name,
            "queues": int(os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]),
            "cpu_us": round(median(us), 1),
            "least_us": round(us[0], 1),
        }


def measure_kernels(card: Card, name: str, num_rows: int, context: int) -> Iterator[Result]:
    """Profile a step; what is timed after it is slower, so it comes last."""
    step = OneStep(card, num_rows, context)
    about = {"kind": "kernels", "variant": name, "rows": num_rows, "context": context}
    yield about | kernels_by_part(step.replay, card.shapes.model.num_layers)


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

    def whole_steps(kind: str, measure: Callable[..., Iterator[Result]]) -> Iterator[Any]:
        for name in variants(card):
            for rows, context in card.shapes.batches:
                about = {"kind": kind, "variant": name, "rows": rows, "context": context}
                yield about, partial(measure, card, name, rows, context)

    yield from whole_steps("step", measure_step)
    for kind, measure in (
        ("graphs", measure_graphs),
        ("replay", measure_replay),
        ("exchange", measure_exchange),
        ("exchange, packed", partial(measure_exchange, is_packed=True)),
        ("widths", measure_widths),
        ("wire", measure_wire),
    ):
        yield {"kind": kind}, partial(measure, card, ceilings)
    if card.is_gpu:
        yield from whole_steps("kernels", measure_kernels)


def claims(results: Sequence[Result]) -> Iterator[Claim]:
    """What is claimed of steps and graphs."""
    for result in results:
        if result["kind"] == "replay" and result["part"] == "whole":
            us = result["cpu_us"]
            yield Claim(
                f"a replay takes {us} us of processor time, under {MAX_CPU_US}", us < MAX_CPU_US
            )
        is_judged = (result.get("rows"), result.get("context")) == (64, 8192)
        if result["kind"] == "step" and is_judged and result["variant"] in MAX_MS:
            name, ms = result["variant"], result["replay_us"] / 1e3
            yield at_most(f"64 rows x 8192, {name}: ms of a step", ms, MAX_MS[name])
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
