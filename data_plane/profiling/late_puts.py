"""An exchange whose puts arrive late, as over a link that takes time.

Enters: a latency, a rate. Leaves: an Exchange (transport/exchange.py). Does not know: who measures.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import time
from collections import deque
from contextlib import suppress

from data_plane.transport.exchange import Channel, Flags
from data_plane.transport.shm import ShmExchange

_SYS_SCHED_SETATTR = 314
"""Linux's number on x86-64; the C library has no function for it."""
_LONG_SLICE_NS = 100_000_000


def let_others_in() -> None:
    """From now on a thread that wakes up on this thread's processor runs at once.

    Linux lets it wait for the rest of a slice, a millisecond or more. A network card does not wait
    for compute, and so a thread that stands for one must not either. A thread of longer slices is
    interrupted by one of shorter slices; its share of the processor stays. Linux before 6.12 has no
    such slices and changes nothing. Threads that were started before keep theirs. In a process with
    a real-time priority (`chrt -f 10`, for a busy machine) this thread takes the one below.
    """
    policy = os.sched_getscheduler(0)
    if policy in (os.SCHED_FIFO, os.SCHED_RR):
        priority = os.sched_getparam(0).sched_priority
        os.sched_setscheduler(0, policy, os.sched_param(max(1, priority - 1)))
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = struct.pack("IIQiIQQQ", 48, os.SCHED_OTHER, 0, nice, 0, _LONG_SLICE_NS, 0, 0)
    ctypes.CDLL(None).syscall(_SYS_SCHED_SETATTR, 0, attributes, 0)


class LateExchange(ShmExchange):
    """An end of the exchange that publishes each put when a link would have carried it.

    The sender goes on at once. The puts keep their order. From the first late put on, the thread
    that publishes interrupts the sender (`let_others_in`). Latency and rate change only while no
    put is on its way.
    """

    late_s = 0.0
    """The link's latency."""
    ns_per_byte = 0.0
    """How long the link, which carries one put after the other, needs for a byte."""
    _free_s = 0.0
    """When the link has carried all that was put."""
    _thread: threading.Thread | None = None

    def put(self, channel: Channel, target: int, epoch: int, num_rows: int | None = None) -> None:
        """Publish the region later; see Exchange.put."""
        if not (self.late_s or self.ns_per_byte):
            super().put(channel, target, epoch, num_rows)
            return
        if self._thread is None:
            self._late: deque[tuple[float, Channel, int, int, int | None]] = deque()
            self._made = threading.Semaphore(0)
            self._thread = threading.Thread(target=self._publish, daemon=True)
            self._thread.start()
            let_others_in()
        places = self._outgoing[target][channel][epoch & 1].places
        num_bytes = sum(place.chunk(num_rows)[1] for place in places)
        self._free_s = max(self._free_s, time.monotonic()) + 1e-9 * self.ns_per_byte * num_bytes
        self._late.append((self._free_s + self.late_s, channel, target, epoch, num_rows))
        self._made.release()

    def flags(self, channel: Channel, peer: int, epoch: int) -> Flags:
        """Only the flag that a peer raises: what this end puts is late."""
        return Flags(None, super().flags(channel, peer, epoch).incoming)

    def _publish(self) -> None:
        # A link does not wait for a core. Where that may not be asked for, it does.
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            with suppress(PermissionError):
                os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(2))
        while self._made.acquire():
            due, channel, target, epoch, num_rows = self._late.popleft()
            time.sleep(max(0.0, due - time.monotonic()))
            super().put(channel, target, epoch, num_rows)
