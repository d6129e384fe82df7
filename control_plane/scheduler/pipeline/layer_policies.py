"""Policies that choose the layers of each stage, by name.

`delta` follows DynaPipe's paper (3.2). Layers that cannot be shared out evenly go to the stages
nearest to the last, so the fewest layers move.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from statistics import fmean
from typing import Protocol

from control_plane.scheduler.pipeline.predictor import PassTimes, StageSpeeds, stage_times
from nanocp.config.choices import none_of
from nanocp.config.pipeline import PipelineConfig
from nanocp.values.passes import even_split

Split = tuple[int, ...]
"""The layers of each stage."""

_LESS = 4e-9
"""A bound is lower only by more than this part of it; less is rounding."""

LAYER_POLICY_NAMES = ("even", "static:N,N", "delta", "level")


class LayerPolicy(Protocol):
    """Chooses the layout for a pass."""

    def wish(self, split: Split, times: PassTimes, number: int, num_frames: int) -> Split:
        """Return the layout to change to after each planned pass; the present one: no change.

        number: the pass. num_frames: frames with KV that would move with each layer.
        """


def longest_us(
    split: Sequence[int], times: PassTimes, slowness: Sequence[float] | None = None
) -> float:
    """Return the time of the slowest stage, in us; see stage_times."""
    return max(stage_times(split, times, slowness))


def stages_of(split: Sequence[int]) -> list[int]:
    """Return the stage of each layer."""
    return [stage for stage, count in enumerate(split) for _ in range(count)]


def num_moved(old: Sequence[int], new: Sequence[int]) -> int:
    """Return the number of layers whose stage changes."""
    return sum(a != b for a, b in zip(stages_of(old), stages_of(new), strict=True))


def has_room(old: Sequence[int], new: Sequence[int], num_places: int) -> bool:
    """Return whether each stage has room for its old and new layers at once."""
    first = new_first = 0
    for count, new_count in zip(old, new, strict=True):
        if num_needed(first, count, new_first, new_count) > num_places:
            return False
        first, new_first = first + count, new_first + new_count
    return True


def num_needed(first: int, count: int, new_first: int, new_count: int) -> int:
    """Return the number of a stage's old and new layers, each counted once."""
    common = min(first + count, new_first + new_count) - max(first, new_first)
    return count + new_count - max(common, 0)


class FixedLayout(LayerPolicy):
    """Policies `even` and `static`: one layout for ever."""

    def __init__(self, split: Split) -> None:
        self._split = split

    def wish(self, split: Split, times: PassTimes, number: int, num_frames: int) -> Split:
        return self._split


class DeltaLayout(LayerPolicy):
    """Policy `delta`: k layers leave the last stage, with the k of least misalignment."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        self._even = even_split(pipeline.num_layers, pipeline.num_stages)
        self._num_places = pipeline.num_places

    def wish(self, split: Split, times: PassTimes, number: int, num_frames: int) -> Split:
        candidates = (
            each for each in self._candidates() if has_room(split, each, self._num_places)
        )
        return min(candidates, key=lambda candidate: self._delta(candidate, times), default=split)

    def _candidates(self) -> Iterator[Split]:
        return map(self._without, range(self._even[-1] if len(self._even) > 1 else 1))

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


class LastingWish(LayerPolicy):
    """Passes a wish on once it is the same for a window of passes."""

    def __init__(self, policy: LayerPolicy, window: int) -> None:
        self._policy, self._window = policy, window
        self._wish: tuple[Split, Split] | None = None
        """(present layout, wanted one)."""
        self._num_wished = 0
        """Passes in a row that wanted it."""

    def wish(self, split: Split, times: PassTimes, number: int, num_frames: int) -> Split:
        wish = self._policy.wish(split, times, number, num_frames)
        if (split, wish) != self._wish:
            self._wish, self._num_wished = (split, wish), 0
        self._num_wished += 1
        return wish if self._num_wished >= self._window else split


class LevelLayout(LayerPolicy):
    """Policy `level`: layers move once the savings of another layout would pay for the move.

    Savings and losses of a layout that was once the best are summed over passes; below 0 it is
    forgotten. So layouts that take turns do not change if each stay saves less than a move costs.
    """

    def __init__(self, pipeline: PipelineConfig, speeds: StageSpeeds | None = None) -> None:
        """speeds: a slow stage gets fewer layers. None: all are equal."""
        self._speeds = speeds or StageSpeeds(pipeline.num_stages)
        self._num_places = pipeline.num_places
        self._frame_move_us = pipeline.frame_move_us
        self._window = pipeline.layout_window
        self._split: Split | None = None
        self._num_passes = 0
        """Passes since the layout changed."""
        self._saved_us: dict[Split, float] = {}
        """Savings of each layout since it was noted."""
        self._latest: deque[PassTimes] = deque(maxlen=pipeline.num_stages)
        """Passes that may be in flight together: a stage that idles in one is busy in another."""
        self._guess: Split | None = None
        """Best layout of the pass before, mostly still the best."""

    def wish(self, split: Split, times: PassTimes, number: int, num_frames: int) -> Split:
        """Return the level layout, but keep one for a window of passes."""
        if split != self._split:
            self._split, self._num_passes = split, 0
            self._saved_us.clear()
        self._num_passes += 1
        self._latest.append(times)
        layer_us, sample_us, dense_us = (
            fmean(each[field] for each in self._latest) for field in range(3)
        )
        mean = times._replace(layer_us=layer_us, sample_us=sample_us, dense_us=dense_us)
        self._saved_us.setdefault(self._best(split, mean), 0.0)
        slowness = self._speeds.slowness
        present_us = longest_us(split, mean, slowness)
        summed = {
            layout: saved_us + present_us - longest_us(layout, mean, slowness)
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
        """Return a layout with the fastest slowest stage and, of these, the fewest moved layers.

        Without room to go there at once, the nearest to it.
        """
        num_layers, num_dense = sum(split), times.dense_layers
        # How slow each stage is, and what it does besides its layers.
        kinds = [(slow, times.stage_us) for slow in self._speeds.slowness]
        kinds[-1] = kinds[-1][0], times.stage_us + times.sample_us
        layer_us, more_us = times.layer_us, times.dense_us - times.layer_us

        def bounds() -> list[float]:
            return sorted(
                {
                    slow * (count * layer_us + dense * more_us + extra_us)
                    for slow, extra_us in set(kinds)
                    for dense in range(num_dense + 1)
                    for count in range(dense or 1, self._num_places + 1)
                }
            )

        def least(wanted: Split, num_places: int, guess: Split) -> Split:
            """Return the nearest to `wanted` of the layouts whose slowest stage is fastest.

            guess: a layout within these places; if no bound below its slowest stage holds, it is
            the best.
            """

            def holds(bound: float) -> bool:
                end = 0
                for stage, (slow, extra_us) in enumerate(kinds, 1):
                    most = self._most(bound / slow - extra_us, times, end)
                    if most < 1:
                        return False
                    end += min(most, num_layers - end - len(kinds) + stage)
                return end == num_layers

            def within(bound: float) -> Split | None:
                most = tuple(
                    tuple(
                        self._most(bound / slow - extra_us, times, first)
                        for first in range(num_dense + 1)
                    )
                    for slow, extra_us in kinds
                )
                return _nearest(wanted, most, split, num_places)

            def can_be(bound: float) -> bool:
                # With room for all layers, a bound that holds them is enough. Not so with several
                # dense layers: a slow stage may have to begin earlier, on one of these.
                if num_places == num_layers and num_dense < 2:
                    return holds(bound)
                return within(bound) is not None

            bound = longest_us(guess, times, self._speeds.slowness)
            if can_be(bound * (1 - _LESS)):
                lower = bounds()
                bound = lower[bisect_left(lower, True, key=can_be)]
            return within(bound) or split

        self._guess = best = least(split, num_layers, self._guess or split)
        if has_room(split, best, self._num_places):
            return best
        return least(best, self._num_places, split)

    def _most(self, us: float, times: PassTimes, first: int) -> int:
        num_dense = times.dense_layers - first
        if num_dense <= 0:
            fits = self._fits(us, times.layer_us)
        elif (fits := self._fits(us, times.dense_us)) >= num_dense:
            fits = num_dense + self._fits(us - num_dense * times.dense_us, times.layer_us)
        return min(fits, self._num_places)

    def _fits(self, us: float, layer_us: float) -> int:
        # A bound is a sum of products; rounding must not cost the layer that made it.
        return int((us + 1e-9 * abs(us)) / layer_us) if layer_us else self._num_places


@lru_cache(maxsize=1024)
def _nearest(wanted: Split, most: tuple[Split, ...], split: Split, num_places: int) -> Split | None:
    """Return the layout with the fewest layers elsewhere than wanted; exact; None if none fits.

    most: for each stage, its most layers by its first one; the last number holds for later ones.
    split: the present layout; stages have room for `num_places` layers during the change.
    """
    stage_of = stages_of(wanted)
    num_layers = len(stage_of)
    # (layers elsewhere, layout) of the stages so far, by the layers that they have.
    reached: dict[int, tuple[int, Split]] = {0: (0, ())}
    for stage, limits in enumerate(most):
        following: dict[int, tuple[int, Split]] = {}
        old_first = sum(split[:stage])
        for first, (elsewhere, counts) in reached.items():
            limit = limits[min(first, len(limits) - 1)]
            for count in range(1, min(limit, num_layers - first) + 1):
                elsewhere += stage_of[first + count - 1] != stage
                if num_needed(old_first, split[stage], first, count) > num_places:
                    continue
                candidate = elsewhere, (*counts, count)
                end = first + count
                if end not in following or candidate < following[end]:
                    following[end] = candidate
        reached = following
    return reached[num_layers][1] if num_layers in reached else None


class ChaosLayers(LayerPolicy):
    """Policy `chaos_layers`: any legal layout in one of four passes, to find bugs."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        self._seed = pipeline.chaos_seed
        self._num_places = pipeline.num_places

    def wish(self, split: Split, times: PassTimes, number: int, num_frames: int) -> Split:
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
        packed = struct.pack("<QQQ", self._seed, number, counter)
        return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little") % bound


def make_layer_policy(pipeline: PipelineConfig, speeds: StageSpeeds | None = None) -> LayerPolicy:
    """Make the policy that pipeline.layer_policy names.

    speeds: learned of the stages, if any. Raises ValueError naming the nearest policy.
    """
    match pipeline.layer_policy.partition(":")[0]:
        case "even" | "static":
            return FixedLayout(pipeline.first_split)
        case "delta":
            return LastingWish(DeltaLayout(pipeline), pipeline.layout_window)
        case "level":
            return LevelLayout(pipeline, speeds)
        case "chaos_layers":
            return ChaosLayers(pipeline)  # Its wish is another in each pass: none lasts.
    named = pipeline.layer_policy
    raise ValueError(f"layer_policy is {named!r}; {none_of(named, LAYER_POLICY_NAMES)}")
