"""What moving layers gains on CPUs: each policy plays the same passes, by processor time.

Enters: a checkpoint, constants of the predictor. Leaves: claims, as ratios within one run. Does not
know: how layers move, how the constants were fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean, median

from control_plane.scheduler.pipeline.predictor import predict_pass
from data_plane.profiling.stages import PassTime, makespan_us
from nanocp.config.passes import PassCosts, PassesConfig
from nanocp.simulator.fit.pipeline import LoadPhase, PipelinePlay, Played

NUM_LAYERS = 12


@dataclass(frozen=True, slots=True)
class StageClaim:
    """A row of the table."""

    claim: str
    asked: str
    found: str
    holds: bool | None
    """None: this run does not judge it."""

    def unless(self, reason: str) -> StageClaim:
        """What was found, not judged if there is a reason why this run cannot."""
        found = f"{self.found}; {reason}"
        return replace(self, found=found, holds=None) if reason else self


class Layouts:
    """Layers that move against layers that do not, on one checkpoint."""

    def __init__(self, checkpoint: Path, costs: PassCosts, is_quick: bool) -> None:
        """costs: what policies plan with."""
        self._checkpoint, self._costs, self._is_quick = checkpoint, costs, is_quick
        self._num = 10 if is_quick else 80
        self._window = 3 if is_quick else 25
        self._decode = LoadPhase(4, 60, 2000, self._num + 3 * self._window)
        self._prompts = LoadPhase(6, 700, 2, self._num)

    def _run(
        self,
        policy: str,
        *phases: LoadPhase,
        copy_ahead: bool = True,
        slowness: Sequence[float] | None = None,
    ) -> Played:
        config = PassesConfig(
            max_pass_tokens=256,
            layer_policy=policy,
            layout_window=self._window,
            copy_ahead=copy_ahead,
            costs=self._costs,
        )
        return PipelinePlay(self._checkpoint, phases, config, slowness=slowness).run()

    def _claim(self, claim: str, asked: str, found: str, holds: bool | None) -> StageClaim:
        return StageClaim(claim, asked, found, None if self._is_quick else holds)

    def decode(self) -> tuple[StageClaim, int]:
        """Few rows that decode; also returns how many layers their first stage should have.

        Even is by what the layers took in this run; see `phases`.
        """
        level = self._run("level", self._decode)
        last = level.passes[-self._num // 2 :]
        r, planned = ratio_of(last), planned_ratio(last, self._costs)
        even = in_layout(level, NUM_LAYERS // 2)[-self._num // 2 :]
        even_us = max(per_pass(even))
        allowed_us, head = best_of(even)
        found, allowed = max(per_pass(last)) / even_us, allowed_us / even_us
        claim = StageClaim(
            f"decode, few rows, r = {r:.1f}, foretold {planned:.1f}: longest stage, level / even",
            f"r >= 2: <= 0.88, or within 3% of {allowed:.3f}, what whole layers allow",
            f"{found:.3f}, {changes_of(level)}",
            found <= max(0.88, 1.03 * allowed) if r >= 2 else None,
        )
        return claim, head

    def phases(self, head: int) -> StageClaim:
        """Decode, prompts, decode, against layouts that stay.

        Two runs of the same passes differ by 4% and more. So one run is judged by what its own
        layers took: `in_layout` says how long it would have taken in the others.

        head: layers of the first stage in the layout that is best for decode.
        """
        # Passes of prompts are longer: each phase takes about a third of even's time.
        pass_us = [
            max(per_pass(self._run("even", phase).passes[-self._num // 2 :]))
            for phase in (self._decode, self._prompts)
        ]
        num_decode = round(self._num * pass_us[1] / pass_us[0])
        decode = self._decode._replace(num_passes=num_decode)
        turns = (decode, self._prompts, decode)
        played = self._run("level", *turns)
        moving_us = sum(move.us for move in played.moves)
        even, best = (in_layout(played, layers) for layers in (NUM_LAYERS // 2, head))
        ends = accumulate((each.num_passes for each in turns), initial=0)
        parts = [even[begin:end] for begin, end in pairwise(ends)]
        even_us = [max(per_pass(part)) * len(part) for part in parts]
        allowed = sum(best_of(part)[0] * len(part) for part in parts) / sum(even_us)
        us = makespan_us(played.passes)
        # Layers that stay cost nothing: what moving took is not theirs, whosever time it was.
        against = [us / (makespan_us(other) - moving_us) for other in (even, best)]
        return StageClaim(
            f"decode, prompts ({even_us[1] / sum(even_us):.0%} of even's time), decode: "
            f"level / even, level / static:{head},{NUM_LAYERS - head}",
            "<= 0.92 of both",
            f"{against[0]:.3f} (whole layers allow {allowed:.3f}), {against[1]:.3f}, "
            f"{changes_of(played)}",
            max(against) <= 0.92,
        )

    def many_rows(self) -> list[StageClaim]:
        """Many rows, for which sampling costs little: layers move off a slow stage only.

        Two runs of the same passes differ by 4%, by where the system put their memory. So a layout
        is judged by what its own run's layers took.
        """
        rows = LoadPhase(24, 60, 400, 2 * self._num + self._window)
        even, level = self._run("even", rows), self._run("level", rows)
        last = even.passes[-self._num :]
        r, besides_us = ratio_of(last), besides_layers(last)
        pass_us = makespan_us(level.passes) / len(level.passes)
        planning = (level.plan_us - even.plan_us) / pass_us
        claims = [
            StageClaim(
                f"steady mix, r = {r:.2f}: changes; planning of level besides even's, of a pass",
                "r < 0.5: 0; <= 2%",
                f"{level.num_changes}; {planning:.2%}",
                level.num_changes == 0 and planning <= 0.02 if r < 0.5 else None,
            )
        ]
        for name, slowness in (("first", (2.0, 1.0)), ("last", (1.0, 2.0))):
            played = self._run("level", rows, slowness=slowness)
            longest_us = max(per_pass(played.passes[-self._num :]))
            layers_us = layer_times(played.passes[-self._num :])
            even_us, *others_us = (
                longest_of(layers_us, besides_us, slowness, head)
                for head in (NUM_LAYERS // 2, *range(1, NUM_LAYERS))
            )
            lost_us = even_us - longest_of(layers_us, besides_us, (1, 1), NUM_LAYERS // 2)
            share, allowed = ((even_us - us) / lost_us for us in (longest_us, min(others_us)))
            claims.append(
                StageClaim(
                    f"{name} stage of half the speed: what level recovers of what even loses",
                    ">= 60%, or a longest stage within 3% of what whole layers allow",
                    f"{share:.1%} of {allowed:.1%}, {changes_of(played)}",
                    share >= 0.6 or longest_us <= 1.03 * min(others_us),
                )
            )
        return claims

    def pre_copy(self) -> StageClaim:
        """KV of long rows that is sent at the mark, with and without pages that go ahead."""
        rows = LoadPhase(6, 300 if self._is_quick else 1200, 2000, self._num + 6 * self._window)
        us, frames, pass_us = [], [], 1.0
        for copy_ahead in (True, False):
            played = self._run("level", rows, copy_ahead=copy_ahead)
            marks = [move for move in played.moves if move.is_mark]
            if not marks:
                return StageClaim("pre-copy", "<= 25% of a pass", "no layer moved", None)
            us.append(fmean(move.us for move in marks))
            frames.append(fmean(move.num_frames for move in marks))
            pass_us = sum(per_pass(played.passes[-self._num // 2 :]))
        return StageClaim(
            "pre-copy: KV at the mark, processor time of both ends",
            "<= 25% of a pass, <= 0.4 of that without",
            f"{us[0] / pass_us:.1%}, {us[0] / us[1]:.3f} ({frames[0]:.0f} and {frames[1]:.0f} "
            "frames of a layer)",
            us[0] <= 0.25 * pass_us and us[0] <= 0.4 * us[1],
        )


def per_pass(passes: Sequence[PassTime]) -> list[float]:
    """For each stage, the mean processor time of a pass, in us."""
    return [fmean(us) for us in zip(*(each.stage_us for each in passes), strict=True)]


def ratio_of(passes: Sequence[PassTime]) -> float:
    """Sampling over a layer: r."""
    return median(each.sample_us / each.layer_us for each in passes)


def in_layout(played: Played, head: int) -> list[PassTime]:
    """What passes would have taken if the first of two stages had had `head` layers all the time.

    What the layers between this layout and the one of a pass took goes to the other stage.
    """
    passes = []
    changes = [(0, NUM_LAYERS // 2), *((number, split[0]) for number, split in played.layouts)]
    for number, each in enumerate(played.passes):
        had = max(change for change in changes if change[0] <= number)[1]
        us = sum(each.layers_us[had:head]) - sum(each.layers_us[head:had])
        first_us, last_us = each.stage_us
        passes.append(replace(each, stage_us=[first_us + us, last_us - us]))
    return passes


def layer_times(passes: Sequence[PassTime]) -> list[float]:
    """For each layer, the mean processor time of a pass, in us."""
    layers = [fmean(us) for us in zip(*(each.layers_us for each in passes), strict=True)]
    return [*layers, fmean(layers[1:])]  # the last one is not timed; the first may be dense


def besides_layers(passes: Sequence[PassTime]) -> tuple[float, float]:
    """What two stages of an even layout take besides their layers, in us."""
    layers, middle, (first_us, last_us) = layer_times(passes), NUM_LAYERS // 2, per_pass(passes)
    return first_us - sum(layers[:middle]), last_us - sum(layers[middle:])


def longest_of(
    layers_us: Sequence[float], besides_us: Sequence[float], slowness: Sequence[float], head: int
) -> float:
    """The longer of two stages, of which the first has `head` layers, in us."""
    stages_us = sum(layers_us[:head]), sum(layers_us[head:])
    both = zip(stages_us, besides_us, slowness, strict=True)
    return max((us + more_us) * slow for us, more_us, slow in both)


def best_of(passes: Sequence[PassTime]) -> tuple[float, int]:
    """The best that whole layers allow, by what an even layout's took.

    Returns the mean of the longer stage in us, and how many layers the first stage has then.
    """
    layers_us, besides_us = layer_times(passes), besides_layers(passes)
    heads = range(1, NUM_LAYERS)
    return min((longest_of(layers_us, besides_us, (1, 1), head), head) for head in heads)


def planned_ratio(passes: Sequence[PassTime], costs: PassCosts) -> float:
    """What the predictor says r is."""
    foretold = [predict_pass(each.spans, costs) for each in passes]
    return median(each.sample_us / each.layer_us for each in foretold)


def changes_of(played: Played) -> str:
    """When the layout changed, and to what: `12: 8,4` is from pass 12 on."""
    changes = [f"{number}: {','.join(map(str, split))}" for number, split in played.layouts]
    return f"{len(changes)} changes" + (f" ({'; '.join(changes)})" if changes else "")
