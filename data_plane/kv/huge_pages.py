"""Memory of huge pages: reading much of it takes a sixth less time than of small ones.

Enters: a number of bytes. Leaves: an array of zeros. Does not know: what is kept in it.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np


def huge_pages(num_bytes: int) -> np.ndarray:
    """[num_bytes] uint8, all zero, of the processor's huge pages where the system has them.

    Raises OSError if the system refuses so much memory.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # A system without them.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
