"""The frames of one instance.

It gives as few runs as possible, since they make attention faster.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from control_plane.scheduler.state.carry_frames import CarryFrames
from nanocp.config.cluster import ClusterConfig

_MAX_SCANNED_RUNS = 8


class FrameRun(NamedTuple):
    """Consecutive frames of one instance."""

    frame: int
    """The first of them."""
    num_pages: int
    """Frames, one for each page."""


# A window makes some hundreds of these; this way they cost half.
frame_run: Callable[[tuple[int, int]], FrameRun] = partial(tuple.__new__, FrameRun)


def cut_runs(runs: list[FrameRun], count: int) -> list[FrameRun]:
    """Remove `count` frames from the front of the runs, and return them."""
    taken: list[FrameRun] = []
    while count:
        run = runs.pop(0)
        if run.num_pages > count:
            runs.insert(0, FrameRun(run.frame + count, run.num_pages - count))
        taken.append(FrameRun(run.frame, min(run.num_pages, count)))
        count -= taken[-1].num_pages
    return taken


@dataclass(slots=True)
class _CachedPage:
    page_hash: bytes
    num_owners: int = 1
    """Requests that own the frame. It is committed while there is one."""
    num_holds: int = 0
    """Times that the frame is in quarantine: once for each owner that left.

    Without owners the frame is quarantined; without both it is free.
    """


class FrameLedger:
    """The frames 0 to num_frames - 1; each is committed, quarantined or free.

    Free runs are indexed by both ends and by the bit length of their length, so no operation walks
    all frames. A frame with a cached page may have several owners. A free one keeps its page; the
    one that was freed first is given up first.
    """

    __slots__ = (
        "_cached",
        "_classes",
        "_frame_of",
        "_kept",
        "_len_at",
        "_start_before",
        "carries",
        "dropped",
        "num_committed",
        "num_frames",
        "num_free",
        "num_quarantined",
        "num_withheld",
    )

    def __init__(self, cluster: ClusterConfig) -> None:
        self.num_frames = num_frames = cluster.num_frames
        self.carries = CarryFrames(cluster)
        """Frames of recurrent states; they are freed and quarantined with these."""
        self.num_free = num_frames
        self.num_committed = 0
        self.num_quarantined = 0
        self.num_withheld: int | None = None
        """Frames that are free but withheld while the ledger is closed; None if it is open."""
        self.dropped: list[bytes] | None = None
        """Hashes of cached pages that were given up, for who follows them; None: not recorded."""
        self._len_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}  # frame after a run -> the run's start
        self._classes: list[list[int]] = [[] for _ in range(num_frames.bit_length() + 1)]
        self._cached: dict[int, _CachedPage] = {}  # by frame
        self._frame_of: dict[bytes, int] = {}  # hash of a cached page -> its frame
        # Free frames with a cached page, the first to go first. A dict would look at the places of
        # all that went before it to find its first.
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._add_run(0, num_frames)

    def close(self) -> None:
        """Count no frame as free until `reopen`."""
        if self.num_withheld is None:
            self.num_withheld, self.num_free = self.num_free, 0

    def reopen(self) -> None:
        """Count free frames as free again."""
        if self.num_withheld is not None:
            self.num_free, self.num_withheld = self.num_withheld, None

    def take(self, count: int, after: int | None = None) -> list[FrameRun]:
        """Commit `count` free frames, from `after` + 1 on if it is free."""
        assert 0 < count <= self.num_free, f"{count} frames wanted, {self.num_free} free"
        runs: list[FrameRun] = []
        while self.num_free - len(self._kept) < count:
            self._drop_page()
        self.num_free -= count
        self.num_committed += count
        start = None if after is None or after + 1 not in self._len_at else after + 1
        while count:
            if start is None:
                start = self._find_run(count)
            length = self._remove_run(start)
            taken = min(count, length)
            runs.append(frame_run((start, taken)))
            if taken < length:
                self._add_run(start + taken, length - taken)
            count -= taken
            start = None
        return runs

    def reserve(self, frame: int) -> None:
        """Quarantine a free frame without a cached page."""
        start = max(each for each in self._len_at if each <= frame)
        end = start + self._remove_run(start)
        assert frame < end, f"frame {frame} is not free"
        if start < frame:
            self._add_run(start, frame - start)
        if frame + 1 < end:
            self._add_run(frame + 1, end - frame - 1)
        self._count_taken()
        self.num_quarantined += 1

    def take_reserved(self) -> None:
        """Commit a reserved frame."""
        self.num_quarantined -= 1
        self.num_committed += 1

    def quarantine(self, runs: list[FrameRun]) -> None:
        """Keep frames whose owner left until nothing can write to them."""
        count = 0
        for frame, num_pages in runs:
            if frame >= self.num_frames:
                self.carries.quarantine()
            else:
                count += num_pages
        if self._cached:
            for page in self._pages_in(runs):
                page.num_owners -= 1
                page.num_holds += 1
                count -= page.num_owners > 0  # its other owners still have it
        self.num_committed -= count
        self.num_quarantined += count

    def free(self, runs: list[FrameRun]) -> None:
        """End one quarantine of these frames. Those without another owner become free."""
        if is_closed := self.num_withheld is not None:
            self.reopen()
        # Of frames that are freed at once, those of a prompt's first pages are kept longest.
        for start, length in reversed(runs):
            end = start + length
            if start >= self.num_frames:
                self.carries.free(start)
                continue
            for frame in range(end - 1, start - 1, -1) if self._cached else ():
                if page := self._cached.get(frame):
                    self._free_run(frame + 1, end)
                    self._let_go(frame, page)
                    end = frame
            self._free_run(start, end)
        if is_closed:
            self.close()

    # --- pages that others may read too

    def cache(self, frame: int, page_hash: bytes, is_quarantined: bool = False) -> bool:
        """Let others share a committed or quarantined frame; it is not written again.

        Returns False if another frame already has the page.
        """
        if page_hash in self._frame_of:
            return False
        self._frame_of[page_hash] = frame
        self._cached[frame] = _CachedPage(page_hash, int(not is_quarantined), int(is_quarantined))
        return True

    def find(self, page_hash: bytes) -> int | None:
        """Return the frame with this page, if any."""
        return self._frame_of.get(page_hash)

    def is_free(self, frame: int) -> bool:
        """Return whether a frame from `find` is free: sharing uses it up."""
        return frame in self._kept

    def share(self, frame: int) -> None:
        """Add an owner to a frame from `find`."""
        page = self._cached[frame]
        if page.num_owners == 0:
            if frame in self._kept:
                del self._kept[frame]
                self._count_taken()
            else:
                self.num_quarantined -= 1
            self.num_committed += 1
        page.num_owners += 1

    def cached_pages(self) -> Iterator[tuple[int, bytes, int, int]]:
        """List (frame, hash, owners, times in quarantine) of every cached page."""
        for frame, page in self._cached.items():
            assert self._frame_of[page.page_hash] == frame, (
                f"frame {frame} is not found by its page"
            )
            yield frame, page.page_hash, page.num_owners, page.num_holds

    def free_frames(self) -> list[int]:
        """Return every free frame, ascending, with those of states."""
        in_runs = [
            frame for start in self._len_at for frame in range(start, start + self._len_at[start])
        ]
        return sorted([*in_runs, *self._kept, *self.carries.free_frames()])

    def _count_taken(self) -> None:
        if self.num_withheld is None:
            self.num_free -= 1
        else:
            self.num_withheld -= 1

    def _free_run(self, start: int, end: int) -> None:
        if start < end:
            self.num_quarantined -= end - start
            self.num_free += end - start
            self._join_run(start, end - start)

    def _let_go(self, frame: int, page: _CachedPage) -> None:
        page.num_holds -= 1
        if page.num_owners == page.num_holds == 0:
            self.num_quarantined -= 1
            self.num_free += 1
            self._kept[frame] = None

    def _drop_page(self) -> None:
        frame, _ = self._kept.popitem(last=False)
        page_hash = self._cached.pop(frame).page_hash
        del self._frame_of[page_hash]
        if self.dropped is not None:
            self.dropped.append(page_hash)
        self._join_run(frame, 1)

    def _pages_in(self, runs: list[FrameRun]) -> Iterator[_CachedPage]:
        for start, length in runs:
            for frame in range(start, start + length):
                if page := self._cached.get(frame):
                    yield page

    def _find_run(self, count: int) -> int:
        own_class = count.bit_length()
        for start in self._classes[own_class][:_MAX_SCANNED_RUNS]:
            if self._len_at[start] >= count:
                return start
        longer = next(filter(None, self._classes[own_class + 1 :]), None)
        return (longer or next(filter(None, reversed(self._classes))))[0]

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
