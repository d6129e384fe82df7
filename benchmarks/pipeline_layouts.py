"""What moving layers gains on CPUs: each policy plays the same passes, by processor time.

Enters: a checkpoint, constants of the predictor. Leaves: claims, as ratios within one run. Does not
know: how layers move, how the constants were fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from data_plane.profiling.stages import PassTime, makespan_us
from nanocp.config import PassesConfig
from nanocp.passes import PassCosts
from nanocp.profile.pipeline import LoadPhase, PipelinePlay, Played

NUM_LAYERS = 12


@dataclass(frozen=True, slots=True)
class StageClaim:
    """A row of the table."""

    claim: str
    asked: str
    found: str
    holds: bool | None
    """None: this run does not judge it."""


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

    def decode(self) -> tuple[StageClaim, float]:
        """Few rows that decode; also returns their r."""
        even, level = self._run("even", self._decode), self._run("level", self._decode)
        r = ratio_of(even.passes[-self._num // 2 :])
        longest = [max(per_pass(one.passes[-self._num // 2 :])) for one in (even, level)]
        found = longest[1] / longest[0]
        allowed = min(lengths(r)) / lengths(r)[NUM_LAYERS // 2 - 1]
        claim = self._claim(
            f"decode, few rows, r = {r:.1f}: longest stage, level / even",
            f"r >= 2: <= 0.88, or within 3% of {allowed:.2f}, what whole layers allow",
            f"{found:.2f}, {level.num_changes} changes",
            found <= max(0.88, 1.03 * allowed) if r >= 2 else None,
        )
        return claim, r

    def phases(self, r: float) -> StageClaim:
        """Decode, prompts, decode. r: of the decode phases. Passes are alike in every run."""
        # Passes of prompts are longer: phases take about as long as each other.
        decode, prompts = self._decode._replace(num_passes=6 * self._num), self._prompts
        head = lengths(r).index(min(lengths(r))) + 1
        best = f"static:{head},{NUM_LAYERS - head}"
        turns = (decode, prompts, decode)
        even, static, level = (self._run(policy, *turns) for policy in ("even", best, "level"))
        us = makespan_us(level.passes)
        longest = [max(each.stage_us) for each in even.passes]
        share = sum(longest[decode.num_passes : -decode.num_passes]) / sum(longest)
        against = [us / makespan_us(one.passes) for one in (even, static)]
        return self._claim(
            f"decode, prompts ({share:.0%} of even's time), decode: level / even, level / {best}",
            "<= 0.92 of both",
            f"{against[0]:.2f}, {against[1]:.2f}, {level.num_changes} changes",
            max(against) <= 0.92,
        )

    def many_rows(self) -> list[StageClaim]:
        """Many rows, for which sampling costs little: layers move off a slow stage only.

        Each run is played twice, in turn and back: runs whose passes are the same differed by 4%.
        Of each pass of the steady mix the shorter time counts. With a slow stage the two may move
        layers in different passes, so the better run counts.
        """
        rows = LoadPhase(24, 60, 400, 2 * self._num + self._window)
        runs = (("even", None), ("level", None), ("level", (2.0, 1.0)), ("level", (1.0, 2.0)))
        first = [self._run(policy, rows, slowness=slow) for policy, slow in runs]
        again = [self._run(policy, rows, slowness=slow) for policy, slow in reversed(runs)]
        pairs = list(zip(first, reversed(again), strict=True))
        even, level = (quietest(*pair) for pair in pairs[:2])
        slowed = [min(pair, key=self._longest_us) for pair in pairs[2:]]
        r = ratio_of(even.passes[-self._num :])
        found = makespan_us(level.passes) / makespan_us(even.passes)
        is_still = level.num_changes == 0 and abs(found - 1) <= 0.02
        claims = [
            self._claim(
                f"steady mix, r = {r:.2f}: changes; time, level / even",
                "r < 0.5: 0; within 2%",
                f"{level.num_changes}; {found:.2f}",
                is_still if r < 0.5 else None,
            )
        ]
        last = even.passes[-self._num :]
        for name, played, (_, slow) in zip(("first", "last"), slowed, runs[2:], strict=True):
            assert slow is not None
            # An even layout does on a slow host what it does on others, and takes longer for it.
            took = per_pass(last)
            even_us = max(a * b for a, b in zip(took, slow, strict=True))
            lost_us = even_us - max(took)
            least_us = best_longest_us(last, slow)
            longest_us = self._longest_us(played)
            share, allowed = ((even_us - us) / lost_us for us in (longest_us, least_us))
            claims.append(
                self._claim(
                    f"{name} stage of half the speed: what level recovers of what even loses",
                    ">= 60%, or a longest stage within 3% of what whole layers allow",
                    f"{share:.0%} of {allowed:.0%}, {played.num_changes} changes",
                    share >= 0.6 or longest_us <= 1.03 * least_us,
                )
            )
        return claims

    def _longest_us(self, played: Played) -> float:
        return max(per_pass(played.passes[-self._num :]))

    def pre_copy(self) -> StageClaim:
        """KV of long rows that is sent at the mark, with and without pages that go ahead."""
        rows = LoadPhase(6, 300 if self._is_quick else 1200, 2000, self._num + 6 * self._window)
        us, frames, pass_us = [], [], 1.0
        for copy_ahead in (True, False):
            played = self._run("level", rows, copy_ahead=copy_ahead)
            marks = [move for move in played.moves if move.is_mark]
            if not marks:
                return self._claim("pre-copy", "<= 25% of a pass", "no layer moved", None)
            us.append(fmean(move.us for move in marks))
            frames.append(fmean(move.num_frames for move in marks))
            pass_us = sum(per_pass(played.passes[-self._num // 2 :]))
        return self._claim(
            "pre-copy: KV at the mark, processor time of both ends",
            "<= 25% of a pass, <= 0.4 of that without",
            f"{us[0] / pass_us:.0%}, {us[0] / us[1]:.2f} ({frames[0]:.0f} and {frames[1]:.0f} "
            "frames of a layer)",
            us[0] <= 0.25 * pass_us and us[0] <= 0.4 * us[1],
        )


def per_pass(passes: Sequence[PassTime]) -> list[float]:
    """For each stage, the mean processor time of a pass, in us."""
    return [fmean(us) for us in zip(*(each.stage_us for each in passes), strict=True)]


def ratio_of(passes: Sequence[PassTime]) -> float:
    """Sampling over a layer: r."""
    return median(each.sample_us / each.layer_us for each in passes)


def quietest(one: Played, other: Played) -> Played:
    """The run, with each time as short as in the shorter of two runs of the same passes.

    It has the changes of the run that changed more.
    """
    passes = [
        replace(
            a,
            stage_us=[min(us) for us in zip(a.stage_us, b.stage_us, strict=True)],
            layers_us=[min(us) for us in zip(a.layers_us, b.layers_us, strict=True)],
            sample_us=min(a.sample_us, b.sample_us),
        )
        for a, b in zip(one.passes, other.passes, strict=False)
    ]
    return one._replace(passes=passes, num_changes=max(one.num_changes, other.num_changes))


def best_longest_us(passes: Sequence[PassTime], slowness: Sequence[float]) -> float:
    """The least longest stage that two stages can have.

    passes: of an even layout: each layer takes what it took there, and each stage besides.
    """
    layers = [fmean(us) for us in zip(*(each.layers_us for each in passes), strict=True)]
    layers.append(fmean(layers[1:]))  # the last one is not timed; the first may be dense
    middle, (first_us, last_us) = NUM_LAYERS // 2, per_pass(passes)
    first_us -= sum(layers[:middle])
    last_us -= sum(layers[middle:])
    return min(
        max(
            (first_us + sum(layers[:head])) * slowness[0],
            (last_us + sum(layers[head:])) * slowness[1],
        )
        for head in range(1, NUM_LAYERS)
    )


def lengths(r: float) -> list[float]:
    """The longest of two stages, in layers, by the layers of the first: 1, 2, ..."""
    return [max(head, NUM_LAYERS - head + r) for head in range(1, NUM_LAYERS)]
