"""Threads of one process on one processor, where all of them together are quickest.

Between two processors they hand Python's lock to each other at each call into torch, which takes
twice the processor time. Does not know: what the threads do.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_LIBC = ctypes.CDLL(None)


@contextmanager
def one_processor() -> Iterator[None]:
    """Keep this thread, and those that it starts meanwhile, on the processor where it runs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {_LIBC.sched_getcpu()})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
