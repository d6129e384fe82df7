"""Spares: processes that have loaded an instance's common parts, and wait for a seat."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from control_plane.launchers.launcher import Launcher

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0
_MAX_FAILURES = 3
"""Consecutive spares that may end before they are ready."""
_JOIN_S = 10.0


class Spares:
    """Keeps a number of spares ready, in a thread of its own."""

    def __init__(
        self,
        launcher: Launcher,
        number: int,
        spec: Callable[[str], object],
        is_whole: Callable[[], bool],
    ) -> None:
        """spec: of a spare by name. is_whole: True if all wanted seats serve.

        Spares start only then: recovery has the machine to itself.
        """
        self._launcher = launcher
        self._number = number
        self._spec = spec
        self._is_whole = is_whole
        self._num_started = self._num_failures = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="spares", daemon=True)

    def start(self) -> None:
        """Begin to start spares, if there are to be any."""
        if self._number:
            self._thread.start()

    def stop(self) -> None:
        """Start no spare again. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    @property
    def num_ready(self) -> int:
        """Spares ready to take a seat. From any thread."""
        return sum(self._launcher.spares)

    def _keep(self) -> None:
        while self._num_failures < _MAX_FAILURES and not self._stopping.wait(_PAUSE_S):
            if len(self._launcher.spares) < self._number and self._is_whole():
                name = f"spare {self._num_started}"
                self._num_started += 1
                try:
                    self._launcher.start_spare(name, self._spec(name), self._ended)
                except (OSError, RuntimeError) as error:
                    self._ended(str(error), was_ready=False)

    def _ended(self, how: str, was_ready: bool) -> None:
        if self._stopping.is_set():
            return
        self._num_failures = 0 if was_ready else self._num_failures + 1
        logger.warning("a spare: %s", how)
        if self._num_failures == _MAX_FAILURES:
            logger.error(
                "%d spares ended before they were ready; no other is started", self._num_failures
            )
