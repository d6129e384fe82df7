"""`nanocp plan`: what a model needs is known before it is loaded, and so is what would help."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from data_plane.model.config import ModelConfig
from data_plane.model.linear import PlainPacking
from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.model.presets import PRESETS
from data_plane.model.sizes import page_bytes
from data_plane.model.stage_weights import StageWeights
from data_plane.model.weights import expert_range, load_weights
from data_plane.startup.memory_need import memory_need, prefill_bytes, stage_needs
from data_plane.startup.shared_parts import model_of
from harness.paths import ROOT
from harness.programs.command_line import nanocp
from nanocp.config.cluster import ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.pipeline import PipelineConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config

TALE = ROOT / "models/tale"
MODEL_TESTS = Path(__file__).parents[2] / "data_plane/model"


plan = partial(nanocp, "plan")


@pytest.fixture
def published(tmp_path):
    def folder(name):
        (tmp_path / name).mkdir()
        (path,) = MODEL_TESTS.glob(f"*/{name}.json")
        shutil.copy(path, tmp_path / name / "config.json")
        return tmp_path / name

    return folder


def test_a_model_that_fits_says_how_many_tokens_do(published):
    folder = published("qwen3-235b-a22b")
    result = plan(folder, "--instances", 8, "--device", "h200")
    assert result.exit_code == 0 and "It fits. KV: " in result.output, result.output
    result = plan(folder, "--instances", 32, "--device", "h200")
    assert "which exchange by exchange_backend nvshmem: it is experimental" in " ".join(
        result.output.split()
    )
    assert "128 experts, 8 a token, 64 heads, KV of 1024 elements" in result.output
    assert "experts          14.19 GB   4 of 128 in each layer" in result.output
    assert "A redundant slot for experts takes 3.55 GB of each instance;" in result.output
    assert "pages of 12.32 MB" in result.output  # 64 tokens of 188 KiB
    assert "471,936 tokens on one instance, 15,101,952 on all" in result.output
    assert "The folder has no weights yet" in result.output


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_two_lanes_need_twice_the_regions_and_leave_less_for_pages(published, device):
    words = (published("qwen3-235b-a22b"), "--instances", 8, "--device", device)
    words += ("--memory-gb", 141)
    one, two = plan(*words), plan(*words, "--set", "lanes=on")
    assert (one.exit_code, two.exit_code) == (0, 0), two.output

    def number(result, pattern):
        return float(re.search(pattern, result.output)[1].replace(",", ""))

    regions = r"exchange +(\S+) GB   regions for 7 peers"
    assert number(two, regions) == pytest.approx(2 * number(one, regions), abs=0.02)
    assert number(two, r"KV: (\S+) tokens") < number(one, r"KV: (\S+) tokens")
    assert "7 peers, of two lanes" in two.output and "two lanes" not in one.output
    refused = plan(words[0], "--set", "lanes=on", "--layout", "pipeline")
    assert refused.exit_code == 2 and "lanes" in refused.output


def test_what_does_not_fit_says_what_would(published):
    result = plan(published("qwen3-235b-a22b"), "--instances", 4, "--device", "h200")
    assert result.exit_code == 1
    assert "It does not fit: 8.4 GB too many on each instance." in result.output
    assert "would make it fit: 5 instances of this device, or 4 x b200." in result.output


def test_a_dense_model_does_not_shrink_with_more_instances(published):
    folder = published("llama-3.1-8b")
    small = plan(folder, "--instances", 2, "--device", "h100", "--memory-gb", 20)
    assert small.exit_code == 1 and "a larger device is needed" in small.output
    assert plan(folder, "--instances", 2, "--device", "h100").exit_code == 0


@pytest.mark.parametrize("field", ["torch_dtype", "dtype"])
def test_what_is_stored_in_bf16_stays_so_on_a_cpu(published, field):
    folder = published("llama-3.1-8b")
    fits = plan(folder, "--instances", 2, "--memory-gb", 30)
    assert fits.exit_code == 0, fits.output
    assert "float32, matrices bfloat16 as stored; each instance:" in fits.output
    assert "other weights    16.06 GB" in fits.output
    fields = json.loads((folder / "config.json").read_text())
    del fields["torch_dtype"]
    (folder / "config.json").write_text(json.dumps(fields | {field: "float32"}))
    widened = plan(folder, "--instances", 2, "--memory-gb", 30)
    assert widened.exit_code == 1 and "float32; each instance" in widened.output
    assert "would make it fit: --set dtype=bfloat16." in widened.output


def test_experts_need_not_divide_and_redundant_slots_are_counted(published):
    uneven = plan(published("glm-4.5"), "--instances", 7, "--device", "h200")
    assert "23 of 160 in each layer" in uneven.output


def test_mistakes_are_sentences(published, tmp_path):
    fp8 = plan(published("qwen3-8b"), "--device", "h200", "--set", "kv_dtype=fp8")
    assert fp8.exit_code == 2 and "kv_dtype is fp8, but the model has K/V heads" in fp8.stderr
    nothing = plan(tmp_path / "nothing")
    assert nothing.exit_code == 2 and "config.json is missing" in nothing.stderr


def test_the_tokenizer_is_judged_as_serve_does(published, tmp_path):
    folder = published("llama-3.1-8b")
    said = "No tokenizer here: prompts are token ids, and chats are refused."
    assert said in plan(folder, "--device", "h100").output
    (folder / "tokenizer.json").write_text('{"decoder": {"type": "WordPiece"}}')
    wrong = plan(folder, "--device", "h100")
    assert wrong.exit_code == 2 and "tokenizer.json cannot be used" in wrong.stderr
    make_checkpoint(tmp_path, "tiny-llama")
    assert said not in plan(tmp_path).output


def test_missing_tensors_are_named_before_anything_is_loaded(tmp_path):
    make_checkpoint(tmp_path, "tiny-llama")
    assert "The folder has all 30 tensors." in plan(tmp_path).output
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 4}))
    result = plan(tmp_path)
    assert "each instance:" in result.stdout
    assert result.exit_code == 2 and "9 tensors are missing from the checkpoint" in result.stderr


@pytest.mark.parametrize("preset", ["tiny", "tiny-qwen2", "tiny-glm4-moe"])
def test_the_weights_take_what_was_said(tmp_path, preset):
    """Against the tensors that an instance really has, before they are laid out for kernels."""
    assert preset in PRESETS
    make_checkpoint(tmp_path, preset)
    model = ModelConfig.from_folder(tmp_path)
    elements = []
    experts = expert_range(model, 0, 4)
    load_weights(tmp_path, model, torch.float32, experts, lambda _, total: elements.append(total))
    config = Config(cluster=ClusterConfig(num_instances=4))
    own = config.data_plane
    need, kept = (memory_need(model, config.cluster, own, False, each) for each in (False, True))
    head = model.vocab_size * model.hidden_size if model.tied_embeddings else 0
    assert need.experts + need.other_weights == 4 * (elements[-1] + head)
    assert 2 * kept.experts == need.experts
    assert 0.5 < kept.other_weights / need.other_weights < 0.52  # norms, biases, gates
    assert memory_need(model, config.cluster, own, True, False).exchange == 2 * need.exchange


def test_drafts_need_one_layer_more_of_weights_and_pages(published):
    """Start-up's check too: `model_of` is what an instance is built and checked by."""
    config = Config(cluster=ClusterConfig(num_instances=2))
    drafting = replace(config, scheduler=SchedulerConfig(num_drafts=1))
    plain, drafts = (model_of(each, TALE) for each in (config, drafting))
    elements, experts = [], expert_range(drafts, 0, 2)

    def say(_, total):
        elements.append(total)

    load_weights(TALE, drafts, torch.float32, experts, say)
    need, less = (
        memory_need(each, config.cluster, config.data_plane, False, False)
        for each in (drafts, plain)
    )
    head = drafts.vocab_size * drafts.hidden_size if drafts.tied_embeddings else 0
    assert need.experts + need.other_weights == 4 * (elements[-1] + head)
    assert 4 * need.page == 5 * less.page
    StageWeights(TALE, drafts, torch.float32, PlainPacking(), range(5), True, True, say).close()
    prefill = prefill_bytes(drafts, config.data_plane, 64)
    assert prefill == 4 * elements[-1], "without experts of that layer"
    said = plan(TALE, "--set", "drafts=on", "--instances", 2, "--memory-gb", 2).output
    assert "4 layers and an MTP layer, " in said and f"of {need.page / 1e6:.2f} MB" in said
    refused = plan(published("kimi-k2"), "--set", "drafts=on")
    assert refused.exit_code == 2 and "num_nextn_predict_layers is 0" in refused.stderr


def test_on_a_cpu_the_prefill_beside_the_instances_is_counted(tmp_path):
    make_checkpoint(tmp_path, "tiny")
    result = plan(tmp_path, "--instances", 2, "--memory-gb", 2)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) / 1e9
    said = re.search(r"the prefill has the whole model: ([\d.]+) GB and more", result.output)
    assert float(said[1]) == pytest.approx(size, abs=0.006), result.output
    assert "the prefill" not in plan(tmp_path, "--layout", "pipeline", "--memory-gb", 2).output


def test_a_pipeline_is_planned_by_stage_as_its_weights_are_loaded(tmp_path):
    make_checkpoint(tmp_path, "tiny")
    result = plan(tmp_path, "--layout", "pipeline", "--instances", 3, "--memory-gb", 2)
    assert result.exit_code == 0, result.output
    assert "stage 0    layers   0 to 1" in result.output and "3 to 3" in result.output
    assert "It fits. KV: " in result.output and "The folder has all" in result.output
    model = ModelConfig.from_folder(tmp_path)
    pipeline = PipelineConfig(num_stages=3, num_layers=model.num_layers)
    needs = stage_needs(model, pipeline, DataPlaneConfig(), stores_bf16=False)
    elements, experts = [], range(model.num_experts)
    load_weights(tmp_path, model, torch.float32, experts, lambda _, total: elements.append(total))
    assert sum(need.weights for need in needs) == 4 * elements[-1]
    assert sum(need.page for need in needs) == page_bytes(model, DataPlaneConfig())
    tight = plan(tmp_path, "--layout", "pipeline", "--instances", 2, "--memory-gb", 0.5)
    assert tight.exit_code == 1 and "has no room for a page" in tight.output
    absent = plan(tmp_path, "--layout", "pipeline", "--instances", 2, "--device", "h200")
    assert absent.exit_code == 2 and "device is cuda: it must be cpu" in absent.stderr


def test_states_of_rows_are_counted_and_priced(tmp_path):
    make_checkpoint(tmp_path, "tiny-qwen3-next")
    cluster, model = ClusterConfig(), ModelConfig.from_folder(tmp_path)
    need = memory_need(model, cluster, DataPlaneConfig(), False, False)
    rows = cluster.bounds.max_rows + 2
    assert need.states == rows * need.state > 0
    assert need.fixed >= need.states + need.other_weights + need.experts
    result = plan(tmp_path)
    assert "6 layers, 5 of them linear attention" in result.output
    assert re.search(r"states .* 64 rows of 0\.\d+ MB and two more", result.output)
    assert "A row less (cluster.bounds.max_rows) leaves room for" in result.output


def test_a_model_without_linear_attention_layers_has_no_states(tiny_checkpoint):
    model = ModelConfig.from_folder(tiny_checkpoint)
    need = memory_need(model, ClusterConfig(), DataPlaneConfig(), False, False)
    assert (need.state, need.states) == (0, 0)
    assert "states" not in plan(tiny_checkpoint).output


def test_a_mistyped_cluster_is_answered_with_the_nearest_name(tmp_path):
    for name in ("h200x32-deepsek-v3", "h100x32-deepseek"):
        result = plan(name)
        assert result.exit_code == 2 and "(nearest: h" in result.stderr, result.output
        assert "config.json" not in result.stderr
    assert "config.json is missing" in plan(tmp_path / "h200x32-deepsek-v3").stderr


def test_more_than_a_node_of_the_same_device_is_named(published):
    folder = published("deepseek-v3")
    result = plan(folder, "--instances", 8, "--device", "h100")
    assert result.exit_code == 1
    fewest = int(re.search(r"would make it fit: (\d+) instances of this device", result.output)[1])
    fits = plan(folder, "--instances", fewest, "--device", "h100")
    assert fewest > 8 and fits.exit_code == 0, fits.output
