"""Steps captured as CUDA graphs: one memory pool and one stream for all graphs of an instance.

Enters: a function that runs a step over a context. Leaves: replays, and what they cost in memory.
Does not know: what a step computes, buckets. Two graphs of one pool must not run at the same time;
graphs of several instances may, each instance on its own stream. (The paper's section 5.2,
Algorithm 2.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        """Bytes of device memory that the captures took, with the driver's share."""

    def __call__(self, context: GpuContext) -> Callable[[], None]:
        """Run the step once, then capture it; returns what replays it.

        The first run compiles and loads all that the step needs. Every peer must run it too.
        """
        self.warm(lambda: self._run(context))
        return self.capture(context)

    def warm(self, step: Callable[[], None]) -> None:
        """Run a step on the stream of the captures and wait for it."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            step()
        self._stream.synchronize()

    def capture(self, context: GpuContext) -> Callable[[], None]:
        """Capture a step that has run before; returns what replays it."""
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        graph = torch.cuda.CUDAGraph()
        # Instances that share this process and its card may allocate in other threads meanwhile.
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
        """A line for an operator: the number of graphs and their memory."""
        return f"graphs: {self.num_graphs} captured, {self.num_bytes / 2**30:.2f} GiB"


class LaneGraphs:
    """Steps of an instance's lanes, captured as one graph in which the lanes fork and join.

    Each lane has a stream of its own, so one computes while a wait of the other one spins. A wait
    is a kernel of one block: no kernel of a lane may need all of the GPU at once to go on.
    """

    def __init__(self, lanes: Sequence[tuple[GpuPool, Run]]) -> None:
        """lanes: the pool and the step of each."""
        self._lanes = lanes
        self._device = lanes[0][0].device
        self._streams = [
            torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            for _ in lanes
        ]
        self._memory = torch.cuda.graph_pool_handle()

    def capture(self, contexts: Sequence[GpuContext]) -> Callable[[], None]:
        """Capture a step over a context of each lane; returns what replays it.

        Each lane's step has run over its context before.
        """
        graph, first = torch.cuda.CUDAGraph(), self._streams[0]
        with torch.cuda.graph(graph, self._memory, first, capture_error_mode="thread_local"):
            for stream in self._streams[1:]:
                stream.wait_stream(first)
            for (_, run), stream, context in zip(self._lanes, self._streams, contexts, strict=True):
                with torch.cuda.stream(stream):
                    run(context)
            for stream in self._streams[1:]:
                first.wait_stream(stream)

        def replay() -> None:
            outside = torch.cuda.current_stream(self._device)
            first.wait_stream(outside)
            with torch.cuda.stream(first):
                for pool, _ in self._lanes:
                    pool.start()
                graph.replay()
            outside.wait_stream(first)

        return replay


def eager(pool: GpuPool, run: Run) -> Callable[[GpuContext], Callable[[], None]]:
    """An engine.Capture that captures nothing: each step is launched kernel by kernel."""

    def capture(context: GpuContext) -> Callable[[], None]:
        def step() -> None:
            pool.start()
            run(context)

        return step

    return capture
