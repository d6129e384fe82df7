"""The search for the highest sustained rate: where it ends, and what its runs may leave out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.loads.workload import Workload
from nanocp.simulator.loads.workload_request import WorkloadRequest
from nanocp.simulator.outcome import Recorder, Run, Slo
from nanocp.simulator.simulation import make_simulation
from nanocp.simulator.sweep import MAX_RATE, MIN_RATE, PRECISION, attempts, highest_sustained_rate
from nanocp.simulator.trial import Trial

FILE = load_cluster_file("h200x32-deepseek-v3")
NO_OUTCOME = make_simulation(FILE, "peak", "least_batch", Run(0, 1)).run(iter(()))


@given(st.floats(MIN_RATE * PRECISION, MAX_RATE), st.floats(MIN_RATE, MAX_RATE), st.integers(0, 6))
def test_the_search_ends_next_to_the_truth_wherever_it_begins(truth, first_rate, growth):
    tried = []

    def attempt(rate):
        tpot_ms_p99 = min(50 * (rate / truth) ** growth, 1e6)
        return replace(
            NO_OUTCOME, attainment=1.0 if rate <= truth else 0.5, tpot_ms_p99=tpot_ms_p99
        )

    found = highest_sustained_rate(
        attempt, first_rate, lambda rate, is_sustained: tried.append((rate, is_sustained))
    )
    assert found.rate_per_s <= truth
    assert found.rate_per_s * PRECISION * 1.0001 >= truth
    assert found.num_runs == len(tried) <= 24
    assert found.outcome is not None
    assert highest_sustained_rate(attempt, 1.0).rate_per_s == found.rate_per_s
    assert highest_sustained_rate(attempt, found.rate_per_s).num_runs <= 4


def test_a_search_that_never_succeeds_or_never_fails_ends():
    never = highest_sustained_rate(lambda rate: replace(NO_OUTCOME, attainment=0.0), 10.0)
    always = highest_sustained_rate(lambda rate: replace(NO_OUTCOME, attainment=1.0), 10.0)
    hopeless = highest_sustained_rate(
        lambda rate: replace(NO_OUTCOME, attainment=1.0, is_hopeless=True), 10.0
    )
    assert (never.rate_per_s, never.outcome, hopeless.rate_per_s) == (0, None, 0)
    assert MAX_RATE / PRECISION < always.rate_per_s <= MAX_RATE
    with pytest.raises(ValueError, match="first_rate is 0"):
        highest_sustained_rate(lambda rate: NO_OUTCOME, 0)


def test_a_run_that_ends_as_soon_as_it_cannot_pass_has_the_verdict_of_the_whole_run():
    trial = Trial(
        replace(FILE, cluster=replace(FILE.cluster, max_model_len=8192)).of_size(8), "fluid",
        Workload("fixed:1000:50", 10.0, seed=1), constants="fitted", slo=Slo(tpot_us=25_000),
        warm_up_us=1_000_000, measure_us=6_000_000,
    )  # fmt: skip
    verdicts = []
    for rate in (20.0, 30.0, 40.0):
        whole = trial.at_rate(rate).filled().play()
        tried = attempts(trial)(rate)
        verdicts.append((whole.is_sustained, tried.is_hopeless))
        assert tried.is_sustained == whole.is_sustained
        assert tried.num_windows <= whole.num_windows
    assert verdicts == [(True, False), (False, True), (False, True)]


def drifting_log(num_requests, slow_share=0.3):
    """Requests of one size; the first of them come at a third of the others' rate."""
    at_us, requests = 0, []
    for number in range(num_requests):
        requests.append(WorkloadRequest(at_us, 1000, 50, 50))
        at_us += 300_000 if number < slow_share * num_requests else 100_000
    return tuple(requests)


def trial_of(requests, rate, **times):
    file = replace(FILE, cluster=replace(FILE.cluster, max_model_len=8192)).of_size(8)
    workload = Workload("log", rate, given=requests)
    return Trial(file, "fluid", workload, constants="fitted", slo=Slo(tpot_us=25_000), **times)


def test_arrivals_that_drift_are_no_drift_of_the_cluster():
    """The slow beginning is the first half of the run; the cluster has room all the time."""
    requests = drifting_log(600)
    trial = trial_of(requests, 10.0, warm_up_us=15_000_000, measure_us=32_000_000)
    recorder = Recorder(trial.run)
    outcome = trial.filled().play(recorder)
    before, after = (half.mean for half in recorder._sums.halves)
    assert after / before > 1.3 and not outcome.is_drifting and abs(outcome.drift) < 0.1
    assert outcome.is_sustained


def test_a_rate_that_only_seems_to_fill_the_cluster_is_played_for_longer(monkeypatch):
    lengths = []

    def play(self, recorder=None):
        lengths.append(self.run.measure_us)
        fills_up = len(lengths) == 1 or missing
        attainment = 0.5 if missing and len(lengths) > 1 else 1.0
        return replace(NO_OUTCOME, attainment=attainment, is_drifting=fills_up, drift=0.5)

    monkeypatch.setattr(Trial, "play", play)
    trial = trial_of(drifting_log(10), 5.0, measure_us=1_000_000, begins_empty=True)
    for missing in (False, True):
        lengths.clear()
        assert attempts(trial)(5.0).is_sustained is not missing
        assert lengths == [1_000_000, 3_000_000]


def test_the_busiest_half_of_a_trace_decides_as_all_of_it_does():
    trial = trial_of(drifting_log(600), 20.0, warm_up_us=4_000_000, measure_us=26_000_000)
    half = trial.busiest(1)
    assert half.run.measure_us == 13_000_000 and half.workload.begins_us >= 14_000_000
    for rate in (12.0, 60.0):
        whole, part = attempts(trial)(rate), attempts(trial, lambda here: here.busiest(1))(rate)
        assert whole.is_sustained == part.is_sustained == (rate == 12.0)
    assert 12.0 < trial.likely_rate < 60.0, "a search may begin there"
