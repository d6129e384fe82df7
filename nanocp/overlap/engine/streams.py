"""Named GPU streams and their events; a CPU has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from nanocp.overlap.ops import OrderedStep

AnyStep = TypeVar("AnyStep", bound=OrderedStep)


class CudaStreams:
    """Streams of a CUDA device, of one forward at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._forked: set[str] = set()

    @contextmanager
    def forked(self) -> Iterator[None]:
        """Begin a forward on the caller's stream, which at the end waits for all others."""
        self._outside = torch.cuda.current_stream(self._device)
        self._forked.clear()
        try:
            yield
        finally:
            for name in self._forked:
                self._outside.wait_stream(self._streams[name])

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Launch the code inside on this stream; empty: on the caller's."""
        stream = self._outside
        if name:
            if name not in self._streams:
                self._streams[name] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            stream = self._streams[name]
            if name not in self._forked:
                self._forked.add(name)
                stream.wait_stream(self._outside)
        with torch.cuda.stream(stream):
            yield

    def record(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """Make the current stream wait for the event."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def use(self, values: Iterable[Any]) -> None:
        """Note that the current stream reads these tensors, so that their memory is kept."""
        stream = torch.cuda.current_stream(self._device)
        for value in values:
            if isinstance(value, torch.Tensor) and value.is_cuda:
                value.record_stream(stream)


def launched(
    steps: Sequence[AnyStep], streams: CudaStreams, run: Callable[[AnyStep], None]
) -> Iterator[None]:
    """Run each step on its stream, behind those that it comes after; yield before each."""
    awaited = {place for step in steps for place in step.after}
    events: dict[int, Any] = {}
    with streams.forked():
        for place, step in enumerate(steps):
            yield
            with streams.on(step.stream):
                for earlier in step.after:
                    streams.wait(events[earlier])
                run(step)
                if place in awaited:
                    events[place] = streams.record()


def streams_of(inputs: Sequence[Any]) -> CudaStreams | None:
    """Streams of the first CUDA tensor's device; None if there is none."""
    for each in inputs:
        if isinstance(each, torch.Tensor) and each.is_cuda:
            return CudaStreams(each.device)
    return None
