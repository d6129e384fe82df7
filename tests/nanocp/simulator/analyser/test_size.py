"""How many instances a load needs: what does not fit, is too small, is enough."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml

from nanocp.simulator.analyser.size import size, sizes
from nanocp.simulator.costs.cluster_file import SHIPPED, load_cluster_file
from nanocp.simulator.loads.workload import Workload
from nanocp.simulator.outcome import Slo
from nanocp.simulator.trial import Trial

H200 = load_cluster_file("h200x32-deepseek-v3")


def test_sizes_are_whole_nodes_and_no_more_instances_than_experts():
    assert list(sizes(H200)) == list(range(8, 257, 8))
    assert list(sizes(replace(H200, model=replace(H200.model, num_experts=27)))) == [8, 16, 24]
    assert list(sizes(replace(H200, model=replace(H200.model, num_experts=7)))) == []


@pytest.mark.parametrize(
    ("least", "answer", "tried"),
    [
        (1, 16, [8, 16]),  # eight have no room for a request of max_model_len
        (88, 88, [8, 16, 32, 64, 80, 88, 96, 128]),
        (250, 256, [8, 16, 32, 64, 128, 192, 224, 240, 248, 256]),
        (257, None, [8, 16, 32, 64, 128, 256]),
    ],
)
def test_a_number_that_does_not_divide_the_experts_can_be_enough(monkeypatch, least, answer, tried):
    """The search alone: a trial sustains its load from `least` instances on."""

    def play(trial, recorder):
        return SimpleNamespace(is_sustained=trial.file.cluster.num_instances >= least)

    monkeypatch.setattr(Trial, "play", play)
    found = size(Trial(H200, "least_batch", Workload("issue-1", rate_per_s=1), begins_empty=True))
    assert [one.num_instances for one in found.tried] == tried
    assert (found.answer.num_instances if found.answer else None) == answer


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write a cluster file and a trace of 20 requests a second."""
    folder = tmp_path_factory.mktemp("size")
    tree = yaml.safe_load((SHIPPED / "h200x32-deepseek-v3.yaml").read_text())
    tree["cluster"] |= {"num_instances": 8, "instances_per_node": 2, "max_model_len": 8192}
    tree["model"] |= {"num_experts": 8, "expert_mb": 500.0}
    tree["cp_degrees"] = [1, 2]
    (folder / "cluster.yaml").write_text(yaml.safe_dump(tree))
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
    found = size(trial)
    assert [one.num_instances for one in found.tried] == [2, 4, 6, 8]
    first, *between, last = found.tried
    assert "does not fit 2 H200" in first.why_not and first.outcome is None
    assert [(one.outcome is not None, one.is_enough) for one in between] == [(True, False)] * 2
    assert last.is_enough and found.answer is last
    assert size(replace(trial, slo=Slo(1))).answer is None
