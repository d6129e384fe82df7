"""The processors of an instance: the thread that calls native kernels, and threads beside it."""

from __future__ import annotations

import ctypes
import weakref


class Processors:
    """Native threads that run tasks with the calling thread; they end with the object."""

    def __init__(self, library: ctypes.CDLL, count: int) -> None:
        """count: includes the calling thread."""
        start, end = library.nanocp_start_processors, library.nanocp_end_processors
        start.argtypes, start.restype = (ctypes.c_long,), ctypes.c_void_p
        end.argtypes, end.restype = (ctypes.c_void_p,), None
        self.count = count
        self.address: int = start(count)
        """Address of struct Processors (processors.h)."""
        weakref.finalize(self, end, self.address)
