"""How many instances a load needs: what does not fit, is too small, is enough."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from harness.programs.cluster_files import write_cluster
from nanocp.simulator.analyser.size import size, sizes
from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.loads.workload import Workload
from nanocp.simulator.outcome import Slo
from nanocp.simulator.trial import Trial

H200 = load_cluster_file("h200x32-deepseek-v3")


def test_sizes_are_whole_nodes_and_no_more_instances_than_experts():
    assert list(sizes(H200)) == list(range(8, 257, 8))
    assert list(sizes(replace(H200, model=replace(H200.model, num_experts=27)))) == [8, 16, 24]
    assert list(sizes(replace(H200, model=replace(H200.model, num_experts=7)))) == []


def sizes_that(monkeypatch, play):
    """Collect the sizes that are played."""
    seen = []

    def noted(trial, recorder=None):
        seen.append(trial.file.cluster.num_instances)
        return play(seen[-1])

    monkeypatch.setattr(Trial, "play", noted)
    return seen


@pytest.mark.parametrize(
    ("least", "answer", "tried"),
    [
        (1, 16, [16]),  # eight have no room for a request of max_model_len
        (88, 88, [16, 32, 64, 80, 88, 96, 128]),
        (250, 256, [16, 32, 64, 128, 192, 224, 240, 248, 256]),
        (257, None, [16, 32, 64, 128, 256]),
    ],
)
def test_a_number_that_does_not_divide_the_experts_can_be_enough(monkeypatch, least, answer, tried):
    """The search alone: a trial sustains its load from `least` instances on."""

    seen = sizes_that(monkeypatch, lambda num: SimpleNamespace(is_sustained=num >= least))
    found = size(Trial(H200, "least_batch", Workload("issue-1", rate_per_s=1), begins_empty=True))
    assert (found, sorted(seen)) == (answer, tried)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write a cluster file and a trace of 20 requests a second."""
    folder = tmp_path_factory.mktemp("size")
    size = {"num_instances": 8, "instances_per_node": 2, "max_model_len": 8192}
    shape = {"model": {"num_experts": 8, "expert_mb": 500.0}, "cp_degrees": [1, 2]}
    write_cluster(folder / "cluster.yaml", cluster=size, **shape)
    line = '{"timestamp": %d, "input_length": 1500, "output_length": 20}\n'
    (folder / "trace.jsonl").write_text("".join(line % (50 * i) for i in range(200)))
    return folder


def test_the_smallest_size_that_is_enough_is_found(files):
    file = load_cluster_file(str(files / "cluster.yaml"))
    workload = Workload(f"mooncake:{files / 'trace.jsonl'}", rate_per_s=20)
    step_us = Trial(file, "least_batch", workload, measure_us=1_000_000).play().step_ms_mean * 1e3
    seconds = {"warm_up_us": 500_000, "measure_us": 2_000_000}
    # Four and six instances read twice the weights of eight: a step is longer.
    trial = Trial(file, "least_batch", workload, slo=Slo(round(1.2 * step_us)), **seconds)
    with pytest.raises(ValueError, match="does not fit 2 H200"):
        file.of_size(2)
    assert size(trial) == 8
    assert size(replace(trial, slo=Slo(1))) is None
