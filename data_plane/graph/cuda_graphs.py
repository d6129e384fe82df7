"""Steps captured as CUDA graphs: one memory pool and one stream for all graphs of an instance (5.2,
Algorithm 2).

Enters: a function that runs a step over a context. Leaves: replays, and what they cost in memory.
Does not know: what a step computes, buckets. Graphs of a pool must not run at one time; those of
several instances may, each on its stream.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from data_plane.graph.pool_gpu import GpuContext, GpuPool

Run = Callable[[GpuContext], None]


class CudaGraphs:
    """The captured steps of one instance; see engine.Capture."""

    def __init__(self, pool: GpuPool, run: Run) -> None:
        self._pool, self._run, self._device = pool, run, pool.device
        self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()
        self.num_graphs = 0
        self.num_bytes = 0
        """Of the device's memory that the captures took, the driver's share of it too."""

    def __call__(self, context: GpuContext) -> Callable[[], None]:
        """Run the step once, together with every peer, so that all it needs is compiled and loaded;
        then capture it."""
        self.warm(lambda: self._run(context))
        return self.capture(context)

    def warm(self, step: Callable[[], None]) -> None:
        """Run something on the stream of the captures, and wait for it."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            step()
        self._stream.synchronize()

    def capture(self, context: GpuContext) -> Callable[[], None]:
        """Capture a step that ran before, and what launches it."""
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may allocate: instances that share it, on one card.
        with torch.cuda.graph(graph, self._memory, self._stream, capture_error_mode="thread_local"):
            self._run(context)
        self.num_bytes += free_bytes - torch.cuda.mem_get_info(self._device)[0]
        self.num_graphs += 1

        def replay() -> None:
            outside = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(outside)
            with torch.cuda.stream(self._stream):
                self._pool.start()
                graph.replay()
            outside.wait_stream(self._stream)

        return replay

    @property
    def report(self) -> str:
        """For an operator."""
        return f"graphs: {self.num_graphs} captured, {self.num_bytes / 2**30:.2f} GiB"


def eager(pool: GpuPool, run: Run) -> Callable[[GpuContext], Callable[[], None]]:
    """An engine.Capture that captures nothing: every step is launched kernel by kernel."""

    def capture(context: GpuContext) -> Callable[[], None]:
        def step() -> None:
            pool.start()
            run(context)

        return step

    return capture
