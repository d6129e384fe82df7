"""Cluster files: those that ship are sound; what is wrong in one is named."""

import pytest
import yaml

from nanocp.simulator.cluster_file import SHIPPED, load_cluster_file, shipped_names


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_clusters_load_and_their_memory_fits_the_card(name):
    file = load_cluster_file(name)
    assert set(file.costs) == {"fitted", "peak"}
    frame_bytes = 64 * file.model.kv_bytes_per_token
    assert 60e9 < file.cluster.num_frames * frame_bytes < 141e9 * 0.9


def edited(tmp_path, edit):
    tree = yaml.safe_load((SHIPPED / "h200x32-deepseek-v3.yaml").read_text())
    edit(tree)
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda tree: tree.update(row_bucket=[1]), r"row_bucket is no key .*nearest: row_buckets"),
        (
            lambda tree: tree["cluster"].update(num_instance=1),
            r"cluster\.num_instance is no key .*nearest: num_instances",
        ),
        (
            lambda tree: tree["costs"]["peak"].update(step=1),
            r"costs\.peak\.step is no key .*nearest: step_us",
        ),
        (lambda tree: tree["costs"]["peak"].update(step_us=-1.0), "step_us is -1"),
        (
            lambda tree: tree["costs"]["peak"].update(exchange_gb_per_s_within_node=0.0),
            "within_node is 0",
        ),
        (
            lambda tree: tree["costs"]["peak"].update(dispatch_combine_us_at_128_rows=[]),
            r"EP sizes \[\]",
        ),
        (lambda tree: tree.update(costs={}), "costs is empty"),
        (lambda tree: tree["cluster"].update(num_instances="many"), r"cluster\.num_instances"),
        (lambda tree: tree["cluster"].update(num_frames=0), "num_frames is 0"),
        (lambda tree: tree.update(cp_degrees=[1, 64]), "from 1 to num_instances"),
        (lambda tree: tree.update(ingest_gb_per_s=0.0), "ingest_gb_per_s is 0"),
        (lambda tree: tree.update(row_buckets=[8, 4]), "ascending"),
        (lambda tree: tree.update(row_buckets=[8]), "hold max_rows"),
        (lambda tree: tree["model"].update(num_moe_layers=99), "num_moe_layers 99"),
        (lambda tree: tree.pop("model"), "model is missing"),
        (lambda tree: tree.update(model=7), "model is 7; it must be a mapping of keys"),
        (
            lambda tree: tree["cluster"].update(num_frames=1.5),
            r"cluster\.num_frames is 1\.5; it must be a valid integer",
        ),
        (
            lambda tree: tree["cluster"].update(num_frames=100),
            r"max_model_len \(1048576\) can never run: .* hold 3200",
        ),
        (
            lambda tree: tree["cluster"].update(max_model_len=1),
            r"max_model_len \(1\) can never run",
        ),
        (lambda tree: tree["cluster"]["bounds"].update(max_attention_rows=3), "at least max_rows"),
        (
            lambda tree: tree["costs"]["peak"].update(attention_us=float("nan")),
            "attention_us is nan",
        ),
        (
            lambda tree: tree["costs"]["peak"].update(step_us=float("inf")),
            "step_us is inf; it must be a finite number",
        ),
        (
            lambda tree: tree["costs"]["peak"].update(
                dispatch_combine_us_at_128_rows=[[8, 1.0], [16, -1.0]]
            ),
            "of EP size 16 is -1",
        ),
        (lambda tree: tree.update(ingest_gb_per_s=float("nan")), "ingest_gb_per_s is nan"),
        (lambda tree: tree.update(cp_degrees=[4, 1]), "cp_degrees is .* ascending"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, edit, named):
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
    with pytest.raises(ValueError, match="nearest: fitted"):
        load_cluster_file("h200x32-deepseek-v3").costs_of("fited")
