"""The places of each layer's KV: at its stage, and valid copies at others.

A set of frames is an integer with a bit for each. For a layer that returns to a former stage only
new pages travel.
"""

from __future__ import annotations

from collections.abc import Iterable

from control_plane.scheduler.pipeline.layer_policies import Split, has_room, stages_of
from nanocp.config.pipeline import PipelineConfig
from nanocp.values.passes import LayerMove


class LayerPlaces:
    """The layout, the places of layers, and the valid frames of copies."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        self.split: Split = pipeline.first_split
        self._num_places = pipeline.num_places
        self.places: list[dict[int, int]] = [{} for _ in self.split]
        """[stage][layer] -> the place of the layer, its own or a copy."""
        for layer, stage in enumerate(stages_of(self.split)):
            self.places[stage][layer] = len(self.places[stage])
        self.good: dict[tuple[int, int], int] = {}
        """(stage, layer) of a copy -> its frames that equal those of the layer's stage.

        Frames without a page do not matter.
        """

    def is_legal(self, split: Split) -> bool:
        """Return whether every stage has room for its old and new layers."""
        return has_room(self.split, split, self._num_places)

    def write(self, first_frame: int, num_frames: int) -> None:
        """Give the frames to other pages: copies become invalid."""
        kept = ~(((1 << num_frames) - 1) << first_frame)
        for key in self.good:
            self.good[key] &= kept

    def num_missing(self, split: Split, full: int) -> int:
        """Return the full frames to send before a change, summed over layers."""
        return sum(
            (full & ~self.good.get((target, layer), 0)).bit_count()
            for layer, _, target in self._moving(split)
        )

    def num_new(self, split: Split) -> int:
        """Return the layers that have no place at their next stage."""
        return sum(layer not in self.places[target] for layer, _, target in self._moving(split))

    def copy(self, split: Split, full: int) -> tuple[LayerMove, ...]:
        """Send full frames ahead of a change to this layout."""
        return tuple(
            self._send(layer, source, target, split, full)
            for layer, source, target in self._moving(split)
        )

    def change(self, split: Split, full: int, live: int) -> tuple[LayerMove, ...]:
        """Change to this layout, and send the missing frames.

        full: frames whose page will not be written again; live: all frames with KV.
        """
        moving = self._moving(split)
        moves = tuple(
            self._send(layer, source, target, split, live) for layer, source, target in moving
        )
        for layer, source, target in moving:
            self.good[source, layer] = full
            del self.good[target, layer]
        self.split = split
        return moves

    def _moving(self, split: Split) -> list[tuple[int, int, int]]:
        stages = zip(stages_of(self.split), stages_of(split), strict=True)
        return [(layer, a, b) for layer, (a, b) in enumerate(stages) if a != b]

    def _send(self, layer: int, source: int, target: int, split: Split, frames: int) -> LayerMove:
        place = self._take_place(layer, target, split)
        good = self.good[target, layer]
        self.good[target, layer] = good | frames
        return LayerMove(layer, source, target, place, tuple(runs_of(frames & ~good)))

    def _take_place(self, layer: int, stage: int, split: Split) -> int:
        """Take the layer's own place, a free one, or that of the worst copy."""
        places = self.places[stage]
        if layer not in places:
            free = set(range(self._num_places)) - set(places.values())
            if free:
                places[layer] = min(free)
            else:
                needed = {
                    other
                    for layout in (self.split, split)
                    for other, owner in enumerate(stages_of(layout))
                    if owner == stage
                }
                worst = min(
                    places.keys() - needed,
                    key=lambda other: (self.good[stage, other].bit_count(), other),
                )
                places[layer] = places.pop(worst)
                del self.good[stage, worst]
            self.good[stage, layer] = 0
        return places[layer]


def frames_in(runs: Iterable[tuple[int, int]]) -> int:
    """Return the set of the frames in (first frame, frames) runs."""
    frames = 0
    for first, count in runs:
        frames |= ((1 << count) - 1) << first
    return frames


def runs_of(frames: int) -> list[tuple[int, int]]:
    """Return the (first frame, frames) runs of a set, ascending."""
    runs = []
    first = 0
    while frames:
        num_absent = (frames & -frames).bit_length() - 1
        first, frames = first + num_absent, frames >> num_absent
        count = (~frames & (frames + 1)).bit_length() - 1
        runs.append((first, count))
        first, frames = first + count, frames >> count
    return runs
