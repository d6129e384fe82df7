"""Top-p on flat and peaked logits, against a sort of the whole vocabulary.

    python benchmarks/sampler_cpu.py [--quick] [--json PATH]

Claim: on flat logits the nucleus takes at most half the processor time of a full sort. Random
weights make logits flat; a full sort there would make the last stage of a pipeline look slow.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from os import getloadavg
from pathlib import Path
from statistics import median

import torch
from machine import describe, write_results
from torch import Tensor

from data_plane.instance.sampler import _is_in_nucleus

MOST = 0.5
"""The claim: of the time of a full sort, on flat logits."""


def sorted_nucleus(probability_V: Tensor, top_p: float) -> Tensor:
    """The fewest most likely tokens that reach top_p, by sorting all: [vocabulary] bool."""
    top, order = probability_V.sort(descending=True, stable=True)
    return torch.zeros(len(probability_V), dtype=torch.bool).index_fill_(
        0, order[top.cumsum(dim=0) - top < top_p], True
    )


def time_ms(nucleus: Callable[[Tensor, float], Tensor], probability_V: Tensor, runs: int) -> float:
    """The median processor time of a call, in ms."""
    times_ns = []
    for _ in range(runs):
        began_ns = time.process_time_ns()
        nucleus(probability_V, 0.9)
        times_ns.append(time.process_time_ns() - began_ns)
    return median(times_ns) / 1e6


def measure(vocabulary: int, scale: float, runs: int) -> dict[str, float]:
    """Times of one row whose logits are normal with this standard deviation."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(vocabulary, dtype=torch.float64, generator=generator) * scale
    probability_V = logits.softmax(dim=-1)
    expected = sorted_nucleus(probability_V, 0.9)
    assert torch.equal(_is_in_nucleus(probability_V, 0.9), expected), "another nucleus"
    sort_ms = time_ms(sorted_nucleus, probability_V, runs)
    nucleus_ms = time_ms(_is_in_nucleus, probability_V, runs)
    return {
        "vocabulary": vocabulary,
        "scale": scale,
        "sort_ms": round(sort_ms, 3),
        "nucleus_ms": round(nucleus_ms, 3),
        "ratio": round(nucleus_ms / sort_ms, 3),
    }


def main() -> int:
    """Measure and judge; returns 1 if the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few runs; it is judged all the same")
    parser.add_argument("--json", type=Path, help="where the result is written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine = describe(getloadavg()[0])
    results = [
        measure(vocabulary, scale, 9 if arguments.quick else 51)
        for vocabulary in (32_768, 129_280)
        for scale in (0.02, 1.0, 6.0)
    ]
    for result in results:
        print(result)
    if arguments.json:
        write_results(arguments.json, results, machine)
    holds = all(result["ratio"] <= MOST for result in results if result["scale"] <= 1)
    print(f"flat logits take at most {MOST} of a full sort: {'yes' if holds else 'NO'}")
    return 0 if holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
