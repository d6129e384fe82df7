"""What a request costs whose pages are in many runs of frames, against one run of as many pages.

Enters: a number of runs. Leaves: processor microseconds of attention, of the page table's row in a
window, of a re-binding, and of a move of pages. Does not know: models, services, clocks of others.

Pages of a run are adjacent in the frames of one instance. A move of pages cuts a run in two, so the
number grows while a request runs (docs/decisions/0008). All runs of a round are measured in turn.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.proposal import Layout, Proposal
from control_plane.scheduler.state.request import Request
from control_plane.scheduler.windows.lowering import Lowering
from control_plane.scheduler.windows.page_moves import PageMoves
from data_plane.attention.backend import Attention
from data_plane.attention.torch_paged import LatentKv, TorchPaged
from data_plane.graph.pool_cpu import LocalPages
from data_plane.native.attention import NativeAttention
from data_plane.native.kernels import NativeKernels
from nanocp.config.cluster import ClusterConfig
from nanocp.values.plan import PAGE_SIZE
from nanocp.values.table import InstanceTable
from nanocp.values.table_changes import PageRun

NUM_PAGES = 512
"""Pages of the request on an instance: 32,768 tokens."""
NUM_RUNS = (1, 4, 16, 84, NUM_PAGES)
"""4 are what cost_aware allows an instance; 84 were seen before it had a bound."""
NUM_HEADS, RANK, ROPE = 8, 512, 64
"""Shape of attention: DeepSeek-V3's latent widths, and the heads of preset `small`."""


class RunsCost(NamedTuple):
    """Median processor time of one thing at one number of runs."""

    what: str
    runs: int
    us: float
    ratio: float
    """The time as a share of that at one run."""


def measure(rounds: int, num_pages: int = NUM_PAGES) -> list[RunsCost]:
    """Every kind of work at every number of runs."""
    torch.set_num_threads(1)  # the time of this thread is what is counted
    numbers = [number for number in NUM_RUNS if number <= num_pages]
    kinds: dict[str, dict[int, Callable[[], object]]] = {
        f"attention, {name}": _attention(backend, numbers, num_pages)
        for name, backend in _backends()
    }
    kinds["page table of a window"] = {n: _staging(n, num_pages) for n in numbers}
    kinds["re-binding"] = {n: _BoundRow(n, num_pages).rebind for n in numbers}
    kinds["move of a page"] = {n: _BoundRow(n, num_pages).move for n in numbers}
    found = []
    for what, calls in kinds.items():
        times_us = _in_turn(calls, rounds)
        found += [
            RunsCost(what, n, round(us, 1), round(us / times_us[1], 3))
            for n, us in times_us.items()
        ]
    return found


def _in_turn(calls: dict[int, Callable[[], object]], rounds: int) -> dict[int, float]:
    """Median processor microseconds of each call."""
    times_ns: dict[int, list[int]] = {number: [] for number in calls}
    for _ in range(rounds):
        for number, call in calls.items():
            began_ns = time.thread_time_ns()
            call()
            times_ns[number].append(time.thread_time_ns() - began_ns)
    return {number: median(each) / 1e3 for number, each in times_ns.items()}


def runs_of(number: int, num_pages: int) -> list[PageRun]:
    """Lay a request's pages in `number` runs of frames, none of them beside the one before it."""
    lengths = [num_pages * (i + 1) // number - num_pages * i // number for i in range(number)]
    places = random.Random(number).sample(range(number), number)
    width = max(lengths) + 1
    runs, first = [], 0
    for length, place in zip(lengths, places, strict=True):
        runs.append(PageRun(1, first, length, place * width))
        first += length
    return runs


def _backends() -> Iterator[tuple[str, Attention]]:
    kernels = NativeKernels(torch.float32)
    yield "native", NativeAttention(kernels.attention_call, RANK)
    yield "torch", TorchPaged(LatentKv(RANK))


def _attention(
    backend: Attention, numbers: Sequence[int], num_pages: int
) -> dict[int, Callable[[], object]]:
    """Calls that plan a step and run one layer over a row; all read equal tokens."""
    generator = torch.Generator().manual_seed(7)
    width = RANK + ROPE
    kv = torch.randn(num_pages, PAGE_SIZE, width, generator=generator)
    q = torch.randn(1, NUM_HEADS, width, generator=generator)
    length = torch.tensor([num_pages * PAGE_SIZE], dtype=torch.int32)
    calls: dict[int, Callable[[], object]] = {}
    expected: Any = None
    for number in numbers:
        frame = _page_table(runs_of(number, num_pages), num_pages).frame
        frames = torch.from_numpy(frame)
        pool = torch.zeros(int(frames.max()) + 1, PAGE_SIZE, width)
        pool[frames[0].long()] = kv

        def call(pool: torch.Tensor = pool, frames: torch.Tensor = frames) -> torch.Tensor:
            return backend.run(q, pool, backend.plan(frames, length), width**-0.5)[0]

        expected = call() if expected is None else expected
        torch.testing.assert_close(call(), expected, atol=1e-5, rtol=1e-4)
        calls[number] = call
    return calls


def _page_table(runs: Sequence[PageRun], num_pages: int) -> LocalPages:
    pages = LocalPages.empty(1, num_pages)
    pages.fill(0, runs)
    return pages


def _staging(number: int, num_pages: int) -> Callable[[], object]:
    """The part of an instance's window that the row's pages take."""
    runs = runs_of(number, num_pages)
    staged, live = LocalPages.empty(1, num_pages), LocalPages.empty(1, num_pages)

    def call() -> None:
        staged.fill(0, runs)
        live.copy_from(staged, 1)

    return call


class _BoundRow:
    """A running row with half of its pages on each of two instances; their tables follow."""

    def __init__(self, number: int, num_pages: int) -> None:
        """number: runs on each instance, in turn."""
        cluster = ClusterConfig(num_instances=2, num_frames=2 * num_pages + 2)
        self._state, self._lowering = ClusterState(cluster), Lowering(2)
        self._moves = PageMoves(self._state, self._lowering, 1)
        length = 2 * num_pages * PAGE_SIZE
        self._row = Request(1, length, 1, b"", 0, length, 0, position=length - 1)
        pages = [(i % 2, run.num_pages) for run in runs_of(number, num_pages) for i in range(2)]
        pages_on = {0: num_pages, 1: num_pages}
        self._state.place(self._row, Layout(Proposal(0, pages_on), pages, pages_on))
        self._state.run(self._row)
        self._lowering.start(self._row, 0)
        self._tables = [InstanceTable(instance, 2) for instance in range(2)]
        self._carry_out()

    def rebind(self) -> None:
        """The row goes to the other instance: what the scheduler and both instances do."""
        old = self._row.moe_binding
        self._state.rebind(self._row, 1 - old)
        self._lowering.rebind(self._row, old, self._row.position)
        self._carry_out()

    def move(self) -> None:
        """The request's first page goes to the other instance, and its run is cut."""
        run = self._row.runs[0]
        wish = self._row, range(1), 1 - run.instance
        for request, _ in self._moves.start([wish]):
            self._moves.arrived.append(request)
        for _, frames in self._moves.finish():
            self._state.free(frames)
        self._carry_out()

    def _carry_out(self) -> None:
        self._state.step += 4
        for plan in self._lowering.emit(self._state.step, 0, 1):
            table = self._tables[plan.instance]
            table.apply(plan.changes)
            assert table.digest == plan.result_digest
