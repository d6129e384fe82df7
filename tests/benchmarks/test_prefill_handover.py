"""Pages of a benchmark's engine arrive, whichever way they take; what decode pays is judged."""

import numpy as np
import page_arrivals
import prefill_handover
import pytest


@pytest.mark.parametrize("backend", ["auto", "tcp"])
def test_pages_arrive(backend):
    handover = prefill_handover.measure(backend, seconds=0.2)
    assert handover.num_pages > 0 and handover.seconds >= 0.2
    assert handover.way == ("shared memory" if backend == "auto" else "tcp")


def cost(factor, noise=0.001, num_blocks=40):
    """What is said of windows whose steps take `factor` times as long while pages arrive."""
    draw = np.random.default_rng(3)
    windows = 10.0 * draw.normal(1.0, noise, (num_blocks, 3)) * draw.uniform(1, 3, (num_blocks, 1))
    blocks = [page_arrivals.Block(a, b, c * factor) for a, b, c in windows]
    counted = {"pages": 64, "seconds": 2.0, "page_bytes": 1000}
    return page_arrivals.cost_of(blocks, counted)


@pytest.mark.parametrize(
    ("factor", "noise", "holds"),
    [
        (1.0, 0.001, True),
        (1.015, 0.001, True),
        (1.025, 0.001, False),
        (1.02, 0.5, None),
    ],
)
def test_a_claim_is_judged_by_the_interval(factor, noise, holds):
    found = cost(factor, noise)
    assert found.claim.holds is holds
    assert found.ratio_low <= found.ratio <= found.ratio_high
    assert found.null_low < 1 < found.null_high and found.pages_per_s == 32


def test_a_step_s_time_counts_only_tokens_of_the_window():
    arrivals = [[0.0, 1.0, 1.01, 1.02, 9.0], [1.5, 1.53], [1.9], []]
    assert page_arrivals.step_ms(arrivals, 1.0, 2.0) == pytest.approx(50 / 3)
