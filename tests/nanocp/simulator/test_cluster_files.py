"""Cluster files: those that ship are sound; what is wrong in one is named."""

import pytest
import yaml

from nanocp.simulator.costs.cluster_file import SHIPPED, load_cluster_file, shipped_names
from nanocp.simulator.costs.cost import CostModel, Loads
from nanocp.simulator.loads.workload import Workload
from nanocp.simulator.trial import Trial


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_clusters_load_and_their_memory_fits_the_card(name):
    file = load_cluster_file(name)
    assert set(file.costs) - {"operators"} == {"fitted", "peak"}
    assert list(file.model.wire_forms) == ["latent", "absorbed"]
    kv_gb = file.cluster.num_frames * 64 * file.model.kv_bytes_per_token / 1e9
    assert 10 < kv_gb < file.memory.hbm_gb * 0.9 - file.memory.rest_gb


def test_frames_and_expert_time_follow_the_number_of_instances():
    files = {num: load_cluster_file("h200x32-deepseek-v3", num) for num in (16, 32, 64)}
    # 141 GB x 0.9, less 256 / 32 experts of 58 layers, 34.24 GB of other weights, graphs, regions.
    kv_gb = 126.9 - 8 * 58 * 0.04404 - 34.24 - 5.7 - 31 * 0.0339
    assert files[32].cluster.num_frames == int(kv_gb * 1e9 / (64 * 70272))
    frames = [file.cluster.num_frames for file in files.values()]
    assert frames == sorted(frames)
    read_us = [file.layer_expert_us(file.costs_of("peak"), 0) for file in files.values()]
    assert read_us == pytest.approx([16 * 9.175, 8 * 9.175, 4 * 9.175])
    row_us = files[32].layer_expert_us(files[32].costs_of("peak"), 1000) - read_us[1]
    assert row_us == pytest.approx(8 * 88.08 / 1300 * 1000)


def test_states_of_rows_take_memory_and_linear_layers_take_time_of_rows_alone():
    file = load_cluster_file("h200x32-qwen3.5-397b")
    # 141 GB x 0.9, less 512 / 32 experts of 60 layers, other weights, graphs, regions, and 128
    # states of rows with two to spare.
    kv_gb = 126.9 - 16 * 60 * 0.01258 - 19.6 - 5.7 - 31 * 0.0179 - 130 * 0.1986
    assert file.cluster.num_frames == int(kv_gb * 1e9 / (64 * 30720))
    model = CostModel(file, "peak")
    rows_8, rows_16, rows_16_long = (
        model.step(Loads([kv], [rows], [rows], [0], [0]))
        for kv, rows in ((0, 8), (0, 16), (64_000_000, 16))
    )
    # Every layer of all 60 has the weights' part of a row, 45 have its state.
    expert_us = rows_16.layer.expert_us - rows_8.layer.expert_us
    dispatch_us = rows_16.layer.dispatch_combine_us - rows_8.layer.dispatch_combine_us
    attention_us = rows_16.layer.attention_us - rows_8.layer.attention_us
    row_us = 8 * (60 * 0.394 + 45 * 2.15) + 60 * (expert_us + dispatch_us) + 15 * attention_us
    assert rows_16.step_us - rows_8.step_us == pytest.approx(row_us, abs=2)
    kv_us = 15 * 64_000_000 * 683e-6
    assert rows_16_long.step_us - rows_16.step_us == pytest.approx(kv_us, rel=0.01)


@pytest.mark.parametrize(
    "mechanism", [{"lanes": True}, {"host_pages": 8}], ids=["lanes", "host pages"]
)
def test_what_is_not_simulated_for_linear_attention_is_refused(mechanism):
    file = load_cluster_file("h200x32-qwen3.5-397b")
    workload = Workload("issue-1", 1.0, seed=1)
    trial = Trial(file=file, policy="dual_balanced", workload=workload, **mechanism)
    with pytest.raises(ValueError, match="45 layers are linear attention; lanes, schedules, "):
        trial.play()


def test_experts_need_not_divide_by_instances():
    even, uneven = (load_cluster_file("h200x32-deepseek-v3", num) for num in (32, 24))
    assert uneven.model.most_experts(24) == 11
    times_us = [file.layer_expert_us(file.costs_of("peak"), 0) for file in (even, uneven)]
    assert times_us[1] == pytest.approx(times_us[0] * 11 / 8)
    assert uneven.cluster.num_frames < even.cluster.num_frames


@pytest.mark.parametrize(("name", "num_instances", "named"), [
    ("h100x32-deepseek-v3", 8,
     "does not fit 8 H100: of 80 GB each, 72.0 are usable; 32 experts of 58 layers take "
     "81.7, other weights 34.2, graphs and buffers 5.9: 49.9 GB too many"),
    ("h200x32-deepseek-v3", 8, r"max_model_len \(1048576\) can never run"),
    ("h200x32-deepseek-v3", 264, r"256 experts; there may be as many .*, and not 264"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_sum(name, num_instances, named):
    with pytest.raises(ValueError, match=named):
        load_cluster_file(name, num_instances)


def test_without_a_memory_section_only_the_files_own_size_is_known(tmp_path):
    path = edited(tmp_path, without_memory)
    assert load_cluster_file(path).cluster.num_frames == 17_500
    with pytest.raises(ValueError, match=r"no memory section; .* frames of 64 instances"):
        load_cluster_file(path, 64)


def without_memory(tree):
    del tree["memory"]
    tree["cluster"]["num_frames"] = 17_500


def edited(tmp_path, edit):
    tree = yaml.safe_load((SHIPPED / "h200x32-deepseek-v3.yaml").read_text())
    edit(tree)
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


@pytest.mark.parametrize(("key", "value", "named"), [
    ("row_bucket", [1], r"row_bucket is no key .*nearest: row_buckets"),
    ("cluster.num_instance", 1, r"cluster\.num_instance is no key .*nearest: num_instances"),
    ("costs.peak.step", 1, r"costs\.peak\.step is no key .*nearest: step_us"),
    ("costs.peak.step_us", -1.0, "step_us is -1"),
    ("costs.peak.exchange_gb_per_s_within_node", 0.0, "within_node is 0"),
    ("costs.peak.dispatch_combine_us_at_128_rows", [], r"EP sizes \[\]"),
    ("costs", {}, "costs is empty"),
    ("cluster.num_instances", "many", r"cluster\.num_instances"),
    ("without memory: num_frames", 0, "num_frames is 0"),
    ("cluster.num_frames", 17_500, "num_frames is given beside memory"),
    ("memory.hbm", 80, r"memory\.hbm is no key .*nearest: hbm_gb"),
    ("memory.usable_share", 1.1, "usable_share is 1.1"),
    ("memory.rest_gb", -1.0, "rest_gb is -1"),
    ("model.num_experts", 0, "num_experts 0 .* all must be 0, for a"),
    ("model.num_moe_layers", 0, "num_moe_layers is 0, num_experts 256"),
    ("model.expert_mb", -1.0, "expert_mb is -1"),
    ("model.wire_forms", {}, "there are 0 wire_forms"),
    ("model.wire_forms.latent.bytes", 1, r"latent\.bytes is no key .*nearest: query_bytes"),
    ("model.wire_forms.latent.projection_mb", -1.0, "projection_mb is -1"),
    ("costs.peak.weights_gb_per_s", 0.0, "weights_gb_per_s is 0"),
    ("cp_degrees", [1, 64], "from 1 to num_instances"),
    ("ingest_gb_per_s", 0.0, "ingest_gb_per_s is 0"),
    ("ingest_tail_share", 0.0, "ingest_tail_share is 0.0"),
    ("prefill_gb_per_s", 0.0, "prefill_gb_per_s is 0.0"),
    ("ttft_targets", [[0, 5], [0, 9]], "one for a priority"),
    ("tpot_target_ms", -1, "tpot_target_ms is -1"),
    ("row_buckets", [8, 4], "ascending"),
    ("row_buckets", [8], "hold max_rows"),
    ("model.num_moe_layers", 99, "num_moe_layers is 99"),
    ("model", None, "model is missing"),
    ("model", 7, "model is 7; it must be a section of keys"),
    ("without memory: num_frames", 1.5, r"cluster\.num_frames is 1\.5; it must be a valid integer"),
    ("without memory: num_frames", 100, r"\(1048576\) can never run: .* hold 3200"),
    ("cluster.max_model_len", 1, r"max_model_len \(1\) can never run"),
    ("cluster.bounds.max_attention_rows", 3, "at least max_rows"),
    ("costs.peak.attention_us", float("nan"), "attention_us is nan"),
    ("costs.peak.step_us", float("inf"), "step_us is inf; it must be a finite number"),
    ("costs.peak.dispatch_combine_us_at_128_rows", [[8, 1.0], [16, -1.0]], "of EP size 16 is -1"),
    ("ingest_gb_per_s", float("nan"), "ingest_gb_per_s is nan"),
    ("cp_degrees", [4, 1], "cp_degrees is .* ascending"),
])  # fmt: skip
def test_what_is_wrong_is_named(tmp_path, key, value, named):
    def edit(tree):
        if key.startswith("without memory"):
            without_memory(tree)
        *sections, last = key.replace("without memory: ", "cluster.").split(".")
        for section in sections:
            tree = tree[section]
        tree[last] = value
        if value is None:
            del tree[last]

    with pytest.raises(ValueError, match=named):
        load_cluster_file(edited(tmp_path, edit))


def test_unknown_names_and_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="nearest: h200x32-kimi-k2"):
        load_cluster_file("h200-kimi-k2")
    with pytest.raises(ValueError, match="cannot be read"):
        load_cluster_file(str(tmp_path / "none.yaml"))
    for text, named in (
        ("", "the file is null"),
        ("[1]", "the file is"),
        ("a: [", "cannot be read"),
        ("\0", "cannot be"),
    ):
        (tmp_path / "broken.yaml").write_text(text)
        with pytest.raises(ValueError, match=named):
            load_cluster_file(str(tmp_path / "broken.yaml"))
    with pytest.raises(ValueError, match=r"wire form is 'latnt'; .*nearest: latent"):
        load_cluster_file("h200x32-deepseek-v3").model.wire_form("latnt")
    with pytest.raises(ValueError, match="nearest: fitted"):
        load_cluster_file("h200x32-deepseek-v3").costs_of("fited")
