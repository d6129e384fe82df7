"""Changes of the layout: full pages travel ahead, then the mark changes it.

The next one begins when every stage has reported this one.
"""

from __future__ import annotations

from collections.abc import Callable

from control_plane.scheduler.pipeline.layer_places import LayerPlaces
from control_plane.scheduler.pipeline.layer_policies import (
    LayerPolicy,
    Split,
    longest_us,
    make_layer_policy,
)
from control_plane.scheduler.pipeline.predictor import PassTimes, StageSpeeds, stage_times
from nanocp.config.pipeline import PipelineConfig
from nanocp.values.passes import LayerMoves

_MAX_ROUNDS = 4
"""Most rounds of full pages ahead of one change: each is shorter than the one before."""


class LayoutChanges:
    """The layout of a pipeline, and the change under way."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        """Raises ValueError for an unknown policy."""
        self._pipeline = pipeline
        self.speeds = StageSpeeds(pipeline.num_stages)
        self._policy: LayerPolicy = make_layer_policy(pipeline, self.speeds)
        self.asked: Split | None = None
        """Layout that an operator asked for last; the policy is ignored since then."""
        self.num_changes = 0
        self.begin_term()

    def begin_term(self) -> None:
        """Give every stage the layers of the start.

        An operator's layout is forgotten if it is out of reach from there.
        """
        self.places = LayerPlaces(self._pipeline)
        self.speeds.begin_term()
        self.layout = 0
        """Number of the LayerMoves that made the present layout; 0: that of the start."""
        self._newest = 0
        self._num_unreported = 0
        """Stages that have not reported the newest LayerMoves."""
        self._target: Split | None = None
        """The layout to change to, while a change is under way."""
        self._saving_us = 0.0
        """Savings of that layout in the newest pass."""
        self._num_rounds = 0
        if self.asked is not None and not self.places.is_legal(self.asked):
            self.asked = None

    @property
    def is_moving(self) -> bool:
        """Return whether a change is under way, or not yet reported by all stages."""
        return self._target is not None or self._num_unreported > 0

    def obstacle(self, split: Split) -> str:
        """Explain why an operator cannot have this layout now; empty if possible."""
        pipeline = self._pipeline
        if len(split) != pipeline.num_stages or sum(split) != pipeline.num_layers or min(split) < 1:
            return (
                f"layout is {','.join(map(str, split))}; it must be {pipeline.num_stages} numbers "
                f"of layers, each at least 1, which sum to {pipeline.num_layers}"
            )
        if self.is_moving:
            return "layers are moving already; ask again later"
        if not self.places.is_legal(split):
            return (
                f"a stage has room for {pipeline.num_places} layers (max_layers), and would have "
                "more while it gives some away and gets others; ask for a layout in between"
            )
        return ""

    def ask(self, split: Split) -> None:
        """Set the layout that an operator wants, unless it is out of reach."""
        if self.places.is_legal(split):
            self.asked = split

    def consider(self, times: PassTimes, number: int, num_frames: int) -> None:
        """Consider a change after a planned pass. num_frames: frames with KV."""
        split = self.places.split
        predicted_us = stage_times(split, times)
        if not times.sample_us:  # then the last layer ends with its KV
            predicted_us[-1] -= times.layer_us
        self.speeds.planned(number, predicted_us)
        if self.asked is None:
            wish = self._policy.wish(split, times, number, num_frames)
            if not self.is_moving and wish != split and self.places.is_legal(wish):
                self._target, self._num_rounds = wish, 0
        if self._target is not None:
            slowness = self.speeds.slowness
            present_us = longest_us(split, times, slowness)
            self._saving_us = present_us - longest_us(self._target, times, slowness)

    def reported(self, number: int) -> None:
        """Record that a stage has done its part of the newest LayerMoves."""
        assert number == self._newest and self._num_unreported, f"nobody waits for moves {number}"
        self._num_unreported -= 1

    def next_moves(
        self, num_rows: int, full_and_live: Callable[[], tuple[int, int]]
    ) -> LayerMoves | None:
        """Return the moves before the next pass, if any.

        num_rows: placed requests. full_and_live: frames whose page will not be written again, and
        all frames with KV, after the passes that were sent.
        """
        if self._num_unreported:
            return None
        if self.asked not in (None, self.places.split) and self._target is None:
            self._target, self._num_rounds = self.asked, 0
        if self._target is None:
            return None
        target, places = self._target, self.places
        full, live = full_and_live()
        self._newest += 1
        self._num_unreported = self._pipeline.num_stages
        # Each row has an open page that only the mark can send. So few full ones may go with it,
        # and as many as take less time than a pass loses meanwhile in the present layout. But
        # weights that are not at their new stage are read before the mark.
        is_far = self._num_rounds == 0 and places.num_new(target) > 0
        num_missing = places.num_missing(target, full)
        is_much = num_missing * self._pipeline.frame_move_us >= max(self._saving_us, 0.0)
        if (
            self._pipeline.copy_ahead
            and self._num_rounds < _MAX_ROUNDS
            and (is_far or (num_missing > num_rows and is_much))
        ):
            self._num_rounds += 1
            return LayerMoves(self._newest, None, places.copy(target, full))
        moves = places.change(target, full, live)
        self.layout, self._target, self._saving_us = self._newest, None, 0.0
        self.num_changes += 1
        return LayerMoves(self._newest, target, moves)
