"""Which layers each stage should have: policies by name.

Enters: the layout that is, and what is predicted of a pass. Leaves: the layout that is wanted.
Does not know: how layers move, where their KV is.

`delta` is the rule of DynaPipe's paper (3.2) to the letter. It leaves open which stages get layers
that cannot be shared out evenly; here those nearest to the last one do, because then the fewest
layers move.
"""

from __future__ import annotations

import difflib
import struct
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from statistics import fmean
from typing import Protocol

from control_plane.scheduler.pipeline.predictor import PassTimes
from nanocp.passes import PipelineConfig, even_split

Split = tuple[int, ...]
"""The layers of each stage."""

LAYER_POLICY_NAMES = ("even", "static:N,N", "delta", "level", "chaos_layers")


class LayerPolicy(Protocol):
    """Which layout a pass asks for."""

    def wish(self, split: Split, times: PassTimes, number: int, num_frames: int) -> Split:
        """The layout to change to, after a pass that was planned; the present one: no change.

        split: the layout that is. number: the pass. num_frames: frames with KV that would move with
        each layer. It is asked once for each pass.
        """


def longest_us(split: Sequence[int], times: PassTimes) -> float:
    """Time of the stage that takes longest, in us."""
    *upstream, last = split
    return max(last * times.layer_us + times.sample_us, max(upstream, default=0) * times.layer_us)


def stages_of(split: Sequence[int]) -> list[int]:
    """The stage of each layer."""
    return [stage for stage, count in enumerate(split) for _ in range(count)]


def num_moved(old: Sequence[int], new: Sequence[int]) -> int:
    """Layers whose stage changes."""
    return sum(a != b for a, b in zip(stages_of(old), stages_of(new), strict=True))


class FixedLayout:
    """Policies `even` and `static`: one layout for ever."""

    def __init__(self, split: Split) -> None:
        self._split = split

    def wish(self, split: Split, times: PassTimes, number: int, num_frames: int) -> Split:
        """See LayerPolicy."""
        return self._split


class DeltaLayout:
    """Policy `delta`: k layers leave the last stage, and the k of least misalignment is wanted."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        self._even = even_split(pipeline.num_layers, pipeline.num_stages)
        self._num_places = pipeline.num_places

    def wish(self, split: Split, times: PassTimes, number: int, num_frames: int) -> Split:
        """See LayerPolicy."""
        return min(self._candidates(), key=lambda candidate: self._delta(candidate, times))

    def _candidates(self) -> Iterator[Split]:
        """Layouts with k = 0, 1, ... layers less in the last stage."""
        for k in range(self._even[-1] if len(self._even) > 1 else 1):
            candidate = self._without(k)
            if max(candidate) <= self._num_places:
                yield candidate

    def _without(self, k: int) -> Split:
        """Take k layers from the last stage and spread them over min(k, S - 1) before it."""
        counts = list(self._even)
        counts[-1] -= k
        num_stages = min(k, len(counts) - 1)
        for rank in range(num_stages):
            counts[-2 - rank] += k // num_stages + (rank < k % num_stages)
        return tuple(counts)

    def _delta(self, candidate: Split, times: PassTimes) -> float:
        k = self._even[-1] - candidate[-1]
        m = min(k, len(candidate) - 1)
        return abs(times.sample_us - k * times.layer_us - (k / m if k else 0) * times.layer_us)


class LastingWish:
    """A policy that is heard once it has wanted the same layout for a window of passes in a row."""

    def __init__(self, policy: LayerPolicy, window: int) -> None:
        self._policy, self._window = policy, window
        self._wish: tuple[Split, Split] | None = None
        """The layout that is, and the one that is wanted."""
        self._num_wished = 0
        """Passes in a row that wanted it."""

    def wish(self, split: Split, times: PassTimes, number: int, num_frames: int) -> Split:
        """See LayerPolicy."""
        wish = self._policy.wish(split, times, number, num_frames)
        if (split, wish) != self._wish:
            self._wish, self._num_wished = (split, wish), 0
        self._num_wished += 1
        return wish if self._num_wished >= self._window else split


class LevelLayout:
    """Policy `level`: layers move once what another layout would have saved pays for the move.

    A layout that is best for a pass is noted, and from then on what it would have saved or lost in
    each pass is summed; at a sum below 0 it is forgotten. So a pass counts by its time: few long
    passes change what many short ones wanted, and layouts that take turns do not change at all if
    each stay saves less than a move costs.
    """

    def __init__(self, pipeline: PipelineConfig) -> None:
        self._num_places = pipeline.num_places
        self._frame_move_us = pipeline.frame_move_us
        self._window = pipeline.layout_window
        self._split: Split | None = None
        self._num_passes = 0
        """Passes since the layout was another one."""
        self._saved_us: dict[Split, float] = {}
        """Layout -> what it would have saved since it was noted."""
        self._latest: deque[PassTimes] = deque(maxlen=pipeline.num_stages)
        """Passes that may be in flight together: a stage that is idle in one is busy in another."""

    def wish(self, split: Split, times: PassTimes, number: int, num_frames: int) -> Split:
        """See LayerPolicy. The present layout is wanted for a window of passes at least."""
        if split != self._split:
            self._split, self._num_passes = split, 0
            self._saved_us.clear()
        self._num_passes += 1
        self._latest.append(times)
        mean = PassTimes(*(fmean(us) for us in zip(*self._latest, strict=True)))
        self._saved_us.setdefault(self._best(split, mean), 0.0)
        present_us = longest_us(split, mean)
        summed = {
            layout: saved_us + present_us - longest_us(layout, mean)
            for layout, saved_us in self._saved_us.items()
        }
        self._saved_us = {layout: us for layout, us in summed.items() if us > 0}
        if self._num_passes < self._window or not self._saved_us:
            return split

        def gain_us(layout: Split) -> float:
            move_us = num_moved(split, layout) * num_frames * self._frame_move_us
            return self._saved_us[layout] - move_us

        best = max(self._saved_us, key=gain_us)
        return best if gain_us(best) > 0 else split

    def _best(self, split: Split, times: PassTimes) -> Split:
        """A layout with the least longest stage; of these, one with the fewest moved layers."""
        num_layers, last = sum(split), len(split) - 1
        extras = [0.0] * last + [times.sample_us]
        bounds = sorted(
            {
                count * times.layer_us + extra
                for extra in set(extras)
                for count in range(1, self._num_places + 1)
            }
        )

        def most(bound: float) -> Split:
            return tuple(self._most(bound - extra, times.layer_us) for extra in extras)

        def is_enough(bound: float) -> bool:
            return min(most(bound)) >= 1 and sum(most(bound)) >= num_layers

        least = bisect_left(bounds, True, key=is_enough)
        return _nearest(split, most(bounds[least])) if least < len(bounds) else split

    def _most(self, us: float, layer_us: float) -> int:
        """The layers that a stage can run in this time."""
        # A bound is a sum of products; rounding must not cost the layer that made it.
        fits = int((us + 1e-9 * abs(us)) / layer_us) if layer_us else self._num_places
        return min(fits, self._num_places)


@lru_cache(maxsize=256)
def _nearest(split: Split, most: Split) -> Split:
    """The layout within these limits that moves the fewest layers from their stage; exact."""
    old = stages_of(split)
    num_layers = len(old)
    # (layers that moved, layout) of the stages so far, by the layers that they have.
    reached: dict[int, tuple[int, Split]] = {0: (0, ())}
    for stage, limit in enumerate(most):
        following: dict[int, tuple[int, Split]] = {}
        for first, (moved, counts) in reached.items():
            for count in range(1, min(limit, num_layers - first) + 1):
                moved += old[first + count - 1] != stage
                candidate = moved, (*counts, count)
                end = first + count
                if end not in following or candidate < following[end]:
                    following[end] = candidate
        reached = following
    return reached[num_layers][1]


class ChaosLayers:
    """Policy `chaos_layers`: any legal layout in one of four passes, to find bugs."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        self._seed = pipeline.chaos_seed
        self._num_places = pipeline.num_places

    def wish(self, split: Split, times: PassTimes, number: int, num_frames: int) -> Split:
        """See LayerPolicy."""
        if self._draw(number, 0, 4):
            return split
        num_left, counts = sum(split), []
        for stage in range(len(split)):
            num_stages = len(split) - stage - 1
            fewest = max(1, num_left - num_stages * self._num_places)
            most = min(self._num_places, num_left - num_stages)
            counts.append(fewest + self._draw(number, 1 + stage, most - fewest + 1))
            num_left -= counts[-1]
        return tuple(counts)

    def _draw(self, number: int, counter: int, bound: int) -> int:
        """A number from 0 to bound - 1."""
        packed = struct.pack("<QQQ", self._seed, number, counter)
        return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little") % bound


def make_layer_policy(pipeline: PipelineConfig) -> LayerPolicy:
    """The policy that pipeline.layer_policy names. Raises ValueError naming the nearest one."""
    match pipeline.layer_policy.partition(":")[0]:
        case "even" | "static":
            return FixedLayout(pipeline.first_split)
        case "delta":
            return LastingWish(DeltaLayout(pipeline), pipeline.layout_window)
        case "level":
            return LevelLayout(pipeline)
        case "chaos_layers":
            return LastingWish(ChaosLayers(pipeline), pipeline.layout_window)
    nearest = difflib.get_close_matches(pipeline.layer_policy, LAYER_POLICY_NAMES, 1, 0.0)[0]
    raise ValueError(
        f"layer_policy is {pipeline.layer_policy!r}; it must be one of "
        f"{', '.join(LAYER_POLICY_NAMES)} (nearest: {nearest})"
    )
