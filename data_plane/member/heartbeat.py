"""A member's heartbeat: a thread that sends several times a second, also during computation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from nanocp.config.limits import LimitsConfig

_BEATS = 4
"""In the time after which a silent member is lost."""
_JOIN_S = 2.0


class Heartbeat:
    """Sends from the start on, while the interpreter runs."""

    def __init__(self, send: Callable[[], None], limits: LimitsConfig) -> None:
        self._send = send
        self._pause_s = limits.suspect_ms / _BEATS / 1000
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._closed.set()
        self._thread.join(_JOIN_S)

    def _beat(self) -> None:
        # At multiples of the pause: the beats of all members wake an idle controller once.
        while not self._closed.wait(self._pause_s - time.time() % self._pause_s):
            self._send()
