"""What two processes do on a machine over one, and claims that it keeps from being judged."""

import pytest

from benchmarks.cpu import moe_cpu
from benchmarks.cpu.moe_cpu import CALL, EARLY, PARTS, TWO, MixturePoint
from benchmarks.kit.machine import TwoProcesses, two_processes


def test_two_processes_are_measured_over_one():
    assert all(scaling > 0 for scaling in two_processes(seconds=0.01))


@pytest.mark.parametrize(("here", "reason"), [
    (TwoProcesses(compute=1.7, memory=1.8), ""),
    (TwoProcesses(2.0, 1.13), "memory of two processes is 1.13 of one's (1.70)"),
    (TwoProcesses(1.0, 1.13), "compute of two processes is 1.00 of one's (1.70)"),
])  # fmt: skip
def test_a_machine_with_less_than_is_asked_is_named(here, reason):
    assert here.why_not(1.7) == reason


@pytest.mark.parametrize(("memory", "found_us", "verdict"), [
    (1.9, 50.0, "holds"),
    (1.6, 50.0, "holds"),
    (1.9, 70.0, "missed"),
    (1.6, 70.0, "cannot be judged here (memory of"),
])  # fmt: skip
def test_two_processors_miss_nothing_where_two_processes_do_less(memory, found_us, verdict):
    point = MixturePoint("processors", 1, 32, (PARTS, CALL, TWO))
    times = {(point, CALL): [100.0], (point, TWO): [found_us]}
    (claim,) = moe_cpu.claims(times, TwoProcesses(2.0, memory))
    assert str(claim).startswith(verdict)


@pytest.mark.parametrize(("ratios", "verdict"), [
    ([0.90, 0.92, 0.94], "holds"),
    ([0.90, 0.96, 0.97], "cannot be judged here (the bound is in the interval)"),
    ([0.96, 0.97, 0.98], "missed"),
])  # fmt: skip
def test_a_bound_within_the_noise_of_a_run_is_not_judged(ratios, verdict):
    point = MixturePoint("tcp", 2, 16, (CALL, EARLY), 1.0, is_tcp=True)
    times = {(point, CALL): [100.0] * 15, (point, EARLY): [100 * each for each in ratios] * 5}
    (claim,) = moe_cpu.claims(times, TwoProcesses(2.0, 1.9))
    assert str(claim).startswith(f"{verdict}:")
