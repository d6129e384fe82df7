"""An exchange whose puts arrive late."""

from __future__ import annotations

import ctypes
import os
import struct
import time

from data_plane.native.build import puts_library
from data_plane.transport.exchange import Channel, Flags
from data_plane.transport.shm import ShmExchange
from data_plane.transport.tcp.messages import put_header
from data_plane.transport.tcp.segment import TcpSegment

_SYS_SCHED_SETATTR = 314
"""Linux's number on x86-64; the C library has no function for it."""
_LONG_SLICE_NS = 100_000_000


def let_others_in() -> None:
    """Let threads that wake up on this thread's processor run at once from now on.

    Linux lets them wait for the rest of a slice, a millisecond or more; a network card would not.
    So this thread gets longer slices (Linux 6.12 or later). In a process with a real-time priority
    (`chrt -f 10`, for a busy machine) it takes the one below.
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
    """Publishes each put, in order, after the time of a link."""

    late_s = 0.0
    ns_per_byte = 0.0
    """The link carries one put after the other."""
    _free_s = 0.0
    _link: int | None = None
    """class LateLink of native/late.h."""

    def put(self, channel: Channel, target: int, epoch: int, num_rows: int | None = None) -> None:
        """Publish the region later.

        Raises NativeUnavailable if this machine cannot compile the publishing thread.
        """
        if not (self.late_s or self.ns_per_byte):
            super().put(channel, target, epoch, num_rows)
            return
        if self._link is None:
            self._begin_link()
        region = self._outgoing[target][channel][epoch & 1]
        flag, value = region.flag, epoch + 1
        offset, num_bytes = region.run(num_rows)
        self._free_s = max(self._free_s, time.monotonic()) + 1e-9 * self.ns_per_byte * num_bytes
        connection, header, parts = -1, b"", list[int]()
        if target in self._remote:
            peer = self._peers[target]
            assert isinstance(peer, TcpSegment)
            connection = peer.fileno()
            header = put_header(flag.offset, value, [(offset, num_bytes)])
            parts = [flag.address + offset - flag.offset, num_bytes]
        due_ns = int((self._free_s + self.late_s) * 1e9)
        addresses = (ctypes.c_long * len(parts))(*parts)
        self._put(
            self._link,
            due_ns,
            flag.address,
            value,
            connection,
            header,
            len(header),
            addresses,
            len(parts) // 2,
        )

    def flags(self, channel: Channel, peer: int, epoch: int) -> Flags:
        return Flags(None, super().flags(channel, peer, epoch).incoming)

    def close(self) -> None:
        if self._link is not None:
            self._end_link(self._link)
            self._link = None
        super().close()

    def _begin_link(self) -> None:
        library = puts_library()
        new, self._end_link = library.nanocp_new_late_link, library.nanocp_delete_late_link
        self._put = library.nanocp_put_late
        new.restype, new.argtypes = ctypes.c_void_p, ()
        self._end_link.restype, self._end_link.argtypes = None, (ctypes.c_void_p,)
        long, pointer = ctypes.c_long, ctypes.c_void_p
        self._put.restype = None
        self._put.argtypes = (
            *(pointer, long, pointer, long),
            *(ctypes.c_int, ctypes.c_char_p, long, pointer, long),
        )
        self._link = new()
        let_others_in()
