"""Frames of one instance: free runs, and how many frames are committed and quarantined.

Enters: how many frames are wanted. Leaves: runs of frames, as few as there are (attention over a run is faster than
over scattered frames, and a run is one entry of a table). Does not know: who owns a frame.
"""

from __future__ import annotations

from bisect import bisect_left, insort

_MAX_SCANNED_RUNS = 8

Run = tuple[int, int]
"""(first frame, frames)."""


class FramePool:
    """The frames 0 .. num_frames - 1. A frame is committed, quarantined or free; the counts sum to num_frames.

    Free runs are indexed by both ends, to join neighbours, and by size class (the bit length of their length), so that
    no operation walks the pool.
    """

    __slots__ = (
        "_classes",
        "_len_at",
        "_start_before",
        "num_committed",
        "num_frames",
        "num_free",
        "num_quarantined",
    )

    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames
        self.num_free = num_frames
        self.num_committed = 0
        self.num_quarantined = 0
        self._len_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}  # frame behind a run -> the run's start
        self._classes: list[list[int]] = [[] for _ in range(num_frames.bit_length() + 1)]
        self._add_run(0, num_frames)

    def take(self, count: int, after: int | None = None) -> list[Run]:
        """Commit free frames; the first is `after` + 1 if that one is free."""
        assert 0 < count <= self.num_free, f"{count} frames wanted, {self.num_free} free"
        runs: list[Run] = []
        self.num_free -= count
        self.num_committed += count
        start = None if after is None or after + 1 not in self._len_at else after + 1
        while count:
            if start is None:
                start = self._find_run(count)
            length = self._remove_run(start)
            taken = min(count, length)
            runs.append((start, taken))
            if taken < length:
                self._add_run(start + taken, length - taken)
            count -= taken
            start = None
        return runs

    def quarantine(self, count: int) -> None:
        """Committed frames are held until nobody can write into them."""
        self.num_committed -= count
        self.num_quarantined += count

    def free(self, runs: list[Run]) -> None:
        """Quarantined frames become free."""
        for start, length in runs:
            self.num_quarantined -= length
            self.num_free += length
            self._join_run(start, length)

    def free_frames(self) -> list[int]:
        """Every free frame, ascending. Walks the pool: for invariants and tests."""
        return [frame for start in sorted(self._len_at) for frame in range(start, start + self._len_at[start])]

    def _find_run(self, count: int) -> int:
        own_class = count.bit_length()
        for start in self._classes[own_class][:_MAX_SCANNED_RUNS]:
            if self._len_at[start] >= count:
                return start
        for runs in self._classes[own_class + 1 :]:
            if runs:
                return runs[0]
        return next(runs[0] for runs in reversed(self._classes) if runs)

    def _join_run(self, start: int, length: int) -> None:
        if start in self._start_before:
            before = self._start_before[start]
            length += self._remove_run(before)
            start = before
        if start + length in self._len_at:
            length += self._remove_run(start + length)
        self._add_run(start, length)

    def _add_run(self, start: int, length: int) -> None:
        self._len_at[start] = length
        self._start_before[start + length] = start
        insort(self._classes[length.bit_length()], start)

    def _remove_run(self, start: int) -> int:
        length = self._len_at.pop(start)
        del self._start_before[start + length]
        runs = self._classes[length.bit_length()]
        del runs[bisect_left(runs, start)]
        return length
