"""What pulled_prompts makes of its times."""

import pytest

from benchmarks.service.pulled_prompts import Beside, claims_of


def results(ttft=(1.0, 1.05), step=(1.0, 1.01), sent=(2.0, 2.1)):
    return [
        {"what": "ttft", "tokens": 200, "median": ttft[0], "low": 0.9, "high": ttft[1]},
        {"what": "step", "way": "pulled", "median": step[0], "low": 0.9, "high": step[1]},
        {"what": "step", "way": "sent", "median": sent[0], "low": 0.9, "high": sent[1]},
    ]


@pytest.mark.parametrize(
    ("change", "verdicts"),
    [
        ({}, [True, True]),
        ({"ttft": (1.05, 1.2)}, [None, True]),
        ({"step": (1.02, 1.04)}, [True, None]),
    ],
)
def test_claims_are_those_of_pulled_prompts_and_need_their_whole_interval(change, verdicts):
    assert [claim.holds for claim in claims_of(results(**change))] == verdicts


def test_steps_beside_an_arrival_are_held_against_those_after_it():
    # Steps of 20 ms while pages arrive, a longer one with the first token, then steps of 10 ms.
    arrivals_s = [0.0, 0.02, 0.04, 0.06, 0.1, 0.11, 0.12, 0.13, 0.14]
    found = Beside.of(arrivals_s, (0.0, 0.1, 0.14), (1.0, 1.05, 1.09))
    assert found.beside_ms == pytest.approx(20) and found.quiet_ms == pytest.approx(10)
    assert found.arrival_ms == pytest.approx(100)
    assert found.cpu_ratio == pytest.approx(0.5 * 20 / (1.0 * 10))


def test_an_arrival_that_no_whole_step_ran_beside_shows_nothing():
    assert Beside.of([0.0, 0.02, 0.04, 0.06], (0.001, 0.021, 0.07), (0.0, 0.0, 0.0)) is None
