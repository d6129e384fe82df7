"""The probe takes this model's KV and no other's."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from data_plane.kv.carry_pool import CarryPool
from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.model.weights import load_weights
from data_plane.prefill.build import build_probe
from data_plane.prefill.pages import begin_state, payload_of
from data_plane.prefill.probe import NUM_TOKENS
from data_plane.startup.shared_parts import model_of, torch_dtype
from harness.exact.reference_prefill import prefill_pages
from harness.paths import ROOT
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config
from nanocp.values.plan import CARRY_PAGE

RANK, ROPE_DIM, NUM_LAYERS = 64, 32, 4
CONFIGS = {
    dtype: replace(Config(), data_plane=DataPlaneConfig(dtype=dtype))
    for dtype in ("float32", "bfloat16")
}


def pages_of(config, checkpoint, token_ids):
    """Pages as a stage with all layers writes them, which is what an engine must write."""
    model = model_of(config, checkpoint)
    dtype = getattr(torch, config.data_plane.dtype)
    weights = load_weights(checkpoint, model, dtype, range(model.num_experts))
    pages = prefill_pages(weights, model, [*token_ids, 0], NUM_TOKENS, NUM_TOKENS)
    return {page: payload_of(kv, None).reshape(-1).copy() for page, kv in pages}


def changed(pages, dtype, change, num_layers=NUM_LAYERS):
    """The pages after `change` of their KV [layers, 64, width] in place."""
    for payload in pages.values():
        kv = torch.from_numpy(payload).view(getattr(torch, dtype)).view(num_layers, 64, -1)
        change(kv)
    return pages


def to_halves(kv):
    key = kv[..., RANK:].clone()
    kv[..., RANK:] = torch.cat((key[..., ::2], key[..., 1::2]), dim=-1)


def one_position_on(kv):
    kv[:] = kv.roll(1, dims=1)


def wrong_from_layer_1(kv):
    kv[1] *= 1.5


@pytest.mark.parametrize("dtype", CONFIGS)
def test_this_models_kv_passes_and_other_kv_does_not(tiny_checkpoint, dtype):
    probe = build_probe(CONFIGS[dtype], tiny_checkpoint)
    pages = pages_of(CONFIGS[dtype], tiny_checkpoint, probe.token_ids)
    assert [payload.nbytes for payload in pages.values()] == [probe.page_bytes] * 2
    assert probe.problem(pages) is None
    for change, part in (
        (to_halves, "key of layer 0"),
        (one_position_on, "latent of layer 0"),
        (wrong_from_layer_1, "latent of layer 1"),
    ):
        copies = {page: payload.copy() for page, payload in pages.items()}
        assert part in probe.problem(changed(copies, dtype, change)), change
    nothing = {page: np.full_like(payload, 255) for page, payload in pages.items()}
    assert "numbers that are not finite" in probe.problem(nothing)


def test_with_drafts_a_page_has_the_mtp_layer_too_and_it_may_be_zero():
    """An engine without the layer sends zeros, and one that has it KV that the probe cannot know.

    models/tale has the layer behind its four.
    """
    config = replace(Config(), scheduler=SchedulerConfig(num_drafts=1))
    probe = build_probe(config, ROOT / "models/tale")
    assert probe.num_layers == 5
    for mtp_scale in (1, 0):
        pages = pages_of(config, ROOT / "models/tale", probe.token_ids)
        assert [payload.nbytes for payload in pages.values()] == [probe.page_bytes] * 2
        for payload in pages.values():
            kv = torch.from_numpy(payload).view(torch.float32).view(probe.num_layers, 64, -1)
            assert kv[-1].any()
            kv[-1] *= mtp_scale
        assert probe.problem(pages) is None
    kv[0] *= 1.5
    assert "latent of layer 0" in probe.problem(pages)


def test_a_checkpoint_of_another_seed_fails(tiny_checkpoint, tmp_path):
    """The shapes are equal, so no fingerprint of shapes would see it."""
    make_checkpoint(tmp_path, "tiny", seed=1)
    config = CONFIGS["float32"]
    probe = build_probe(config, tiny_checkpoint)
    pages = pages_of(config, tmp_path, probe.token_ids)
    assert "is off by" in probe.problem(pages)
    assert build_probe(config, tmp_path).fingerprint == probe.fingerprint


@pytest.mark.parametrize("preset", ["tiny-qwen3-moe", "tiny-qwen2"])
@pytest.mark.parametrize("dtype", CONFIGS)
def test_keys_and_values_of_heads_pass_and_others_do_not(tmp_path, preset, dtype):
    """The first has experts in its first layer, so no other is known."""
    make_checkpoint(tmp_path, preset)
    probe = build_probe(CONFIGS[dtype], tmp_path)
    pages = pages_of(CONFIGS[dtype], tmp_path, probe.token_ids)
    assert [payload.nbytes for payload in pages.values()] == [probe.page_bytes] * 2
    assert probe.problem(pages) is None

    def values_first(kv):
        kv[:] = torch.cat(kv.chunk(2, dim=-1)[::-1], dim=-1)

    def another_head(kv):
        key, value = kv.chunk(2, dim=-1)
        kv[:] = torch.cat((key, value.roll(value.shape[-1] // 2, dims=-1)), dim=-1)

    for change, part in ((values_first, "key of layer 0"), (another_head, "value of layer 0")):
        copies = {page: payload.copy() for page, payload in pages.items()}
        assert part in probe.problem(changed(copies, dtype, change, num_layers=3)), change


def test_of_a_model_without_experts_the_first_layers_are_loaded(tmp_path):
    make_checkpoint(tmp_path, "tiny-qwen3", overrides={"num_hidden_layers": 6})
    probe = build_probe(CONFIGS["float32"], tmp_path)
    assert (probe.num_layers, len(probe.expected)) == (6, 4)


@pytest.fixture(scope="module")
def states_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("states")
    make_checkpoint(folder, "tiny-qwen3-next")
    return folder


@torch.no_grad()
def state_pages(probe, config, folder, change=lambda fields: None, num_tokens=NUM_TOKENS):
    """Pages of an engine: KV that nobody knows, and a state in which all layers have the tokens."""
    model = model_of(config, folder)
    first = replace(model, num_layers=1)
    weights = load_weights(folder, first, torch_dtype(config.data_plane), range(0))
    pool = CarryPool(
        model.delta, len(model.linear_layers), 1, torch_dtype(config.data_plane), probe.page_bytes
    )
    begin_state(pool, weights, model, probe.token_ids[:num_tokens])
    for fields in pool.layers:
        fields.folded[0] = num_tokens
    change(pool.layers[0])
    pages = {page: np.zeros(probe.page_bytes, np.uint8) for page in (0, 1)}
    return pages | {
        CARRY_PAGE + number: pool.page(0, number).copy() for number in range(probe.num_state_pages)
    }


@pytest.mark.parametrize("dtype", CONFIGS)
def test_the_first_layers_state_passes_and_others_do_not(states_folder, dtype):
    config = CONFIGS[dtype]
    probe = build_probe(config, states_folder)

    def problem(*change):
        return probe.problem(state_pages(probe, config, states_folder, *change))

    def turned(fields):
        state = fields.state[0].clone()
        fields.state[0] = state.transpose(1, 2).reshape(state.shape)

    def of_a_token_less(fields):
        fields.channels[0] = fields.channels[0].roll(1, dims=0)

    def not_finite(fields):
        fields.state[0, 0, 0, 0] = torch.nan

    assert probe.num_state_pages > 0 and problem() is None
    assert "the state of layer 0 is off by" in problem(turned)
    assert "the input of layer 0 is off by" in problem(of_a_token_less)
    assert "the state of layer 0 is off by nan" in problem(not_finite)
    assert "64 tokens of the probe's 65" in problem(lambda fields: None, NUM_TOKENS - 1)


def test_states_that_no_engine_sends_are_refused(tmp_path):
    make_checkpoint(tmp_path, "tiny-kimi-linear")
    with pytest.raises(ValueError, match="engines send states of Gated DeltaNet"):
        build_probe(CONFIGS["float32"], tmp_path)
