"""Stand-in for torch.cuda: notes what is launched and awaited, on which stream."""

import threading
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch


class Graph:
    """Stands for a captured graph: it runs anew what was launched in it."""

    def __init__(self, cuda):
        self.cuda, self.calls = cuda, []

    def replay(self):
        self.cuda.log.append((self.cuda.now.name, "replays"))
        for call in self.calls:
            call()


class Cuda:
    """Streams, events and graphs without a device; `log` has what happened, in order."""

    def __init__(self):
        self.log, self.graphs = [], []
        self._capturing, self._of_thread = None, threading.local()
        self._caller = self.stream_named("caller")

    @property
    def now(self):
        """The stream of this thread's launches."""
        return getattr(self._of_thread, "stream", self._caller)

    def launch(self, call):
        """Run the call, or keep it for the graph that is being captured."""
        if self._capturing is None:
            call()
        else:
            self._capturing.calls.append(call)

    def stream_named(self, name):
        """A stream that notes for whom it waits."""

        def note(verb):
            return lambda other: self.log.append((name, verb, getattr(other, "name", other)))

        stream = SimpleNamespace(name=name, wait_stream=note("waits"), wait_event=note("awaits"))
        stream.synchronize = lambda: self.log.append((name, "ends"))
        return stream

    def install(self, monkeypatch):
        """Take the place of torch.cuda."""
        made = []

        def new(device):
            made.append(self.stream_named(f"side {len(made)}"))
            return made[-1]

        @contextmanager
        def inside(stream):
            before, self._of_thread.stream = self.now, stream
            yield
            self._of_thread.stream = before

        @contextmanager
        def graph(graph, pool, stream, capture_error_mode):
            assert capture_error_mode == "thread_local"
            with inside(stream):
                self.log.append("capture")
                self._capturing = graph
                yield
                self._capturing = None
                self.log.append("captured")

        def new_graph():
            self.graphs.append(Graph(self))
            return self.graphs[-1]

        def event():
            return SimpleNamespace(record=lambda stream: self.log.append((stream.name, "records")))

        for name, value in {
            "Stream": new,
            "Event": event,
            "stream": inside,
            "current_stream": lambda device: self.now,
            "graph": graph,
            "CUDAGraph": new_graph,
            "graph_pool_handle": lambda: "memory",
            "empty_cache": lambda: None,
            "mem_get_info": lambda device: (0, 0),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


class OneStream:
    """Streams of a device that has one: nothing to note."""

    forked = on = staticmethod(nullcontext)
    record = wait = use = staticmethod(lambda *_: None)
