"""Steps captured as CUDA graphs: one memory pool and one stream for all graphs of an instance.

Two graphs of a pool never run at once. (The paper's section 5.2, Algorithm 2.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from data_plane.graph.pool_gpu import GpuContext, GpuPool

Run = Callable[[GpuContext], None]


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

    Lanes (micro-batches) of a step fork and join in one graph, on streams of their own, so one
    computes while the other's wait, a kernel of one block, spins. No kernel of a lane may need the
    whole GPU.
    """

    def __init__(
        self, pool: GpuPool, run: Run, *beside: tuple[GpuPool, Run], draft: Run | None = None
    ) -> None:
        """pool, run: of lane 0. beside: of the other lanes. draft: runs the MTP layer."""
        self._lanes, self._draft = ((pool, run), *beside), draft
        self._device = pool.device
        self._stream, *self._side_streams = (
            torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
            for _ in self._lanes
        )
        self._memory = torch.cuda.graph_pool_handle()
        self.num_graphs = 0
        self.num_bytes = 0
        """Device bytes of the captures, with the driver's share."""

    def __call__(self, *contexts: GpuContext) -> Callable[[], None]:
        """Run the step once, then capture it; returns its replay.

        contexts: one for each running lane, lane 0 first. Every peer must run the first run too.
        """
        self.warm(lambda: self._run(contexts))
        step = self.capture(*contexts)
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

    def capture(self, *contexts: GpuContext) -> Callable[[], None]:
        """Capture a step that has run before; returns its replay. contexts: as of __call__."""
        pools = [pool for pool, _ in self._lanes[: len(contexts)]]
        return self._captured(lambda: self._run(contexts), pools)

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

    def _run(self, contexts: Sequence[GpuContext]) -> None:
        side_streams = self._side_streams[: len(contexts) - 1]
        for stream in side_streams:
            stream.wait_stream(self._stream)
        streams = (self._stream, *side_streams)
        lanes = self._lanes[: len(contexts)]
        for (_, run), stream, context in zip(lanes, streams, contexts, strict=True):
            with torch.cuda.stream(stream):
                run(context)
        for stream in side_streams:
            self._stream.wait_stream(stream)

    @property
    def report(self) -> str:
        """A line for an operator: the number of graphs and their memory."""
        return f"graphs: {self.num_graphs} captured, {self.num_bytes / 2**30:.2f} GiB"


def eager(
    pool: GpuPool, run: Run, *beside: tuple[GpuPool, Run], draft: Run | None = None
) -> Callable[..., Callable[[], None]]:
    """Return an engine.Capture that captures nothing and launches each step kernel by kernel."""
    lanes = ((pool, run), *beside)

    def capture(*contexts: GpuContext) -> Callable[[], None]:
        def step() -> None:
            for (pool, run), context in zip(lanes[: len(contexts)], contexts, strict=True):
                pool.start()
                run(context)

        if draft is None:
            return step
        return StepWithDrafts(pool, step, partial(draft, *contexts))

    return capture
