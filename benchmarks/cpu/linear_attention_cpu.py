"""A decode step of a linear attention layer on one core, beside reading and writing its states.

Enters: nothing; weights and inputs are drawn, in published widths. Leaves: a table, the claims, and
a list of {kind, kernels, ratio}. Does not know: projections, which are products like any other.

States of several layers are visited in turn, so that they come from memory as in a step. Both are
timed turn by turn, and a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kit.bench import BenchRun, Interval, bench
from data_plane.kv.carry_pool import CarryPool, CarryRows
from data_plane.model.attention_kinds.delta import DeltaConfig, DeltaNames, DeltaWeights
from data_plane.native.kernels import NativeKernels

MAX_OF_STATES = 1.3
"""Claim: a step takes at most this, of reading and writing the states of its rows."""
NUM_ROWS, NUM_LAYERS = 8, 8
NO_NAMES = DeltaNames("", (), (), (), (), "", "", "")
KINDS = {
    "gated delta net": DeltaConfig(2048, 16, 32, 128, 128, 4, 1e-6, False, None, NO_NAMES),
    "kimi delta attention": DeltaConfig(2304, 32, 32, 128, 128, 4, 1e-5, True, None, NO_NAMES),
}
"""The widths of Qwen3-Next and of Kimi-Linear."""


@bench("Fewer rounds; judges no claim.")
def main(run: BenchRun) -> None:
    """Time every kind with every instruction set of fp32 that is here."""
    torch.set_num_threads(1)
    claims = []
    for kind, config in KINDS.items():
        for instructions in dict.fromkeys(("avx2", NativeKernels(torch.float32).instructions)):
            ratio = Interval.of(ratios(config, instructions, 5 if run.is_quick else 40))
            run.keep({"kind": kind, "kernels": instructions, "ratio": round(ratio.median, 3)})
            what = f"{kind}, {instructions}: a step over reading and writing its states"
            claims.append(ratio.at_most(what, MAX_OF_STATES))
    run.table("a layer's step over reading and writing its states", run.results)
    run.judge(claims, run.too_quick)


@torch.inference_mode()
def ratios(config: DeltaConfig, instructions: str, rounds: int) -> list[float]:
    """What steps take of the time of reading and writing their states, one for each round."""
    kernels = NativeKernels(torch.float32, instructions)
    heads, keys = config.num_heads, config.key_dim
    values = heads * config.value_dim
    width = config.num_channels + values + heads * config.decay_width + heads
    drawn = torch.randn(NUM_ROWS, width)

    def projected(_: Any) -> Any:
        return drawn

    weights = DeltaWeights(
        projected, None, None, torch.randn(config.num_channels, config.conv_size),
        torch.rand(heads, 1), torch.randn(heads, config.decay_width), torch.ones(config.value_dim),
    )  # fmt: skip
    pool = CarryPool(config, NUM_LAYERS, NUM_ROWS, torch.float32)
    plain = torch.zeros(NUM_LAYERS, NUM_ROWS, heads, keys, config.value_dim)
    frame_B, live_B = torch.arange(NUM_ROWS), torch.ones(NUM_ROWS, dtype=torch.bool)

    def step(layer: int, position: int) -> None:
        rows = CarryRows(frame_B, torch.full((NUM_ROWS,), position), live_B)
        kernels.linear_attention(pool, layer, rows, drawn, weights)

    found = []
    for position in range(rounds + 2):
        ours = _seconds(lambda layer, at=position: step(layer, at))
        theirs = _seconds(lambda layer: plain[layer].mul_(0.5))
        found.append(ours / theirs)
    return found[2:]


def _seconds(of_layer: Callable[[int], object]) -> float:
    began = time.perf_counter()
    for layer in range(NUM_LAYERS):
        of_layer(layer)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
