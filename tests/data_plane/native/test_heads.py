"""The compiled kernels for K/V heads against the torch functions, their slow references."""

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_plane.attention.torch_paged import KvHeads
from data_plane.model.config import ModelConfig
from data_plane.model.norm import rms_norm
from data_plane.model.weights import load_weights
from data_plane.native.attention import NativeAttention
from data_plane.step.cpu_kernels import TorchKernels
from harness.exact.split_decoder import page_table
from harness.kernels.native_cases import FORMS, assert_agree, native
from harness.kernels.slow_references import reference_attention

PAGE = 64


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-glm4-moe"])
def test_queries_and_kv(models, preset, form):
    """One K/V head and as many as query heads, biases, norms, half of a head rotated."""
    ours, theirs, path = native(form), TorchKernels(), models(preset).path
    dtype = form[0]
    config = ModelConfig.from_folder(path)
    sides = []
    for kernels in (ours, theirs):
        weights = load_weights(path, config, dtype, range(0), packing=kernels)
        weights.rope.reach(6000)
        sides.append((weights.layers[1], weights.rope, config))
    for num_rows in (0, 1, 7, 33):
        generator = torch.Generator().manual_seed(num_rows)
        x_BX = torch.randn(num_rows, config.hidden_size, generator=generator).to(dtype)
        position_B = torch.arange(num_rows) * 179
        expected = theirs.attention_rows(x_BX, position_B, *sides[1])
        found = ours.attention_rows(x_BX, position_B, *sides[0])
        for value, wanted in zip(found, expected, strict=True):
            assert_agree(value, wanted, dtype)
        wire_q, _, q = expected
        assert_agree(ours.attention_queries(wire_q, position_B, *sides[0]), q, dtype)


@pytest.mark.parametrize("form", FORMS, ids=str)
@settings(max_examples=25)
@given(
    data=st.data(),
    num_kv_heads=st.sampled_from([1, 2, 5]),
    group=st.sampled_from([1, 3, 8, 17]),
    head_dim=st.sampled_from([32, 96, 128]),
)
def test_attention(form, data, num_kv_heads, group, head_dim):
    """Any lengths, frames in any order, an empty row, any number of groups and heads."""
    kernels, dtype = native(form), form[0]
    lengths = data.draw(st.lists(st.integers(0, 5 * PAGE), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    frames = [
        torch.randperm(12, generator=generator)[: -(-length // PAGE)].tolist() for length in lengths
    ]
    pool = torch.randn(12, PAGE, 2 * num_kv_heads * head_dim, generator=generator).to(dtype)
    q = torch.randn(len(lengths), num_kv_heads * group, head_dim, generator=generator).to(dtype)
    attention = NativeAttention(
        kernels.attention_call, head_dim, num_kv_heads, num_kv_heads * head_dim
    )
    plan = attention.plan(page_table(frames), torch.tensor(lengths, dtype=torch.int32))
    out, lse = attention.run(q, pool, plan, 0.1)
    layout = KvHeads(num_kv_heads, head_dim)
    expected, expected_lse = reference_attention(q, pool, frames, lengths, 0.1, layout)
    assert out.dtype == dtype and torch.equal(lse.isinf(), expected_lse.isinf())
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)
    tolerance = 5e-6 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


def test_heads_of_another_width_are_left_to_torch(models):
    kernels = native((torch.float32, "avx2"))
    config = ModelConfig.from_folder(models("tiny-llama").path)
    assert config.attention.head_dim % 32 and kernels.own_attention(config) is None


def test_a_layer_that_is_given_up_is_not_kept(models):
    """A stage whose layers move would else keep the weights of those that have left."""
    kernels, path = native((torch.float32, "avx2")), models("tiny-qwen3").path
    config = ModelConfig.from_folder(path)
    weights = load_weights(path, config, torch.float32, range(0), packing=kernels)
    weights.rope.reach(8)
    layer, rope = weights.layers[1], weights.rope
    kernels.attention_rows(torch.zeros(1, config.hidden_size), torch.arange(1), layer, rope, config)
    kept = weakref.ref(layer.input_norm)
    kernels.forget(layer)
    del weights, layer
    assert kept() is None


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-qwen3-next"])
def test_norms_of_both_dtypes(models, preset, form):
    """The second model has norms in fp32 beside rows in bf16; nothing is rounded before those."""
    ours, theirs, path = native(form), TorchKernels(), models(preset).path
    dtype, config = form[0], ModelConfig.from_folder(path)
    kind, index = config.attention, min({*range(config.num_layers)} - {*config.linear_layers})
    weights = load_weights(path, config, dtype, range(0), packing=ours)
    expected = load_weights(path, config, dtype, range(0), packing=theirs)
    for each in (weights, expected):
        each.rope.reach(64)
    layer, rope = weights.layers[index], weights.rope
    assert layer.input_norm.dtype == (torch.float32 if config.has_offset_norms else dtype)
    generator = torch.Generator().manual_seed(0)
    x_BX = torch.randn(33, config.hidden_size, generator=generator).to(dtype)
    o_BHV = torch.randn(33, kind.num_heads, kind.value_dim, generator=generator).to(dtype)
    position_B = torch.arange(33)
    sum_BX, normed_BX = ours.after_attention(x_BX, o_BHV, layer, rope, config)
    normed = [(normed_BX, rms_norm(sum_BX, layer.post_attention_norm, config.norm_eps))]
    found = ours.attention_rows(x_BX, position_B, layer, rope, config)
    normed.append((found[0], rms_norm(x_BX, layer.input_norm, config.norm_eps)))
    for value, wanted in normed:
        assert_agree(value, wanted, dtype)
        # Sums in another order may round an element in bf16 to its neighbour, hardly ever.
        assert dtype == torch.float32 or (value == wanted).float().mean() > 0.99
    other = theirs.attention_rows(x_BX, position_B, expected.layers[index], expected.rope, config)
    for value, wanted in zip(found, other, strict=True):
        assert_agree(value, wanted, dtype)
    logits = ours.logits(x_BX, weights, config)
    assert_agree(logits, theirs.logits(x_BX, expected, config), dtype)
