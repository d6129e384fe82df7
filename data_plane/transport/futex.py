"""A 64-bit word in shared memory: one process raises it, another polls, yields, then sleeps.

Linux on x86-64 only, whose stores become visible in order: the word proves all earlier writes.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence

_SYS_FUTEX, _SYS_FUTEX_WAITV = 202, 449
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ALL_WAITERS = 2**31 - 1
_LOW_BITS = 2**32 - 1
_FUTEX2_SIZE_U32 = 2
_CLOCK_MONOTONIC = 1
_WITHOUT_WAITV_S = 0.0005

# Measured: yielding is the fastest way to meet a peer that computes on another core. 200 yields
# delay the sleep of a wait that turns out to be long by only a tenth of a millisecond.
_NUM_POLLS = 20
_NUM_YIELDS = 200
# A yield that takes longer gave the core to a process that computes for its whole time slice, or
# the interpreter's lock to a thread. Linux takes the rest of the slice from who yields, so such
# yields add up; who sleeps is woken soon.
_LONG_YIELD_S, _SLEEPS_S = 0.002, 1.0
_sleeps_until_s = 0.0


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


class _FutexWaitv(ctypes.Structure):
    _fields_ = [
        ("val", ctypes.c_uint64),
        ("uaddr", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


_TIMEOUT = ctypes.POINTER(_Timespec)
_ARGTYPES = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, _TIMEOUT)
_sleeping_syscall = ctypes.CDLL(None, use_errno=True).syscall
_sleeping_syscall.argtypes = _ARGTYPES
_sleeping_syscall.restype = ctypes.c_long
_several_syscall = ctypes.CDLL(None, use_errno=True).syscall
_several_syscall.argtypes = (
    ctypes.c_long,
    ctypes.POINTER(_FutexWaitv),
    ctypes.c_uint,
    ctypes.c_uint,
    _TIMEOUT,
    ctypes.c_int,
)
_several_syscall.restype = ctypes.c_long
# A wake never blocks, so it keeps the interpreter lock. Given up to a busy thread, the lock may
# come back only after 5 ms.
_brief_syscall = ctypes.PyDLL(None).syscall
_brief_syscall.argtypes = _ARGTYPES
_brief_syscall.restype = ctypes.c_long


def require_platform() -> None:
    """Raise ValueError, naming this platform, unless it is Linux on x86-64."""
    system, machine = sys.platform, platform.machine()
    if system != "linux" or machine != "x86_64":
        raise ValueError(
            f"the exchange over shared memory needs linux on x86_64 (its stores are ordered), "
            f"not {system} on {machine}"
        )


def _futex_wait(address: int, value: int, timeout_s: float) -> None:
    """Sleep while the u32 at the address equals the value; it may also wake for no reason."""
    seconds = int(timeout_s)
    timeout = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    if _sleeping_syscall(_SYS_FUTEX, address, _FUTEX_WAIT, value, ctypes.byref(timeout)) == 0:
        return
    error = ctypes.get_errno()
    if error not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
        raise OSError(error, f"futex wait failed: {os.strerror(error)}")


def _futex_wait_any(values: Sequence[tuple[int, int]], timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s
    until = _Timespec(int(end_s), int(end_s % 1 * 1e9))
    waiters = (_FutexWaitv * len(values))(
        *(_FutexWaitv(value, address, _FUTEX2_SIZE_U32, 0) for address, value in values)
    )
    pointer = ctypes.byref(until)
    if _several_syscall(_SYS_FUTEX_WAITV, waiters, len(values), 0, pointer, _CLOCK_MONOTONIC) >= 0:
        return
    error = ctypes.get_errno()
    if error == errno.ENOSYS:  # Linux before 5.16
        _futex_wait(*values[0], min(timeout_s, _WITHOUT_WAITV_S))
    elif error not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
        raise OSError(error, f"futex_waitv failed: {os.strerror(error)}")


def _yields() -> Iterator[None]:
    global _sleeps_until_s
    for _ in range(_NUM_YIELDS):
        if (before_s := time.monotonic()) < _sleeps_until_s:
            return
        os.sched_yield()
        if time.monotonic() > before_s + _LONG_YIELD_S:
            _sleeps_until_s = before_s + _SLEEPS_S
        yield


class Word:
    """A u64 that only grows and that one process writes; its low 32 bits are the futex.

    It keeps the buffer mapped.
    """

    __slots__ = ("_cell", "address", "offset")

    def __init__(self, buffer: mmap.mmap, offset: int) -> None:
        assert offset % 8 == 0, f"a word at offset {offset} could be torn"
        self.offset = offset
        self._cell = memoryview(buffer)[offset : offset + 8].cast("Q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(buffer, offset))
        """Valid until the buffer is closed."""

    def load(self) -> int:
        """The value now."""
        return self._cell[0]

    def store(self, value: int) -> None:
        """Publish the value and all earlier writes of this thread; wake every waiter."""
        self._cell[0] = value
        self.wake()

    def wake(self) -> None:
        """Make every waiter look again."""
        _brief_syscall(_SYS_FUTEX, self.address, _FUTEX_WAKE, _ALL_WAITERS, None)

    def wait_at_least(
        self, value: int, timeout_ms: float, tick_ms: float, go_on: Callable[[], bool]
    ) -> int | None:
        """Block until the word is `value` or more; return the word's value.

        Returns None after the timeout, or once `go_on()`, asked at least every tick, is False,
        unless the value is there.
        """
        cell = self._cell
        for _ in range(_NUM_POLLS):
            if (now := cell[0]) >= value:
                return now
        for _ in _yields():
            if (now := cell[0]) >= value:
                return now
        deadline = time.monotonic() + timeout_ms / 1000
        while (now := cell[0]) < value:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            _futex_wait(self.address, now & _LOW_BITS, min(left_s, tick_ms / 1000))
            if cell[0] < value and not go_on():
                now = cell[0]
                return now if now >= value else None
        return now


def wait_for_any(
    targets: Sequence[tuple[Word, int]],
    timeout_ms: float,
    tick_ms: float,
    go_on: Callable[[], bool],
) -> bool:
    """Block until a word is its value or more; return True if one is.

    Returns False after the timeout, or once `go_on()`, asked at least every tick, is False.
    """
    for _ in itertools.chain(range(_NUM_POLLS), _yields()):
        if any(word.load() >= value for word, value in targets):
            return True
    deadline = time.monotonic() + timeout_ms / 1000
    while True:
        now = [word.load() for word, _ in targets]
        if any(value >= wanted for value, (_, wanted) in zip(now, targets, strict=True)):
            return True
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        asleep = [
            (word.address, value & _LOW_BITS) for (word, _), value in zip(targets, now, strict=True)
        ]
        _futex_wait_any(asleep, min(left_s, tick_ms / 1000))
        if not go_on():
            return any(word.load() >= value for word, value in targets)
