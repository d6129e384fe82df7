"""Copies full pages between an instance's frames and its slots (KV offload), beside its steps.

No step writes a stowed (offloaded) page, which is full, or reads a fetched (loaded) one's frame
before its ticket is over.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from data_plane.kv.slots import Slots
from nanocp.values.offload import Fetch, Stow, TransferMissed
from nanocp.values.plan import PAGE_SIZE, TransferDone, TransferFenced

if TYPE_CHECKING:  # instances whose tokens are hashes do without torch
    from data_plane.kv.gpu_copies import GpuCopies

_MAX_LOADED = 4
"""Most pages that wait for another instance's ring; reading stops there."""
_END_S = 10.0

CopyEvent = TransferDone | TransferFenced | TransferMissed


class LoadedPage(NamedTuple):
    """A page read from a slot, for another instance."""

    ticket: int
    page: int
    receiver: int
    payload: Any


class _Load(NamedTuple):
    ticket: int
    page: int
    slot: int
    receiver: int
    frame: int | None
    """The target frame; None: another instance."""


class PageCopier:
    """Executes copies one by one, in order; `run_one` has its own thread after `start`."""

    def __init__(
        self,
        instance: int,
        slots: Slots,
        read_page: Callable[[int], Any],
        write_page: Callable[[int, int, Any, int], None],
        gpu: GpuCopies | None = None,
    ) -> None:
        """read_page, write_page: `read` and `write` of PageFrames. gpu: None on a CPU."""
        self._instance = instance
        self.slots, self._gpu = slots, gpu
        if gpu is not None:
            slots.copy = gpu.copy_out
        self._read_page, self._write_page = read_page, write_page
        self.wake: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._jobs: deque[Stow | _Load] = deque()
        self._is_busy = self._is_abandoned = self._is_closed = False
        self._failure: Exception | None = None
        self._loaded: deque[LoadedPage] = deque()
        self._events: list[CopyEvent] = []
        self._filled: list[tuple[int, int]] = []
        self._writing = threading.Lock()
        """Held while a frame is written, against a fence."""
        self._live: set[int] = set()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the copying thread."""
        self._thread = threading.Thread(target=self._run_for_ever, name="page copier", daemon=True)
        self._thread.start()

    def stow(self, stow: Stow) -> None:
        """Copy pages into slots, as interface.Instance.stow says."""
        self._add([stow])

    def fetch(self, fetch: Fetch, frames: dict[int, int]) -> None:
        """Read pages from slots, and write this instance's into frames (page -> frame)."""
        jobs: list[Stow | _Load] = []
        for page, slot, receiver in fetch.pages:
            is_here = receiver == self._instance
            if not is_here or page in frames:
                jobs.append(_Load(fetch.ticket, page, slot, receiver, frames.get(page)))
        if frames:  # else nobody would say that the ticket is over
            with self._writing:
                self._live.add(fetch.ticket)
        self._add(jobs)

    def _add(self, jobs: list[Stow | _Load]) -> None:
        if self._gpu is not None:
            self._gpu.follow()
        with self._changed:
            self._jobs += jobs
            self._changed.notify_all()

    def cancel(self, ticket: int) -> None:
        """Write no page of the ticket into a frame from now on."""
        with self._writing:
            self._live.discard(ticket)

    @property
    def is_idle(self) -> bool:
        """True if nothing is copied, taken or sent."""
        with self._changed:
            return not (self._jobs or self._is_busy or self._loaded or self._events or self._filled)

    def take(self) -> tuple[list[CopyEvent], list[tuple[int, int]]]:
        """Return events, and (ticket, page) of pages in their frames, since the last call.

        Raises RuntimeError if a copy has failed.
        """
        with self._changed:
            if self._failure is not None:
                raise RuntimeError(f"a page was not copied: {self._failure!r}") from self._failure
            taken = self._events, self._filled
            self._events, self._filled = [], []
        return taken

    def loaded(self) -> LoadedPage | None:
        """Return the next page for another instance, until `sent`."""
        with self._changed:
            return self._loaded[0] if self._loaded else None

    def sent(self) -> None:
        """Remove the page of `loaded`: it has left."""
        with self._changed:
            self._loaded.popleft()
            self._changed.notify_all()

    def abandon(self) -> None:
        """Forget every command, after the page in copying; TimeoutError if it takes too long."""
        with self._changed:
            self._jobs.clear()
            self._is_abandoned = True
            if not self._changed.wait_for(lambda: not self._is_busy, _END_S):
                raise TimeoutError(
                    f"a page of kv_offload was still being copied after {_END_S:.0f} s"
                )
            self._is_abandoned = False
            self._loaded.clear()
            self._events, self._filled = [], []
        with self._writing:
            self._live.clear()

    def close(self) -> None:
        """End the thread and release the slots. Idempotent."""
        with self._changed:
            self._jobs.clear()
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_END_S)
        if self._gpu is not None:
            self._gpu.close()
        self.slots.close()

    def run_one(self) -> bool:
        """Copy the next page; False if there is none, or too many wait to be sent."""
        with self._changed:
            if not self._may_run():
                return False
            job = self._jobs.popleft()
            self._is_busy = True
        done: CopyEvent | LoadedPage | tuple[int, int] | Exception | None
        try:
            with nullcontext() if self._gpu is None else self._gpu.stream():
                done = self._stow(job) if isinstance(job, Stow) else self._load(job)
        except Exception as error:
            done = error
        with self._changed:
            self._is_busy = False
            match done:
                case LoadedPage():
                    self._loaded.append(done)
                case Exception():
                    self._failure = done
                case (ticket, page):
                    self._filled.append((ticket, page))
                case TransferDone() | TransferFenced() | TransferMissed():
                    self._events.append(done)
            self._changed.notify_all()
        self.wake()
        return True

    def _stow(self, stow: Stow) -> CopyEvent:
        for source, slot in stow.pages:
            payload = self.slots.read(source) if stow.is_demotion else self._read_page(source)
            if self._is_abandoned or payload is None or not self.slots.write(slot, payload):
                return TransferFenced(stow.ticket, self._instance)
        return TransferDone(stow.ticket, self._instance)

    def _load(self, load: _Load) -> LoadedPage | TransferMissed | tuple[int, int] | None:
        payload: Any = self.slots.read(load.slot)
        if payload is None:
            return TransferMissed(load.ticket, self._instance)
        if load.frame is None:
            return LoadedPage(load.ticket, load.page, load.receiver, payload)
        with self._writing:
            if load.ticket not in self._live:
                return None
            if self._gpu is not None:
                payload = self._gpu.copy_in(payload)
            self._write_page(load.frame, PAGE_SIZE, payload, 0)
        return load.ticket, load.page

    def _may_run(self) -> bool:
        return bool(self._jobs) and len(self._loaded) < _MAX_LOADED and self._failure is None

    def _run_for_ever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._may_run())
                if self._is_closed:
                    return
            self.run_one()
