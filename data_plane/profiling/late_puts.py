"""An exchange whose puts arrive late, as over a link that takes time.

Enters: a delay. Leaves: an Exchange (transport/exchange.py). Does not know: who measures.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import suppress

from data_plane.transport.exchange import Channel, Flags
from data_plane.transport.shm import ShmExchange


class LateExchange(ShmExchange):
    """An end of the exchange that publishes each put `late_s` seconds after it was made.

    The sender goes on at once. The puts keep their order.
    """

    late_s = 0.0
    _thread: threading.Thread | None = None

    def put(self, channel: Channel, target: int, epoch: int, num_rows: int | None = None) -> None:
        """Publish the region later; see Exchange.put."""
        if self._thread is None:
            self._late: deque[tuple[float, Channel, int, int, int | None]] = deque()
            self._made = threading.Semaphore(0)
            self._thread = threading.Thread(target=self._publish, daemon=True)
            self._thread.start()
        self._late.append((time.monotonic() + self.late_s, channel, target, epoch, num_rows))
        self._made.release()

    def flags(self, channel: Channel, peer: int, epoch: int) -> Flags:
        """Only the flag that a peer raises: what this end puts is late."""
        return Flags(None, super().flags(channel, peer, epoch).incoming)

    def _publish(self) -> None:
        # A link does not wait for a core. Where that may not be asked for, it does.
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(2))
        while self._made.acquire():
            due, channel, target, epoch, num_rows = self._late.popleft()
            time.sleep(max(0.0, due - time.monotonic()))
            super().put(channel, target, epoch, num_rows)
