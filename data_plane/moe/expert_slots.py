"""The expert slots of an instance: filled from the checkpoint, in a thread beside the steps."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from data_plane.moe.expert_tables import ExpertSlots
from data_plane.moe.expert_weights import ExpertWeights
from data_plane.moe.mixture import Mixtures
from nanocp.values.experts import ExpertTable

logger = logging.getLogger(__name__)


class _Stopped(Exception):
    """What is loaded is not wanted any more."""


class LoadedSlots(ExpertSlots):
    """Slots whose experts are read from a checkpoint."""

    def __init__(self, steps: Sequence[Mixtures], weights: ExpertWeights, mb_per_s: int) -> None:
        """steps: all whose rows follow the table. mb_per_s: most that `fill` loads, in MB/s."""
        self._steps, self._weights, self._bytes_per_s = steps, weights, mb_per_s * 1e6
        self.wake: Callable[[], None] = lambda: None
        self._is_stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._filled: deque[tuple[int, str]] = deque()
        self._num_slots = 0

    def place(self, table: ExpertTable) -> None:
        began = time.monotonic()
        num_loaded = self._weights.load(table)
        self.follow(table)
        if num_loaded:
            logger.info("loaded %d experts in %.2f s", num_loaded, time.monotonic() - began)

    def follow(self, table: ExpertTable) -> None:
        self._num_slots = table.num_slots
        for step in self._steps:
            step.place_experts(table)

    def fill(self, number: int, table: ExpertTable) -> None:
        self.stop()
        self._is_stopped.clear()
        self._thread = threading.Thread(
            target=self._fill, args=(number, table), name="expert loader", daemon=True
        )
        self._thread.start()

    def _fill(self, number: int, table: ExpertTable) -> None:
        problem = ""
        try:
            self._weights.load(table, self._pause)
        except _Stopped:
            return
        except Exception as error:
            logger.exception("experts cannot be loaded")
            problem = "; ".join(
                [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
            )
        self._filled.append((number, problem))
        self.wake()

    def _pause(self, num_bytes: int) -> None:
        if self._is_stopped.wait(num_bytes / self._bytes_per_s):
            raise _Stopped

    def filled(self) -> tuple[int, str] | None:
        return self._filled.popleft() if self._filled else None

    def stop(self) -> None:
        if self._thread is not None:
            self._is_stopped.set()
            # It ends after the expert that it reads.
            self._thread.join()
            self._thread = None
        self._filled.clear()

    def loads(self) -> tuple[bytes, ...]:
        total, *others = [step.loads() for step in self._steps]
        for each in others:
            total = total + each
        return tuple(layer.numpy().tobytes() for layer in total)

    def held(self) -> tuple[bytes, ...]:
        return self._weights.held(self._num_slots) if self._num_slots else ()
