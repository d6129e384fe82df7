"""What a load would gain: the verdict, what it hangs on, and the command's page."""

import json
from dataclasses import replace
from functools import partial

import pytest

from harness.programs.cluster_files import write_cluster
from harness.programs.command_line import nanocp
from nanocp.cli.plan.page import _rate
from nanocp.simulator.analyser.analysis import (
    COST_GROUPS,
    Analysis,
    LoadSummary,
    LoadVerdict,
    Sensitivity,
    Way,
    analyse,
    changed_costs,
)
from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.loads.request_logs import read_log
from nanocp.simulator.loads.workload import Workload
from nanocp.simulator.outcome import Slo
from nanocp.simulator.sweep import Sustained, Sweep
from nanocp.simulator.trial import Trial

LOAD = LoadSummary(100, 10.0, (1, 2, 3), (1, 2, 3), 1000, 0, 0, 0.5)
LINE = '{"timestamp": %d, "input_length": %d, "output_length": 30}\n'


def way(rate):
    return Way("any", None, None, 0.0, rate)


@pytest.mark.parametrize(("best", "ours", "verdict"), [
    (10.0, 10.9, LoadVerdict.NOT_NEEDED),
    (10.0, 11.2, LoadVerdict.NOT_NEEDED),
    (10.0, 11.3, LoadVerdict.PAYS),
    (19.0, 40.0, LoadVerdict.PAYS),
    (21.0, 40.0, LoadVerdict.FEWER_GPUS),
    (0.0, 11.1, LoadVerdict.PAYS),
    (0.0, 0.0, LoadVerdict.TOO_SLOW),
])  # fmt: skip
def test_the_verdict_is_the_rate_over_todays_best_way(best, ours, verdict):
    found = Analysis(LOAD, (), way(best), way(ours), (), None)
    assert found.verdict == verdict


def test_a_gain_hangs_on_what_takes_it_away():
    weak, sure = Sensitivity("attention", 1.04, 1.4, 1.3), Sensitivity("experts", 1.2, 1.4, 1.3)
    equal = Sensitivity("exchange", 1.0, 1.01, 1.0)
    found = Analysis(LOAD, (), way(1), way(2), (weak, sure, equal), None)
    assert found.weak_groups == ["attention"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write a cluster of two nodes of 4 instances, and a log with a few long prompts."""
    folder = tmp_path_factory.mktemp("plan")
    size = {"num_instances": 8, "instances_per_node": 4, "max_model_len": 262_144}
    shape = {"model": {"num_experts": 64}, "memory": {"hbm_gb": 100.0}, "cp_degrees": [1, 2, 4]}
    write_cluster(folder / "cluster.yaml", cluster=size, **shape)
    lines = (LINE % (40 * i, 200_000 if i % 50 == 0 else 700) for i in range(400))
    (folder / "log.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def rates(monkeypatch):
    """Rates that a search would find; the search has tests of its own."""
    found = {"cost_aware": 40.0, "uniform_cp:4": 30.0, "fluid": 50.0}
    monkeypatch.setattr(
        "nanocp.simulator.analyser.analysis.sweep",
        lambda trial, **_: Sweep((Sustained(found.get(trial.policy, 0.0), None, 1),)),
    )


def trial_of(files, **changes):
    log = read_log(files / "log.jsonl")
    workload = Workload("log", log.rate_per_s, given=log.requests)
    times = {"warm_up_us": 1_000_000, "measure_us": 4_000_000}
    trial = Trial(load_cluster_file(str(files / "cluster.yaml")), "cost_aware", workload, **times)
    return replace(trial, slo=Slo(60_000, 5_000_000), **changes), log


def test_todays_ways_and_ours_are_played_and_timed_again(files, rates):
    trial, log = trial_of(files)
    seen = []
    found = analyse(trial, log.requests, is_quick=True, on_way=seen.append)
    policies = ["least_batch", "round_robin", "least_cache", "uniform_cp:4", "cost_aware", "fluid"]
    assert [one.policy for one in found.ways] == policies
    assert {f"{policy} at 25.1/s" for policy in policies} <= {*seen}
    assert found.ours.rate_per_s == 40 and found.best.policy == "uniform_cp:4"
    assert found.gain == pytest.approx(4 / 3) and found.verdict is LoadVerdict.PAYS
    assert found.load.prompt == (700, 200_000, 200_000) and found.num_gpus is None
    assert found.load.share_of_longest > 0.3
    waits = {one.policy: one.waits_ms for one in found.ways}
    assert waits["fluid"] == 0 < waits["cost_aware"] < waits["least_batch"]
    assert [one.group for one in found.sensitivities] == list(COST_GROUPS)
    dear = next(one for one in found.sensitivities if one.group == "attention")
    assert dear.low <= found.best.outcome.step_ms_mean / found.ours.outcome.step_ms_mean * 1.1
    assert dear.low < dear.as_it_is < dear.high


@pytest.mark.parametrize(("group", "factor"), [("attention", 0.5), ("exchange", 2.0)])
def test_timing_samples_again_says_what_whole_runs_would(files, rates, group, factor):
    """Two points of the sensitivity against runs under the changed constants."""
    trial, log = trial_of(files)
    found = analyse(trial, log.requests, is_quick=True)
    costs = changed_costs(trial.file.costs_of(""), COST_GROUPS[group], factor)
    there = replace(trial, file=replace(trial.file, costs={"operators": costs}))
    steps = [
        replace(there, policy=one.policy).filled().play().step_ms_mean
        for one in (found.best, found.ours)
    ]
    sampled = next(one for one in found.sensitivities if one.group == group)
    nearer = min((sampled.low, sampled.high), key=lambda ratio: abs(ratio - steps[0] / steps[1]))
    assert steps[0] / steps[1] == pytest.approx(nearer, rel=0.1)


plan = partial(nanocp, "plan")


def test_the_page_of_a_log(files, rates, monkeypatch):
    known = []

    def once(*given):
        known[:] = known or [analyse(*given)]
        return known[0]

    monkeypatch.setattr("nanocp.simulator.analyser.analysis.analyse", once)
    gauges = files / "metrics"
    gauges.write_text("".join(f'vllm:num_requests_running{{engine="{i}"}} 1\n' for i in range(3)))
    words = [files / "cluster.yaml", "--log", files / "log.jsonl", "--quick", "--gauges", gauges]
    words += ["--slo-tpot-ms", 60, "--slo-ttft-ms", 5000]
    page = plan(*words, "--html", files / "page.html")
    assert page.exit_code == 0, page.output
    lines = page.stdout.splitlines()
    assert len(lines) <= 25 and max(map(len, lines)) <= 120, page.stdout
    assert "log.jsonl: 400 requests, 25.1/s (read timestamp (ms), input_length" in lines[0]
    assert (
        sum(line.startswith(("DP, ", "static CP of 4 ", "CP by request ")) for line in lines) == 5
    )
    assert "Measured at 1 moments of 3 ranks: rows 1 a rank, 0% more" in " ".join(lines)
    html = (files / "page.html").read_text()
    assert html.count("data:image/png;base64,") == 6 and "CP by request" in html
    assert 'src="http' not in html and "href=" not in html
    values = json.loads(plan(*words, "--json").stdout)
    assert values["verdict"] in set(LoadVerdict) and values["gauges"]["num_ranks"] == 3
    assert values["ways"]["cost_aware"]["rate_per_s"] == 40 and values["skipped"] == 0
    assert values["gain"] == pytest.approx(4 / 3, abs=1e-4)


def test_a_cluster_need_not_hold_what_the_log_does_not_have(files, rates):
    """A node of 8 H200 has no room for a million tokens, and this log has 200,000 at most."""
    alone = plan("h200x32-deepseek-v3", "--instances", 8)
    assert alone.exit_code == 2 and "can never run" in alone.stderr
    words = ["h200x32-deepseek-v3", "--instances", 8, "--log", files / "log.jsonl", "--quick"]
    found = plan(*words, "--rate", 1, "--json")
    assert found.exit_code == 0, found.output


def test_a_cluster_says_what_it_holds(files):
    page = plan("h200x32-deepseek-v3", "--instances", 16)
    assert page.exit_code == 0 and "16 x H200 of 141 GB, 126.9 of them usable" in page.output
    assert "KV: 648,640 tokens" in page.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["h200x32-deepseek-v3", "--rate", 3], "--log is missing"),
        (["h200x32-deepseek-v3", "--json"], "--log is missing"),
        (["h200x32-deepseek-v3", "--log", "/none"], "/none cannot be read"),
        (["cluster.yaml", "--log", "log.jsonl", "--set", "constants=x"], "constants is 'x'"),
        (["cluster.yaml", "--log", "log.jsonl", "--fields", "when=x"], "a log has no when"),
        (["cluster.yaml", "--log", "log.jsonl", "--slo-tpot-ms", 0], "--slo-tpot-ms is 0"),
        (["cluster.yaml", "--log", "log.jsonl", "--slo-ttft-ms", "nan"], "--slo-ttft-ms is nan"),
        (["cluster.yaml", "--log", "log.jsonl", "--rate", -1], "give --rate from 0.05"),
        (["cluster.yaml", "--log", "log.jsonl", "--set", "lanes=on"], "no other hardware"),
        (["cluster.yaml", "--set", "dtype=float32"], "says what it runs on"),
        (["cluster.yaml", "--log", "log.jsonl", "--gauges", "log.jsonl"], "neither what /metrics"),
        (["h200x32-deepseek-v3", "--gauges", "log.jsonl"], "neither what /metrics answers nor"),
    ],
)
def test_what_cannot_be_planned_is_answered_in_a_sentence(files, monkeypatch, arguments, named):
    monkeypatch.chdir(files)
    result = plan(*arguments)
    assert result.exit_code == 2 and named in result.stderr, result.output


def test_a_folder_has_the_costs_of_its_model_or_is_told_which_there_are(files, tmp_path):
    tiny = {"num_hidden_layers": 61, "hidden_size": 64, "architectures": ["LlamaForCausalLM"]}
    tiny |= {"num_key_value_heads": 4, "max_position_embeddings": 512, "model_type": "llama"}
    tiny |= {"num_attention_heads": 4, "vocab_size": 100, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(tiny | {"rms_norm_eps": 1e-6}))
    result = plan(tmp_path, "--log", files / "log.jsonl", "--device", "h200")
    assert result.exit_code == 2
    assert "the costs of this model on --device h200 are not known" in result.stderr, result.output


def test_too_few_requests_are_refused_at_once(files, monkeypatch):
    monkeypatch.setattr("nanocp.simulator.trial.Trial.play", None)
    (files / "few.jsonl").write_text("".join(LINE % (40 * i, 700) for i in range(99)))
    result = plan(files / "cluster.yaml", "--log", files / "few.jsonl", "--quick")
    assert result.exit_code == 2
    assert "the log has 99 requests; at least 100 are needed" in result.stderr


def test_quickly_the_others_of_todays_ways_are_tried_above_the_best_only(files, monkeypatch):
    tried = []

    def sweep(trial, least_rate, **_):
        tried.append((trial.policy, trial.workload.rate_per_s, least_rate))
        rate = {"cost_aware": 40.0, "round_robin": 30.0}.get(trial.policy, 0.0)
        return Sweep((Sustained(rate, None, 1),))

    monkeypatch.setattr("nanocp.simulator.analyser.analysis.sweep", sweep)
    trial, log = trial_of(files)
    found = analyse(trial, log.requests, is_quick=True)
    of = {policy: (near, least) for policy, near, least in tried}
    assert of["least_batch"] == (40, pytest.approx(4)) and of["round_robin"][0] == 40
    assert of["least_cache"] == (31.5, 31.5) == of["uniform_cp:4"] and of["fluid"][0] == 40
    assert {way.policy: way.least_per_s for way in found.ways}["least_cache"] == 31.5
    assert _rate(found.ways[2]) == "< 31.5" and _rate(found.ways[1]) == "30"
    assert _rate(replace(found.ours, rate_per_s=4090.0)) == ">= 4,090"
