"""Two stages of a pipeline against two instances over a link: what is asked, and what is shown.

Enters: checkpoints. Leaves: claims, as ratios within one run. Does not know: how links are made.

What a link costs goes by its time beside a layer's. Both grow with rows, but a part of a layer's
time does not. So a run is judged only if a layer's rows take at most as long on the link, beside
what the layer takes here, as those of a GPU with as many rows take on 1 Gbit/s beside its layer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from pipeline_layouts import NUM_LAYERS, StageClaim
from slow_link import Decoded, decode, nodes_behind, rates, why_not

from nanocp.config.passes import PassCosts, PassesConfig
from nanocp.simulator.fit.pipeline import LoadPhase, PipelinePlay

NUM_DENSE = 1
GPU_LAYER_MS = 50 / 61
"""NanoCP's paper allows a token of DeepSeek-V3 50 ms on H200s (6.1), for 61 layers and whatever
number of rows. Its layers take no longer than this, so that links count at least as much."""
GPU_ROW_BYTES = 7168 * (1 + 2)
"""DeepSeek-V3's hidden size (its config.json), in FP8 to the experts and in BF16 back."""
GPU_MBIT_PER_S = 1000
SLOWER_MBIT_PER_S = 400
"""Rows still take less of a layer's time on this link than they take of a GPU's on 1 Gbit/s."""
LEAST_RATIO = 1.5
RATE_ERROR = 0.1
"""A link that lets more or less through, by this share, is not the one that the claim names."""
FEW_ROWS, MANY_ROWS = (8, 160), (64, 150)
"""Rows of both instances together, and tokens of each that count."""


class LinkRun(NamedTuple):
    """Two layouts of one checkpoint over one link."""

    checkpoint: Path
    mbit_per_s: int
    num_rows: int
    num_tokens: int
    is_asked: bool = False


def gpu_share(num_rows: int) -> float:
    """Time of a layer's rows on 1 Gbit/s, over that of the layer on a GPU.

    num_rows: of an instance, which sends them to one other instance and awaits its sums.
    """
    return 8 * num_rows * GPU_ROW_BYTES / (GPU_MBIT_PER_S * 1e3) / GPU_LAYER_MS


def link_share(num_rows: int, sent_kb: float, mbit_per_s: float, ms: float) -> float:
    """Time of a layer's rows on a link, over that of the layer here.

    num_rows: of an instance. sent_kb: what two instances send for a token, in all layers together.
    ms: time of a layer with experts.
    """
    # An instance has half of all rows, and sends half of all bytes: sent_kb for each of its rows.
    return 8 * num_rows * sent_kb / (NUM_LAYERS - NUM_DENSE) / mbit_per_s / ms


@cache
def layer_ms(checkpoint: Path, num_rows: int) -> float:
    """Processor time of a layer with experts, for a pass of so many rows that decode: median."""
    rows = LoadPhase(num_rows, 60, 200, 30)
    played = PipelinePlay(checkpoint, [rows], PassesConfig(), num_stages=1).run()
    return median(fmean(each.layers_us[NUM_DENSE:]) for each in played.passes[-20:]) / 1e3


def another_setting(share: float, gpu: float, mbit_per_s: int, measured: Sequence[float]) -> str:
    """What keeps a run over a link from being what the claim is about; empty if nothing.

    share, gpu: of link_share and gpu_share. measured: Mbit/s that the link let through, in each
    direction.
    """
    if any(abs(rate / mbit_per_s - 1) > RATE_ERROR for rate in measured):
        return f"the link is off by more than {RATE_ERROR:.0%}"
    return "a layer has more of the link than a GPU's" if share > gpu else ""


def claim_of(run: LinkRun, costs: PassCosts) -> StageClaim:
    """Measure stages and instances in turn, over two rounds; the link before and after them.

    The better round of each counts. Where it is asked, instances run in one lane and in two, and
    the faster ones count. costs: what stages are levelled with.
    """
    claim = (
        f"two stages over {run.mbit_per_s} Mbit/s against two instances, {run.num_rows} rows, "
        f"{run.checkpoint.name}: tokens/s"
    )
    asked = f">= {LEAST_RATIO}x" if run.is_asked else "shown"
    if reason := why_not():
        return StageClaim(claim, asked, f"not measured: {reason}", None)
    own_rows = run.num_rows // 2
    ms = layer_ms(run.checkpoint, own_rows)
    layouts = ("pipeline", "instances", "lanes") if run.is_asked else ("pipeline", "instances")
    with nodes_behind(run.mbit_per_s):
        before = rates(run.mbit_per_s)
        rounds = [
            [
                decode(run.checkpoint, layout, run.num_rows, run.num_tokens, costs)
                for layout in layouts
            ]
            for _ in range(2 if run.is_asked else 1)
        ]
        measured = (*before, *rates(run.mbit_per_s))
    stages, *others = map(max, zip(*rounds, strict=True))
    ratios = [stages.tokens_per_s / each.tokens_per_s for each in others]
    share = link_share(own_rows, others[0].sent_kb, min(measured), ms)
    gpu = gpu_share(own_rows)
    found = (
        f"{found_of(stages, others)}; a layer takes {ms:.2f} ms, its rows {share:.2f} of that on "
        f"the link (a GPU's {gpu:.2f}); the link let {min(measured):.1f} to {max(measured):.1f} "
        "Mbit/s through"
    )
    can_judge = run.is_asked and len(os.sched_getaffinity(0)) >= 2
    if run.is_asked and (reason := another_setting(share, gpu, run.mbit_per_s, measured)):
        found, can_judge = f"{found}; not judged: {reason}", False
    return StageClaim(claim, asked, found, min(ratios) >= LEAST_RATIO if can_judge else None)


def found_of(stages: Decoded, others: Sequence[Decoded]) -> str:
    """Ratios, and what explains them. others: instances, and instances in two lanes if measured."""
    names = [f"{stages.tokens_per_s / each.tokens_per_s:.2f}x" for each in others]
    if len(names) == 2:
        names[1] += " of those in two lanes"
    instances = others[0]
    return (
        f"{', '.join(names)}; {stages.tokens_per_s:.0f} and {instances.tokens_per_s:.0f} tokens/s; "
        f"members wait for {stages.waiting:.0%} and {instances.waiting:.0%}; "
        f"{stages.sent_kb:.0f} and {instances.sent_kb:.0f} KB a token"
    )


def part_link(
    wide: Path, small: Path, costs_of: Callable[[Path], PassCosts], is_quick: bool
) -> list[StageClaim]:
    """Two stages against two instances over a link, with many rows and with few.

    costs_of: what stages of a checkpoint are levelled with.

    Asked of many wide rows, over 1 Gbit/s and over a link that is nearer to what 1 Gbit/s is beside
    a GPU's layers. Shown with few rows, of preset small, whose rows are narrow, and over a slow
    link.
    """
    runs = [
        LinkRun(wide, 1000, *MANY_ROWS, is_asked=True),
        LinkRun(wide, SLOWER_MBIT_PER_S, *MANY_ROWS, is_asked=True),
        LinkRun(wide, 1000, *FEW_ROWS),
        LinkRun(small, 1000, *MANY_ROWS),
        LinkRun(small, 1000, *FEW_ROWS),
        LinkRun(small, 20, *FEW_ROWS),
    ]
    if is_quick:
        runs = [each._replace(num_rows=2, num_tokens=20, is_asked=False) for each in runs[::3]]
    costs = {checkpoint: costs_of(checkpoint) for checkpoint in (wide, small)}
    return [claim_of(run, costs[run.checkpoint]) for run in runs]
