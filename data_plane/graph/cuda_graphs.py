"""Steps captured as CUDA graphs: one memory pool and one stream for all graphs of an instance.

Two graphs of a pool never run at once. (The paper's section 5.2, Algorithm 2.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch

from data_plane.graph.lane_parts import LanePart, in_order, order_of_lanes
from data_plane.graph.pool_gpu import GpuContext, GpuPool
from nanocp.overlap.engine.streams import CudaStreams
from nanocp.overlap.ops import OverlapPolicy
from nanocp.overlap.policies.orders import BEHIND_FIRST


class LaneStep(Protocol):
    """The step of one lane; step.gpu.GpuStep."""

    @property
    def tags(self) -> Sequence[str]:
        """Tags of the parts of `phases`."""

    def phases(self, context: GpuContext) -> Iterator[LanePart]:
        """Launch the step, part by part."""

    def run(self, context: GpuContext) -> None:
        """Launch the step."""


Lane = tuple[GpuPool, LaneStep]
Draft = Callable[[GpuContext], None]


class StepWithDrafts:
    """A step over one context, and the drafting behind it."""

    __slots__ = ("_pool", "_step", "draft_on_device")

    def __init__(self, pool: GpuPool, step: Callable[[], None], turn: Callable[[], None]) -> None:
        self._pool, self._step = pool, step
        self.draft_on_device = turn
        """Runs a turn that the device sets up from the step before (step/triton_turns.py)."""

    def __call__(self) -> None:
        self._step()

    def draft_phases(self) -> Iterator[None]:
        """Run a turn that the host has set up, as one part."""
        self._pool.start(by_host=True)
        self.draft_on_device()
        return iter(())


class CudaGraphs:
    """The captured steps of one instance; an engine.Capture.

    The parts of lanes (micro-batches) are in one graph, in the order and on the streams of a
    policy, so one computes while the other's wait, a kernel of one block, spins. No kernel of a
    lane may need the whole GPU.
    """

    def __init__(
        self,
        *lanes: Lane,
        draft: Draft | None = None,
        policies: Sequence[OverlapPolicy] = (BEHIND_FIRST,),
    ) -> None:
        """draft: runs the MTP layer. policies: of two lanes. Raises as order_of_lanes."""
        self._lanes, self._draft = lanes, draft
        self._device = lanes[0][0].device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._side_streams = CudaStreams(self._device)
        tags = lanes[0][1].tags if lanes[1:] else ()
        self._orders = [order_of_lanes(tags, len(lanes), policy) for policy in policies]
        self._memory = torch.cuda.graph_pool_handle()
        self.num_graphs = 0
        self.num_bytes = 0
        """Device bytes of the captures, with the driver's share."""

    def __call__(self, *contexts: GpuContext, order: int = 0) -> Callable[[], None]:
        """Run the step once, then capture it; returns its replay.

        contexts: one for each running lane, lane 0 first. order: which of `policies` two lanes
        follow. Every peer must run the first run too.
        """
        self.warm(lambda: self._run(contexts, order))
        step = self.capture(*contexts, order=order)
        if self._draft is None or contexts[0].bucket.width == 1:
            return step
        turn = partial(self._draft, *contexts)
        self.warm(turn)
        return StepWithDrafts(self._lanes[0][0], step, self._captured(turn, ()))

    def warm(self, step: Callable[[], None]) -> None:
        """Run a step on the captures' stream and wait for it."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            step()
        self._stream.synchronize()

    def capture(self, *contexts: GpuContext, order: int = 0) -> Callable[[], None]:
        """Capture a step that has run before; returns its replay. Arguments: as of __call__."""
        pools = [pool for pool, _ in self._lanes[: len(contexts)]]
        return self._captured(lambda: self._run(contexts, order), pools)

    def _captured(self, run: Callable[[], None], pools: Sequence[GpuPool]) -> Callable[[], None]:
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        graph = torch.cuda.CUDAGraph()
        # Instances that share this process and its card may allocate in other threads meanwhile.
        with torch.cuda.graph(graph, self._memory, self._stream, capture_error_mode="thread_local"):
            run()
        self.num_bytes += free_bytes - torch.cuda.mem_get_info(self._device)[0]
        self.num_graphs += 1

        def replay() -> None:
            outside = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(outside)
            with torch.cuda.stream(self._stream):
                for pool in pools:
                    pool.start()
                graph.replay()
            outside.wait_stream(self._stream)

        return replay

    def _run(self, contexts: Sequence[GpuContext], order: int) -> None:
        first, *beside = contexts
        if not beside:
            return self._lanes[0][1].run(first)
        steps = zip(self._lanes, contexts, strict=True)
        lanes = [step.phases(context) for (_, step), context in steps]
        for _ in in_order(lanes, self._orders[order], self._side_streams):
            pass

    @property
    def report(self) -> str:
        """A line for an operator: the number of graphs and their memory."""
        return f"graphs: {self.num_graphs} captured, {self.num_bytes / 2**30:.2f} GiB"


def eager(*lanes: Lane, draft: Draft | None = None) -> Callable[..., Callable[[], None]]:
    """Return an engine.Capture that captures nothing and launches each step kernel by kernel.

    In any order of two lanes one runs behind the other.
    """

    def capture(*contexts: GpuContext, order: int = 0) -> Callable[[], None]:
        def run() -> None:
            for (pool, step), context in zip(lanes, contexts, strict=False):
                pool.start()
                step.run(context)

        if draft is None:
            return run
        return StepWithDrafts(lanes[0][0], run, partial(draft, *contexts))

    return capture
