"""How many instances a load needs: what does not fit, is too small, is enough; the command."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from nanocp.cli.main import app
from nanocp.simulator.cluster_file import SHIPPED, load_cluster_file
from nanocp.simulator.outcome import Slo
from nanocp.simulator.size import size, sizes
from nanocp.simulator.trial import Trial
from nanocp.simulator.workload import Workload, own_rate

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

    def play(trial, timeline):
        return SimpleNamespace(is_sustained=trial.file.cluster.num_instances >= least)

    monkeypatch.setattr(Trial, "play", play)
    monkeypatch.setattr("nanocp.simulator.size.sweep", lambda trial, **_: None)
    monkeypatch.setattr("nanocp.simulator.size._guest", lambda trial: None)
    found = size(Trial(H200, "least_batch", Workload("issue-1", rate_per_s=1), begins_empty=True))
    assert [one.num_instances for one in found.tried] == tried
    assert (found.answer.num_instances if found.answer else None) == answer


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write a cluster file and a trace of 20 requests a second.

    The cluster has nodes of 2 and 8 small experts; 2 instances have no room for 4 each.
    """
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
    assert found.most.rate_per_s >= 20 and found.guest is None, "no million tokens fit this model"
    hopeless = size(replace(trial, slo=Slo(1)))
    assert hopeless.answer is None and hopeless.most is None


def test_the_command_says_what_the_answer_costs(files):
    arguments = ["simulate", "size", "--cluster", str(files / "cluster.yaml"), "--seconds", "2"]
    arguments += ["--trace", str(files / "trace.jsonl"), "--usd-per-gpu-hour", "3"]
    arguments += ["--warm-up", "0.5", "--slo-tpot-ms", "1000", "--html", str(files / "page.html")]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values["num_instances"] == 4 and values["rate"] == pytest.approx(20, rel=0.01)
    assert values["usd_per_hour"] == 12 and values["usd_per_million_output_tokens"] > 0
    page = (files / "page.html").read_text()
    assert page.count("data:image/png;base64,") == 6 and "4 H200 sustain it." in page
    assert 'src="http' not in page and "href=" not in page


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--workload", "issue-1"], "issue-1 has no rate of its own; give --rate"),
        (["--rate", "1", "--policy", "fluid", "--policy", "chaos"], "for one policy; 2 are given"),
        (["--trace", "/nowhere.jsonl"], "cannot be read"),
    ],
)
def test_what_cannot_be_sized_is_answered_in_a_sentence(arguments, named):
    result = CliRunner().invoke(app, ["simulate", "size", *arguments])
    assert result.exit_code == 2
    assert named in " ".join(result.output.replace("\u2502", " ").split())


def test_a_trace_has_a_rate(files):
    assert own_rate(f"mooncake:{files / 'trace.jsonl'}") == pytest.approx(200 / 9.95)
