"""`nanocp overlap` from the command line."""

import json

import yaml
from typer.testing import CliRunner

from data_plane.profiling.cluster import LaneTimes
from nanocp.cli.main import app
from nanocp.cli.overlap.show import reason
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.simulator.fit.lanes import measure_lane_table, with_lane_table


def nanocp(*arguments):
    return CliRunner().invoke(app, ["overlap", *arguments])


def test_the_papers_numbers_are_printed_beside_ours_and_hold():
    result = nanocp("model", "--paper")
    assert result.exit_code == 0, result.output
    for title in ("Table 1", "Table 2", "Optimal throughput", "Ablation"):
        assert title in result.output
    assert "numbers that are judged are the paper's" in result.output


def test_another_machine_is_said_to_be_bound_by_something():
    alone = ("model", "--gpu", "H200", "--model", "LLaMA-3 8B", "--set")
    result = nanocp(*alone, "gpus=1", "--set", "batch=512")
    assert result.exit_code == 0 and "memory-bound" in result.output, result.output
    result = nanocp(*alone, "gpus=2", "--set", "prompt=2048", "--set", "output=64")
    assert result.exit_code == 0 and "compute-bound" in result.output, result.output


def test_a_case_whose_kv_does_not_fit_is_refused_with_both_sizes():
    """The larger column decides: memory needs 43.2 ms, compute 29.8."""
    result = nanocp("model", "--gpu", "H200", "--model", "LLaMA-3 8B", "--set", "gpus=1")
    assert result.exit_code == 1, result.output
    said = " ".join(result.output.split())
    assert "memory-bound" in said and "compute-bound" not in said
    assert "Does not fit: KV of 183 GB, where the weights leave 80 GB of 1 H200" in said


def test_what_is_not_known_is_a_sentence():
    result = nanocp("model", "--gpu", "H20000")
    assert result.exit_code == 2 and "is not known; it must be one of" in result.output
    result = nanocp("search")
    assert result.exit_code == 2 and "--paper, --model and" in result.output
    result = nanocp("search", "--cluster", "h20000")
    assert result.exit_code == 2 and "h20000" in result.output


def test_a_search_prints_its_bound_and_writes_its_schedule(tmp_path):
    path = tmp_path / "schedule.yaml"
    result = nanocp("search", "--paper", "--seconds", "6", "--out", str(path))
    assert result.exit_code == 0, result.output
    assert "fluid bound" in result.output and "of what any schedule could reach" in result.output
    assert len(yaml.safe_load(path.read_text())["nano_operations"]) >= 18


def test_a_dense_model_is_searched_by_its_data_sheet():
    result = nanocp("search", "--model", "LLaMA-3 8B", "--set", "gpus=2", "--seconds", "1")
    assert result.exit_code == 0 and "LLaMA-3 8B, 2,048 tokens, 2 H200" in result.output


def test_a_clusters_schedule_is_simulated(tmp_path):
    path, cluster = tmp_path / "schedule.yaml", "h200x32-deepseek-v3"
    result = nanocp("search", "--cluster", cluster, "--seconds", "1", "--out", str(path))
    assert result.exit_code == 0 and "paper measured on an A100" in result.output, result.output
    words = ["--workload", "fixed:1000:4", "--seconds", "0.5", "--warm-up", "0", "--json"]
    words += ["--set"]
    result = CliRunner().invoke(app, ["simulate", *words, f"schedule={path}"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["cost_aware"]["scheduled_share"] >= 0
    result = CliRunner().invoke(app, ["simulate", *words, f"schedule={path}", "--set", "lanes=on"])
    assert result.exit_code != 0 and "two orders of a layer" in result.output


def test_show_says_why_a_window_runs_in_one_lane(tmp_path):
    assert "every window runs in one lane" in nanocp("show").output
    path, profile = tmp_path / "serve.yaml", tmp_path / "profile.yaml"
    table = ((4, 0, 131), (8, 0, 98), (16, 0, 80))
    profile.write_text(yaml.safe_dump({"scheduler": {"lane_table": list(map(list, table))}}))
    path.write_text(f"scheduler: {{lanes: measured, profile: {profile}}}")
    result = nanocp("show", "--config", str(path))
    assert result.exit_code == 0 and "0.80" in result.output, result.output
    reasons = [reason(SchedulerConfig(), percent) for _, _, percent in table]
    assert "cost 31%" in reasons[0] and "less than lane_gain_percent (3)" in reasons[1]
    assert reasons[2] == "two lanes save 20%"
    path.write_text("scheduler: {lanes: measured}")
    result = nanocp("show", "--config", str(path))
    assert result.exit_code == 2 and "nanocp profile --overlap" in result.output


def test_a_profile_of_lanes_is_a_table_by_rows_and_links():
    cluster = ClusterConfig(num_instances=2)
    table = measure_lane_table(cluster, lambda batch: LaneTimes(100.0, 80.0 + len(batch)))
    assert (4, 0, 88) in table and (4, 4, 88) in table and (16, 16, 112) in table
    scheduler = with_lane_table(SchedulerConfig(), table)
    assert scheduler.lanes_pay(4, 0) and not scheduler.lanes_pay(16, 16)


def test_a_profile_in_which_two_lanes_pay_nowhere_has_one_and_says_why(tmp_path):
    table = ((4, 0, 131), (8, 0, 98))
    scheduler = with_lane_table(SchedulerConfig(), table)
    assert (scheduler.lanes, scheduler.lane_table) == ("off", table)
    path, profile = tmp_path / "serve.yaml", tmp_path / "profile.yaml"
    profile.write_text(yaml.safe_dump({"scheduler": {"lane_table": list(map(list, table))}}))
    path.write_text(f"scheduler: {{lanes: '{scheduler.lanes}', profile: {profile}}}")
    result = nanocp("show", "--config", str(path))
    assert "every window runs in one lane" in result.output and "cost 31%" in result.output
