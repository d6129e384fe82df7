"""`nanocp plan` and `nanocp serve` ask the same of a model, and take the same defaults."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.exact.settings import configured
from nanocp.cli.main import app
from nanocp.cli.plan.memory import DEVICES, DeviceName, Hardware, report_folder
from nanocp.config.cluster import ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.file import load_config
from nanocp.config.whole import Config
from nanocp.serve.served import open_checkpoint, with_model_len

MODELS = Path(__file__).parents[2] / "data_plane/model"
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}
OLD, NEW = {"type": "yarn"}, {"rope_type": "yarn", "rope_theta": 1e6}


def model(tmp_path, name="shapes/qwen3-8b", **changes):
    fields = json.loads((MODELS / f"{name}.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path


def limits(folder, max_model_len):
    config = Config(cluster=ClusterConfig(max_model_len=max_model_len))
    return open_checkpoint(config, folder).limits


@pytest.mark.parametrize(("changes", "longest"), [
    ({"rope_scaling": YARN | OLD}, 4096),
    ({"rope_scaling": None, "rope_parameters": YARN | NEW}, 4096),
    ({"rope_scaling": YARN | {"rope_type": "yarn", "factor": 1.5}}, 1536),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, 2048),
    ({"rope_scaling": YARN | OLD, "max_position_embeddings": 4096}, 4096),
    ({"rope_scaling": YARN | OLD, "max_position_embeddings": 5000}, 5000),
    ({"rope_scaling": None}, 1024),
    ({"rope_scaling": YARN | {"rope_type": "llama3"}}, 1024),
])  # fmt: skip
def test_a_length_is_taken_as_far_as_the_embedding_is_stretched(tmp_path, changes, longest):
    folder = model(tmp_path, **({"max_position_embeddings": 1024} | changes))
    for asked in (500, longest):
        assert limits(folder, asked).max_model_len == asked
    sentence = f"cluster.max_model_len is {longest + 1}; the model takes at most {longest} tokens"
    with pytest.raises(ValueError, match=f"{sentence} .max_position_embeddings is"):
        limits(folder, longest + 1)


def test_a_length_that_nobody_gave_is_the_models_own(tmp_path):
    """vLLM 0.32.0: with yarn max_position_embeddings counts as stretched already."""
    folder = model(tmp_path, rope_scaling=YARN | OLD, max_position_embeddings=1024)
    assert with_model_len(Config(), folder).cluster.max_model_len == 1024
    folder = model(tmp_path, max_position_embeddings=40960)
    assert with_model_len(Config(), folder).cluster.max_model_len == 8192


def test_serve_refuses_a_length_that_was_given_and_not_its_default(tmp_path):
    folder = model(tmp_path, max_position_embeddings=1024, vocab_size=600, eos_token_id=1)
    asked = ["serve", str(folder), "--no-ray", "--max-model-len", "8192"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2
    assert "cluster.max_model_len is 8192; the model takes at most 1024 tokens" in result.stderr


@pytest.mark.parametrize(("name", "hardware", "sentence"), [
    ("shapes/mixtral-8x7b", Hardware(32, DeviceName("h200")), "has 8 experts; there may be as"),
    ("shapes/qwen3.5-397b", Hardware(8, layout="pipeline"), "linear attention layers, and "),
    ("published/deepseek-v3", Hardware(70, layout="pipeline"), "num_layers is 61"),
    ("shapes/qwen3-8b", Hardware(2, DeviceName("h100"), kv_dtype="fp8"), "model has K/V heads"),
])  # fmt: skip
def test_plan_refuses_what_serve_refuses(tmp_path, name, hardware, sentence):
    folder = model(tmp_path, name)
    with pytest.raises(ValueError, match=sentence):
        report_folder(folder, hardware)
    with pytest.raises(ValueError, match=sentence):
        open_checkpoint(hardware.config(), folder)


@pytest.mark.parametrize("device", DEVICES)
def test_plan_counts_the_dtype_that_serve_takes(device):
    config = Hardware(device=DeviceName(device)).config()
    flags = {"data_plane.device": config.data_plane.device}
    assert load_config(None, flags, {}).data_plane.dtype == config.data_plane.dtype
    given = flags | {"data_plane.dtype": "float32"}
    assert load_config(None, given, {}).data_plane.dtype == "float32"


def test_a_longest_request_that_the_cluster_cannot_hold_is_said_as_it_is(tmp_path, capsys):
    folder = model(tmp_path, "published/deepseek-v3", max_position_embeddings=10**7)
    report_folder(folder, Hardware(32, DeviceName("h100")))
    assert "such a request needs" in (shown := capsys.readouterr().out)
    assert "instances, and there are 32." in shown


def test_limits_of_activations_are_refused_on_gpus_by_name(tmp_path):
    folder = Path(tmp_path)
    fields = json.loads((MODELS / "published/ling-3.0-flash.json").read_text())
    fields["expert_swiglu_limit_list"] = [0] * 41 + [4.0]
    (folder / "config.json").write_text(json.dumps(fields))
    assert report_folder(folder, Hardware(2, memory_gb=600.0))
    with pytest.raises(ValueError, match="expert_swiglu_limit_list has limits of activations, whi"):
        report_folder(folder, Hardware(32, DeviceName("h200")))
    on_gpus = Config(data_plane=DataPlaneConfig(device="cuda"))
    with pytest.raises(ValueError, match="device must be cpu"):
        open_checkpoint(on_gpus, folder)


@pytest.mark.parametrize(("name", "settings", "sentence"), [
    ("shapes/qwen3-8b", {}, "cluster.expert_load_mb_per_s is 100, and the model is dense"),
    ("published/deepseek-v3", {"recovery_timeout_ms": 0}, "100, and the service ends with the f"),
    ("published/deepseek-v3", {"page_backend": "nixl"}, "100, and the service ends with the first"),
])  # fmt: skip
def test_experts_that_cannot_move_are_refused_where_they_are_to(tmp_path, name, settings, sentence):
    moving = {"redundant_experts": 1, "expert_load_mb_per_s": 100}
    with pytest.raises(ValueError, match=sentence):
        open_checkpoint(configured(**moving, **settings), model(tmp_path, name))


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"redundant_experts": 0}, "which takes redundant_experts of at least 1 and two instances"),
    ({"num_instances": 1}, "which takes redundant_experts of at least 1 and two instances or"),
    ({"layout": "pipeline"}, "expert_load_mb_per_s: a stage of a pipeline has all experts"),
])  # fmt: skip
def test_experts_without_room_or_a_second_place_are_refused_by_name(settings, sentence):
    given = {"redundant_experts": 1, "expert_load_mb_per_s": 100} | settings
    flags = {f"cluster.{name}": value for name, value in given.items()}
    with pytest.raises(ValueError, match=f"in section cluster: .*{sentence}"):
        load_config(None, flags, {})
