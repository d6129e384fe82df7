"""PhaseClock: each nanosecond of a step belongs to one phase."""

from types import SimpleNamespace

import pytest

from data_plane.profiling import phase_clock
from data_plane.profiling.phase_clock import PhaseClock, PhaseTimes

MODEL = SimpleNamespace(num_layers=2, num_dense_layers=1)


@pytest.fixture
def clock(monkeypatch):
    """A clock that reads 1 us more each time."""
    times_ns = iter(range(0, 10**6, 1000))
    monkeypatch.setattr(
        phase_clock, "time", SimpleNamespace(perf_counter_ns=lambda: next(times_ns))
    )
    return PhaseClock()


def test_a_step_is_the_sum_of_its_phases(clock):
    layers = (
        ["other", "exchange", "attention", "other"],
        ["other", "attention", "dispatch_combine", "expert", "dispatch_combine"],
    )
    for _ in range(2):  # the second step forgets the first
        clock.start()
        for phase in (*layers[0], *layers[1], "step"):
            clock(phase)
        times = clock.times(MODEL)
    # Two layers, one of them with experts; a phase lasts 1 us each time.
    assert times == PhaseTimes(
        attention_us=1, exchange_us=0.5, other_us=1.5, dispatch_combine_us=2, expert_us=1, step_us=2
    )


def test_a_step_that_is_not_over_has_no_times(clock):
    clock.start()
    clock("expert")
    with pytest.raises(AssertionError, match="the step is in its phase expert"):
        clock.times(MODEL)
