"""The benchmark of masks: both services are measured in all rounds, and a claim is judged."""

import numpy as np
import pytest

from benchmarks.service import structured_output


@pytest.mark.parametrize(("factor", "noise", "verdict"), [
    (1.03, 0.002, "holds"),
    (1.08, 0.002, "does not hold"),
    (1.05, 0.3, "cannot be judged by this run"),
])  # fmt: skip
def test_a_claim_is_judged_by_the_interval(factor, noise, verdict):
    draw = np.random.default_rng(1)
    off = draw.uniform(20, 60, 40)
    ratio = structured_output.Ratio.of(
        {"off": off, "with": off * factor * draw.normal(1, noise, 40)}, "with", 1.05
    )
    assert ratio.result()["verdict"] == verdict and ratio.low <= ratio.ratio <= ratio.high
    assert ratio.num_blocks == 40 and 20 < ratio.step_ms < 60


@pytest.mark.system
def test_every_round_is_measured(tiny_checkpoint):
    measured = structured_output.measure(tiny_checkpoint, 1, print)
    assert {name: len(values) for name, values in measured.items()} == {
        "off": 1,
        "without": 1,
        "with": 1,
    }
    assert min(map(min, measured.values())) > 0
