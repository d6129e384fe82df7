"""`nanocp profile`: the degree table, the fit, and files that `serve` and `simulate` read."""

import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_plane.model.config import ModelConfig
from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.profiling.batch import linked_batches, local_batches
from data_plane.profiling.phase_clock import PhaseTimes
from harness.programs.command_line import nanocp
from nanocp.config.cluster import ClusterConfig
from nanocp.config.cost import CostConfig
from nanocp.config.file import doubts_in, load_config
from nanocp.config.whole import Config
from nanocp.config.yaml import changed
from nanocp.serve.served import check_model
from nanocp.simulator.costs.cluster_file import Costs, WireForm, load_cluster_file
from nanocp.simulator.costs.cost import CostModel
from nanocp.simulator.fit.fit import (
    CONSTANTS,
    Fit,
    Point,
    as_measured,
    cluster_yaml,
    degree_table,
    doubts,
    fit,
    fit_cluster,
    loads_of,
    profile_yaml,
    serve_yaml,
)
from nanocp.simulator.fit.lanes import lane_batches

NUM_INSTANCES = 4
PLANTED = Costs(
    attention_us=11.0, attention_ps_per_token=70_000.0, attention_ns_per_row=9000.0,
    exchange_us=400.0, exchange_gb_per_s_within_node=0.1, exchange_gb_per_s_between_nodes=0.1,
    exchange_us_between_nodes=0.0, dispatch_combine_us=300.0,
    dispatch_combine_us_at_128_rows=((NUM_INSTANCES, 300.0 + 128 * 5),), weights_gb_per_s=1.0,
    gemm_tflops=1.0, other_us=500.0, other_ns_per_row=20_000.0, step_us=900.0,
)  # fmt: skip
SITE = {"device": "cpu", "model": "any"}
SWEEP = {1024: {1: 100.0, 2: 150.0}, 2048: {1: 200.0, 2: 190.0}}


def test_the_degree_of_a_length_is_the_one_of_least_attention_and_exchange():
    sweep = {
        512: {1: 50.0, 2: 90.0, 4: 95.0},
        1024: {1: 100.0, 2: 115.0, 4: 110.0},
        2048: {1: 200.0, 2: 165.0, 4: 170.0},
        4096: {1: 400.0, 2: 265.0, 4: 250.0},
    }
    assert degree_table(sweep) == (((2048, 1), (4096, 2)), 4)


def test_noise_makes_no_islands_in_the_degree_table():
    better_at_1 = {1: 1.0, 2: 2.0}
    better_at_2 = {1: 2.0, 2: 1.0}
    sweep = {
        512: better_at_1, 1024: better_at_2, 2048: better_at_1, 4096: better_at_2,
        8192: better_at_2,
    }  # fmt: skip
    assert degree_table(sweep) == (((4096, 1),), 2)
    assert degree_table({512: better_at_1, 1024: better_at_1}) == ((), 1)
    assert degree_table({512: {1: 1.0, 2: 1.0}}) == ((), 1)


@given(st.integers(1, 1000), st.integers(0, 1000), st.integers(0, 1000))
def test_a_fit_recovers_what_was_planted(constant, per_token, per_row):
    loads = [(1, tokens, rows) for tokens in (1, 10, 100) for rows in (1, 4, 16)]
    found = fit(
        loads, [constant + per_token * tokens + per_row * rows for _, tokens, rows in loads]
    )
    assert found.coefficients == pytest.approx(
        (constant, per_token, per_row), rel=1e-6, abs=1e-6 * 1000
    )
    assert abs(found.worst) < 1e-6


def test_a_fit_has_no_negative_coefficient_and_says_how_far_it_is():
    found = fit([(1, 1), (1, 2), (1, 4)], [30.0, 20.0, 10.0])
    assert min(found.coefficients) >= 0
    assert found.coefficients[1] == 0
    assert abs(found.worst) == max(map(abs, found.errors)) > found.median > 0


@pytest.fixture(scope="module")
def planted(tiny_checkpoint):
    """A cluster of planted costs whose steps were measured without any noise."""
    config = Config(cluster=ClusterConfig(num_instances=NUM_INSTANCES))
    model = ModelConfig.from_folder(tiny_checkpoint)
    h200 = load_cluster_file("h200x32-deepseek-v3")
    file = replace(
        h200, model=replace(h200.model, wire_forms={"latent": WireForm(2464)}),
        cluster=config.cluster, costs={CONSTANTS: PLANTED}, cp_degrees=(1,), memory=None,
    )  # fmt: skip
    cost = CostModel(file, CONSTANTS)

    def times(batch):
        loads = loads_of(batch, NUM_INSTANCES)
        rows = loads.rows[0]
        return PhaseTimes(
            cost.attention_us(loads.kv_tokens[0], loads.attention_rows[0]),
            cost.exchange_us(loads.links[0], 0, 0),
            PLANTED.other_us + PLANTED.other_ns_per_row * rows / 1e3,
            cost.dispatch_combine_us(rows),
            200.0 + 40.0 * rows,
            PLANTED.step_us,
        )

    batches = [
        *local_batches(NUM_INSTANCES, 64, 8192),
        *linked_batches(NUM_INSTANCES, config.cluster.bounds, 8192),
    ]
    points = [Point(batch, times(batch)) for batch in batches]
    return config, fit_cluster(config.cluster, config.data_plane, model, [1, 2], points, 5.0)


def test_the_planted_costs_of_a_cluster_come_back(planted):
    _, fitted = planted
    found = fitted.file.costs_of(CONSTANTS)
    for name in PLANTED.__slots__:
        if name in ("weights_gb_per_s", "gemm_tflops"):
            continue  # of the experts of another model: the microseconds below are what was planted
        # Written with four digits.
        assert np.allclose(getattr(found, name), getattr(PLANTED, name), rtol=2e-3), name
    for rows in (0, 10, 100):
        assert fitted.file.layer_expert_us(found, rows) == pytest.approx(200 + 40 * rows, rel=2e-3)
    assert all(abs(fit.worst) < 2e-3 for fit in fitted.fits.values())


def test_a_dense_model_is_fitted_without_experts(tmp_path):
    make_checkpoint(tmp_path / "dense", "tiny-llama")
    config = Config(cluster=ClusterConfig(num_instances=2))
    batches = [*local_batches(2, 64, 4096), *linked_batches(2, config.cluster.bounds, 4096)]
    times = PhaseTimes(10.0, 20.0, 30.0, 0.0, 0.0, 40.0)
    model = ModelConfig.from_folder(tmp_path / "dense")
    points = [Point(batch, times) for batch in batches]
    fitted = fit_cluster(config.cluster, config.data_plane, model, [1, 2], points, 5.0)
    assert (fitted.file.model.num_moe_layers, fitted.file.model.num_experts) == (0, 0)
    assert not {"experts", "dispatch + combine"} & set(fitted.fits)
    (tmp_path / "cluster.yaml").write_text(cluster_yaml(fitted, []))
    read = load_cluster_file(str(tmp_path / "cluster.yaml"))
    step = CostModel(read, CONSTANTS).step(loads_of(batches[0], 2))
    assert step.layer.expert_us == step.layer.dispatch_combine_us == 0


def test_serve_and_simulate_read_what_is_written(planted, tmp_path):
    config, fitted = planted
    config = replace(config, prefill=replace(config.prefill, chunk_tokens=100))
    profile = tmp_path / "profile.yaml"
    measured, about = as_measured(config.scheduler, fitted, SWEEP), ["about the machine"]
    profile.write_text(profile_yaml(measured, SITE, about))
    written = serve_yaml(changed(config), profile, about)
    (tmp_path / "serve.yaml").write_text(written)
    (tmp_path / "cluster.yaml").write_text(cluster_yaml(fitted, ["about the machine"]))
    assert (tmp_path / "serve.yaml").read_text().startswith("# about the machine\n")
    read = load_config(tmp_path / "serve.yaml", {}, {})
    assert (read.scheduler.cp_degree_buckets, read.scheduler.cp_degree_max) == (((2048, 1),), 2)
    # One machine has no links to another node.
    assert read.scheduler.costs.link_tokens_between_nodes == CostConfig().link_tokens_between_nodes
    # 400 us of exchange are 400 / 0.07 tokens of attention.
    assert read.scheduler.costs.exchange_tokens == pytest.approx(400 / 0.07, rel=1e-3)
    assert (read.cluster, read.prefill, read.limits) == (
        config.cluster,
        config.prefill,
        config.limits,
    )
    assert load_cluster_file(str(tmp_path / "cluster.yaml")) == fitted.file


def test_a_profile_of_this_machine_is_served_and_simulated_from(tiny_checkpoint, tmp_path):
    given_file = tmp_path / "given.yaml"
    given_file.write_text("cluster: {num_instances: 2}\nprefill: {chunk_tokens: 100}\n")
    out = tmp_path / "profile"
    words = ("--quick", "--set", "max_len=1024", "--config", given_file)
    result = nanocp("profile", tiny_checkpoint, *words, "--out", out)
    assert result.exit_code == 0, result.output
    for words in ("degree 2", "cost model against the measured steps", "the whole step"):
        assert words in result.stdout
    config = load_config(out / "serve.yaml", {}, {})
    assert (config.cluster.num_instances, config.prefill.chunk_tokens) == (2, 100)
    assert config.scheduler.cp_degree_max in (1, 2) and config.scheduler.costs != CostConfig()
    simulated = nanocp(
        *("simulate", "--cluster", out / "cluster.yaml", "--workload", "issue-0", "--rate", 2,
          "--slo-tpot-ms", 1000, "--slo-ttft-ms", 10_000),
        *("--seconds", 60, "--set", "warm_up=1", "--json"),
    )  # fmt: skip
    # Two requests a second are more than the tiny cluster holds: its queue may drift (1).
    assert simulated.exit_code in (0, 1), simulated.output
    assert json.loads(simulated.stdout)["cost_aware"]["step_ms_mean"] > 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--instances", "0"], "num_instances is 0; it must be at least 1"),
        (["--instances", "1"], "instances is 1; it must be at least 2"),
        (
            ["--instances", "2", "--set", "degree=4"],
            "degree is 4; it must be from 1 to the number of instances (2)",
        ),
        (["--set", "degree=0"], "degree is 0; it must be"),
        (["--set", "max_len=0"], "max_len is 0; it must be at least 512"),
        (["--set", "max_len=1000000000"], "choose a smaller max_len"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml does not exist"),
        (["--out", "/proc/version"], "/proc/version cannot be a folder"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_named(arguments, named, tiny_checkpoint, tmp_path):
    result = nanocp("profile", tiny_checkpoint, "--out", tmp_path, *arguments)
    assert result.exit_code == 2
    assert named in result.stderr and "Traceback" not in result.stderr


def test_the_missing_extra_of_a_search_is_named_first(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "nanocp.overlap.search", raising=False)
    monkeypatch.setitem(sys.modules, "highspy", None)
    result = nanocp("profile", tiny_checkpoint, "--overlap", "--out", tmp_path / "out")
    assert result.exit_code == 2 and not (tmp_path / "out").exists()
    assert "highspy is not installed; pip install '.[search]' brings it" in result.stderr


def test_bounds_without_room_for_a_link_are_named(tiny_checkpoint, tmp_path):
    (tmp_path / "given.yaml").write_text(
        "cluster: {bounds: {max_rows: 1, max_attention_rows: 1}}\n"
    )
    result = nanocp(
        "profile", tiny_checkpoint, "--out", tmp_path, "--config", tmp_path / "given.yaml"
    )
    assert (
        result.exit_code == 2 and "max_attention_rows is 1; it must be at least 2" in result.stderr
    )


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        (["--overlap"], "data_plane.device is cuda; --overlap and scheduler.num_drafts need cpu"),
        (["--layout", "pipeline"], "data_plane.device is cuda: it must be cpu"),
    ],
)
def test_what_gpus_do_not_measure_is_refused(more, refused, tiny_checkpoint, tmp_path):
    given = tmp_path / "gpus.yaml"
    given.write_text("data_plane: {device: cuda}\n")
    out = tmp_path / "out"
    result = nanocp("profile", tiny_checkpoint, *more, "--config", given, "--out", out)
    assert result.exit_code == 2
    assert refused in result.stderr and not out.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_a_machine_without_a_gpu_says_so(tiny_checkpoint, tmp_path):
    given = tmp_path / "gpus.yaml"
    given.write_text("data_plane: {device: cuda}\n")
    result = nanocp("profile", tiny_checkpoint, "--config", given, "--out", tmp_path)
    assert result.exit_code == 2
    assert re.search(r"instance \d: device is cuda: ", result.stderr)
    assert not (tmp_path / "profile.yaml").exists()


def test_a_profile_of_another_model_is_refused_by_name(tiny_checkpoint, tmp_path):
    profile = tmp_path / "profile.yaml"
    profile.write_text("measured_on: {device: cpu, model: 61 layers of 7168}\nscheduler: {}\n")
    config = load_config(None, {"scheduler.profile": str(profile)}, {})
    own = ModelConfig.from_folder(tiny_checkpoint)
    with pytest.raises(ValueError, match=r"a model of 61 layers of 7168, and this one has 4 lay"):
        check_model(config, own, tiny_checkpoint)
    profile.write_text(f"measured_on: {{model: '{own.in_words}'}}\n")
    check_model(config, own, tiny_checkpoint)


def test_a_checkpoint_that_is_not_there_is_named(tmp_path):
    result = nanocp("profile", tmp_path / "none", "--out", tmp_path)
    assert result.exit_code == 2 and "config.json is missing" in result.stderr


@pytest.mark.system
def test_a_pipeline_is_profiled_and_serve_reads_what_it_costs(tiny_checkpoint, tmp_path):
    arguments = ("profile", tiny_checkpoint, "--layout", "pipeline", "--instances", "2")
    result = nanocp(*arguments, "--quick", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "paper" in result.output and "ours" in result.output
    config = load_config(tmp_path / "serve.yaml", {})
    assert config.cluster.layout == "pipeline" and config.pipeline.costs.num_experts == 16
    assert config.pipeline.costs != Config().pipeline.costs
    wrong = nanocp(*arguments, "--set", "degree=2", "--out", tmp_path)
    assert wrong.exit_code == 2


@pytest.mark.system
def test_two_lanes_are_profiled_and_shown(tiny_checkpoint, tmp_path):
    given_file, served = tmp_path / "given.yaml", tmp_path / "serve.yaml"
    bounds = "bounds: {max_rows: 8, max_attention_rows: 16}"
    given_file.write_text(f"cluster: {{num_instances: 2, {bounds}}}\n")
    arguments = ("--quick", "--overlap", "--set", "max_len=1024", "--config", given_file)
    result = nanocp("profile", tiny_checkpoint, *arguments, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    config = load_config(served, {}, {})
    scheduler, sizes = config.scheduler, {size[:2] for size in lane_batches(config.cluster)}
    assert {size[:2] for size in scheduler.lane_table} == sizes and len(sizes) > 1
    assert scheduler.lanes in ("off", "measured")
    shown = nanocp("overlap", "show", "--config", served)
    num_reasons = shown.output.count("two lanes cost") + shown.output.count("two lanes save")
    assert num_reasons == len(scheduler.lane_table), shown.output


@pytest.mark.parametrize(("errors", "is_doubted"), [
    ((0.0, 0.01, -0.05, 0.54), False),
    ((0.0, 0.01, -0.05, -0.87), True),
    ((0.3, -0.3, 0.25), True),
    ((), False),
])  # fmt: skip
def test_costs_of_a_busy_machine_say_so_in_the_files_and_at_the_start(
    planted, tmp_path, errors, is_doubted
):
    config, fitted = planted
    fitted = replace(fitted, fits={"attention": Fit((1.0,), errors)})
    said = doubts(fitted)
    assert len(said) == is_doubted
    path, profile = tmp_path / "serve.yaml", tmp_path / "profile.yaml"
    measured = as_measured(config.scheduler, fitted, SWEEP)
    profile.write_text(profile_yaml(measured, SITE, ["Measured here", *said]))
    served = changed(replace(config, scheduler=measured))
    path.write_text(serve_yaml(served, profile, []))
    assert load_config(path, {}, {}).scheduler.profile == str(profile)
    assert doubts_in(str(profile)) == said and doubts_in("") == []
    if is_doubted:
        assert said[0].startswith("Unreliable: attention of the fitted costs differ") and (
            "Profile again while nothing else runs here." in said[0]
        )
        found = nanocp("serve", tmp_path / "absent", "--config", path)
        assert f"{profile}: Unreliable: attention" in found.stderr
