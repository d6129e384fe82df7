"""Named GPU streams and their events; a CPU has none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

import torch

from nanocp.overlap.ops import OrderedStep

AnyStep = TypeVar("AnyStep", bound=OrderedStep)


class Streams(Protocol):
    """Streams of one forward at a time."""

    def forked(self) -> AbstractContextManager[None]:
        """Begin a forward on the caller's stream, which at the end waits for all others."""

    def on(self, name: str) -> AbstractContextManager[None]:
        """Launch the code inside on this stream; empty: on the caller's."""

    def record(self) -> Any:
        """Record an event on the current stream."""

    def wait(self, event: Any) -> None:
        """Make this stream wait for the event."""

    def use(self, values: Iterable[Any]) -> None:
        """Note that the current stream reads these tensors, so that their memory is kept."""


class CudaStreams(Streams):
    """Streams of a CUDA device."""

    def __init__(self, device: torch.device, num_sms: Mapping[str, int] | None = None) -> None:
        """num_sms: SMs of each stream's green context."""
        self._device = device
        self._num_sms = num_sms or {}
        self._contexts: list[Any] = []
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._forked: set[str] = set()

    @contextmanager
    def forked(self) -> Iterator[None]:
        self._outside = torch.cuda.current_stream(self._device)
        self._forked.clear()
        try:
            yield
        finally:
            for name in self._forked:
                self._outside.wait_stream(self._streams[name])

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        stream = self._outside
        if name:
            stream = self._streams.get(name) or self._make(name)
            if name not in self._forked:
                self._forked.add(name)
                stream.wait_stream(self._outside)
        with torch.cuda.stream(stream):
            yield

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def use(self, values: Iterable[Any]) -> None:
        stream = torch.cuda.current_stream(self._device)
        for value in values:
            if isinstance(value, torch.Tensor) and value.is_cuda:
                value.record_stream(stream)

    def _make(self, name: str) -> torch.cuda.Stream:
        num_sms = self._num_sms.get(name)
        if num_sms is None:
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        else:
            context = green_context(num_sms, self._device)
            self._contexts.append(context)  # the stream ends with it
            stream = context.Stream()
        self._streams[name] = stream
        return stream


def launched(
    steps: Sequence[AnyStep], streams: Streams, run: Callable[[AnyStep], None]
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


def green_context(num_sms: int, device: torch.device) -> Any:
    """A green context with that many multiprocessors.

    Raises RuntimeError if torch or the driver lacks them.
    """
    from torch.cuda import green_contexts

    made = green_contexts.GreenContext
    if not green_contexts.SUPPORTED or not hasattr(made, "Stream"):
        raise RuntimeError(f"torch {torch.__version__} has no streams of green contexts")
    known = inspect.signature(made.create).parameters
    number = "device_id" if "device_id" in known else "device"
    arguments: dict[str, Any] = {"num_sms": num_sms, number: device.index or 0}
    return made.create(**arguments)
