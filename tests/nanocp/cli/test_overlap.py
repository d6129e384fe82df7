"""`nanocp overlap` from the command line."""

import json
import re
from functools import partial

import pytest
import yaml

from data_plane.profiling.cluster import LaneTimes
from harness.programs.command_line import nanocp
from nanocp.cli.overlap.show import reason
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.overlap.policies.registry import lane_policy
from nanocp.overlap.policies.scheduled import LANE_TAGS
from nanocp.simulator.fit.lanes import candidates, lane_batches, lane_point, with_lane_table

overlap = partial(nanocp, "overlap")


def test_the_papers_numbers_are_printed_beside_ours_and_hold():
    result = overlap("model", "--paper")
    assert result.exit_code == 0, result.output
    for title in ("Table 1", "Table 2", "Figure 2", "Figure 3", "Optimal throughput", "Ablation"):
        assert title in result.output
    assert "numbers that are judged are the paper's" in result.output


def test_another_machine_is_said_to_be_bound_by_something():
    alone = ("model", "--gpu", "H200", "--model", "LLaMA-3 8B", "--set")
    result = overlap(*alone, "gpus=1", "--set", "batch=512")
    assert result.exit_code == 0 and "memory-bound" in result.output, result.output
    assert "memory is 2.41 (equation 4, Figure 3)" in " ".join(result.output.split())
    result = overlap(*alone, "gpus=2", "--set", "prompt=2048", "--set", "output=64")
    assert result.exit_code == 0 and "compute-bound" in result.output, result.output


def test_a_case_whose_kv_does_not_fit_is_refused_with_both_sizes():
    """The larger column decides: memory needs 43.2 ms, compute 29.8."""
    result = overlap("model", "--gpu", "H200", "--model", "LLaMA-3 8B", "--set", "gpus=1")
    assert result.exit_code == 1, result.output
    said = " ".join(result.output.split())
    assert "memory-bound" in said and "compute-bound" not in said
    assert "Does not fit: KV of 183 GB, where the weights leave 80 GB of 1 H200" in said


def test_what_is_not_known_is_a_sentence():
    result = overlap("model", "--gpu", "H20000")
    assert result.exit_code == 2 and "is not known; it must be one of" in result.output
    result = overlap("search")
    assert result.exit_code == 2 and "--paper, --model and" in result.output
    result = overlap("search", "--cluster", "h20000")
    assert result.exit_code == 2 and "h20000" in result.output
    for policy, said in (
        ("Nanoflow", "sequential, single_batch_overlap, nanoflow, dual_batch_overlap (nearest: "),
        ("token_weave", "--policy token_weave needs a fused kernel, which no checkpoint brings"),
        ("nanoflow", "/nowhere has no config.json; nanocp make-checkpoint writes one"),
    ):
        result = overlap("run", "/nowhere", "--policy", policy)
        assert result.exit_code == 2 and said in result.output, result.output


def test_a_checkpoint_in_the_order_of_a_policy(tmp_path):
    """A batch of one row is no batch, and the node that says so is named."""
    checkpoint, path = tmp_path / "llama", tmp_path / "schedule.yaml"
    nanocp("make-checkpoint", str(checkpoint), "--preset", "tiny-llama")
    cluster = ("--cluster", "h200x32-deepseek-v3", "--seconds", "1", "--out")
    assert overlap("search", *cluster, str(path)).exit_code == 0
    for policy, rows, program_order in (
        ("dual_batch_overlap", 8, "nothing"),
        ("single_batch_overlap", 8, "all: the policy neither"),
        (path, 8, "nothing"), ("nanoflow", 1, "the graph runs in program order: no input has a"),
    ):  # fmt: skip
        words = ("--policy", str(policy), "--set", f"rows={rows}", "--set", "tokens=4")
        result = overlap("run", str(checkpoint), *words)
        assert result.exit_code == 0, result.output
        said = r"; cut: LlamaAttention, LlamaMLP\n.* equal in every bit\n.* ms, the model itself .*"
        assert re.search(
            rf"{said} bytes a forward\nin program order  {program_order}", result.output, re.S
        )


def test_a_search_prints_its_bound_and_writes_only_what_a_command_reads(tmp_path):
    result = overlap("search", "--paper", "--seconds", "6")
    assert result.exit_code == 0, result.output
    assert "fluid bound" in result.output and "of what any schedule could reach" in result.output
    result = overlap("search", "--paper", "--out", str(tmp_path / "schedule.yaml"))
    assert result.exit_code == 2 and "--out is for --cluster" in result.output


def test_a_dense_model_is_searched_by_its_data_sheet():
    result = overlap("search", "--model", "LLaMA-3 8B", "--set", "gpus=2", "--seconds", "1")
    assert result.exit_code == 0 and "LLaMA-3 8B, 2,048 tokens, 2 H200" in result.output


def test_a_clusters_schedule_is_simulated(tmp_path):
    path, cluster = tmp_path / "schedule.yaml", "h200x32-deepseek-v3"
    result = overlap("search", "--cluster", cluster, "--seconds", "1", "--out", str(path))
    assert result.exit_code == 0 and "paper measured on an A100 (Table 3)" in result.output, (
        result.output
    )
    words = ["--workload", "fixed:1000:4", "--seconds", "0.5", "--set", "warm_up=0", "--json"]
    words += ["--set"]
    result = nanocp("simulate", *words, f"schedule={path}")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["cost_aware"]["scheduled_share"] >= 0
    result = nanocp("simulate", *words, f"schedule={path}", "--set", "lanes=on")
    assert result.exit_code != 0 and "two orders of a layer" in result.output


def test_show_says_why_a_window_runs_in_one_lane(tmp_path):
    assert "every window runs in one lane" in overlap("show").output
    path, profile = tmp_path / "serve.yaml", tmp_path / "profile.yaml"
    order = "combine 0/500, attention 120/610, exchange 300/800, experts 450/950"
    table = ((4, 0, 131, "behind_first"), (8, 0, 98, "nanoflow"), (16, 0, 80, order))
    profile.write_text(yaml.safe_dump({"scheduler": {"lane_table": list(map(list, table))}}))
    path.write_text(f"scheduler: {{lanes: measured, profile: {profile}}}")
    result = overlap("show", "--config", str(path))
    assert result.exit_code == 0 and "0.80" in result.output, result.output
    assert "nanoflow" in result.output and "attention" in result.output
    reasons = [reason(SchedulerConfig(), percent) for _, _, percent, _ in table]
    assert "cost 31%" in reasons[0] and "less than lane_gain_percent (3)" in reasons[1]
    assert reasons[2] == "two lanes save 20%"
    assert with_lane_table(SchedulerConfig(), table[:2]).lanes == "off"
    path.write_text(f"scheduler: {{lanes: 'off', profile: {profile}}}")
    result = overlap("show", "--config", str(path))
    assert "every window runs in one lane" in result.output and "cost 31%" in result.output
    path.write_text("scheduler: {lanes: measured}")
    result = overlap("show", "--config", str(path))
    assert result.exit_code == 2 and "nanocp profile --overlap" in result.output


def test_a_profile_of_lanes_is_a_table_by_rows_and_links():
    cluster, orders = ClusterConfig(num_instances=2), ("behind_first", "nanoflow")
    table = tuple(
        lane_point(*size, [*map(LaneTimes, (100.0, 99.0, 80.0 + len(batch)))], orders)
        for *size, batch in lane_batches(cluster)
    )
    assert {(4, 0, 88, "nanoflow"), (4, 4, 88, "nanoflow")} < {*table}
    assert (16, 16, 99, "behind_first") in table
    scheduler = with_lane_table(SchedulerConfig(), table)
    assert scheduler.lane_order(4, 0) and not scheduler.lane_order(16, 16)


@pytest.mark.parametrize("is_late", [True, False])
def test_the_two_best_orders_found_by_a_search_are_measured(is_late):
    """Waits as long as compute let a search find one; without any, papers' policies are left."""
    parts = dict.fromkeys(LANE_TAGS, (100.0, is_late * 90.0))
    half = dict.fromkeys(LANE_TAGS, (50.0, is_late * 45.0))
    plain, *others = candidates(parts, half)
    assert plain == "behind_first" and len(others) == 2
    assert ("combine" in others[0]) == is_late
    assert all(map(lane_policy, others))
