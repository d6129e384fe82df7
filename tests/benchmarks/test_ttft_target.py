"""ttft_target.py: what its lines bear, and what was not measured is not judged."""

import pytest

from benchmarks.simulated.ttft_target import claims


def line(target_ms, ttft, tpot, rate=12.0, workload="mooncake-x8", is_sustained=True):
    return {
        "workload": workload, "rate": rate, "target_ms": target_ms, "ttft_ms_p99": ttft,
        "tpot_ms_p99": tpot, "is_sustained": is_sustained,
    }  # fmt: skip


PLAIN = line(None, 330.0, 30.0)


@pytest.mark.parametrize(("lines", "holds"), [
    ([PLAIN, line(150, 250.0, 30.5)], [True, True, True]),
    ([PLAIN, line(150, 270.0, 30.5), line(80, 250.0, 31.5)], [False, True, True]),
    ([PLAIN, line(150, 250.0, 31.5)], [True, False, True]),
    ([PLAIN, line(150, 250.0, 30.5), line(1, 240.0, 33.3)], [True, True, False]),
    ([line(None, 1.0, 30.0, 8.0), line(1, 1.0, 33.3, 8.0)], [False]),
    ([line(None, 1.0, 30.0, 8.0, is_sustained=False), line(1, 1.0, 33.3, 8.0)], []),
    ([PLAIN], []),
])  # fmt: skip
def test_a_claim_holds_if_the_lines_bear_it(lines, holds):
    assert [claim.holds for claim in claims(lines)] == holds
