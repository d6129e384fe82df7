"""Logits of prefill and decode are `transformers`', with KV and experts split over instances."""

import random

import pytest
import torch

from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.reference.oracle import Oracle
from harness.exact.split_decoder import SplitDecoder
from harness.kernels.native_cases import native

ATOL = 1e-4
SEED = 2
"""A seed whose gates are not within 1e-6 of a tie on these tokens.

At a tie another expert would be as right, and the logits would jump by more than any tolerance.
(Seed 1 has a tie with "another epsilon".)
"""
PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
# A stretch wide enough for the ramp between plain and interpolated frequencies, and an mscale that
# does not cancel.
OTHER_YARN = {
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 50_000.0, "factor": 40.0,
                        "original_max_position_embeddings": 128, "beta_fast": 16, "beta_slow": 2,
                        "mscale": 0.7, "mscale_all_dim": 1.0}
}  # fmt: skip
KIMI_K2 = {
    "n_routed_experts": 24, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
    "num_attention_heads": 4, "num_key_value_heads": 4,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 50_000.0, "factor": 32.0,
                        "original_max_position_embeddings": 128, "beta_fast": 1.0, "beta_slow": 1.0,
                        "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
DEEPSEEK_V2 = {
    "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4,
    "q_lora_rank": 96, "routed_scaling_factor": 16.0,
}  # fmt: skip
VARIANTS = {
    "as published": {},
    "published spelling": {"published_spelling": True},
    "published spelling, plain rope": {"overrides": PLAIN_ROPE, "published_spelling": True},
    "no q LoRA": {"overrides": {"q_lora_rank": None}},
    "plain rope": {"overrides": PLAIN_ROPE},
    "another yarn": {"overrides": OTHER_YARN},
    "yarn without mscale": {
        "overrides": {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 256,
            }
        }
    },
    "halves, not pairs": {"overrides": {"rope_interleave": False}},
    "no groups, no dense layer": {
        "overrides": {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
    },
    "three dense layers, two shared experts": {
        "overrides": {"first_k_dense_replace": 3, "n_shared_experts": 2}
    },
    "weights not normalised": {
        "overrides": {"norm_topk_prob": False, "routed_scaling_factor": 0.7}
    },
    "another epsilon": {"overrides": {"rms_norm_eps": 1e-3}},
    "tied embeddings": {"overrides": {"tie_word_embeddings": True}},
    "values wider than keys": {
        "overrides": {"v_head_dim": 96, "qk_nope_head_dim": 32, "num_attention_heads": 5}
    },
    "shards": {"max_shard_size": "4MB"},
    "as Kimi-K2": {"overrides": KIMI_K2},
    "as DeepSeek-V2-Lite": {"preset": "tiny-v2"},
    "as DeepSeek-V2-Lite, published spelling": {"preset": "tiny-v2", "published_spelling": True},
    "as DeepSeek-V2-Lite, an mscale that does not cancel": {
        "preset": "tiny-v2",
        "overrides": OTHER_YARN,
    },
    **{
        preset: {"preset": preset}
        for preset in ("tiny-qwen3-moe", "tiny-qwen2", "tiny-llama", "tiny-qwen3", "tiny-mixtral")
    },
    "tiny-glm4-moe, published spelling": {"preset": "tiny-glm4-moe", "published_spelling": True},
    "tiny-qwen3-moe, published spelling": {"preset": "tiny-qwen3-moe", "published_spelling": True},
    "tiny-llama, published spelling": {"preset": "tiny-llama", "published_spelling": True},
    "tiny-glm4-moe without norms, biases and groups": {
        "preset": "tiny-glm4-moe",
        "overrides": {"use_qk_norm": False, "attention_bias": False, "first_k_dense_replace": 0},
    },
    "tiny-llama in shards, tied": {
        "preset": "tiny-llama",
        "overrides": {"tie_word_embeddings": True},
        "max_shard_size": "2MB",
    },
    "as DeepSeek-V2": {"preset": "tiny-v2", "overrides": DEEPSEEK_V2},
    **{
        preset: {"preset": preset}
        for preset in ("tiny-qwen3-next", "tiny-qwen3.5", "tiny-kimi-linear", "tiny-ling")
    },
    **{
        f"{preset}, published spelling": {"preset": preset, "published_spelling": True}
        for preset in ("tiny-qwen3-next", "tiny-kimi-linear", "tiny-ling")
    },
    "tiny-ling without a bound, the last layer linear": {
        "preset": "tiny-ling",
        "overrides": {"kda_safe_gate": False, "num_hidden_layers": 4},
    },
}
PROMPT_LENS = (1, 5, 64, 190)
NUM_STEPS = 8


def make_prompts(seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(512) for _ in range(length + NUM_STEPS)] for length in PROMPT_LENS]


def decode_logits(checkpoint, num_instances, wire_form, dtype=torch.float32, kernels=None):
    """Decode all rows in one batch, the last NUM_STEPS tokens forced: [rows][steps, vocabulary]."""
    decoder = SplitDecoder(checkpoint, num_instances, wire_form, dtype, kernels=kernels)
    prompts = make_prompts()
    for ids, length in zip(prompts, PROMPT_LENS, strict=True):
        decoder.add_row(ids[:length])
    steps = []
    for step in range(NUM_STEPS):
        positions = [length - 1 + step for length in PROMPT_LENS]
        steps.append(
            decoder.step(
                [ids[position] for ids, position in zip(prompts, positions, strict=True)], positions
            )
        )
    return torch.stack(steps, dim=1)


def reference_logits(oracle):
    return torch.stack(
        [
            oracle.logits(ids[:length], ids[length:])
            for ids, length in zip(make_prompts(), PROMPT_LENS, strict=True)
        ]
    )


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("variant")
    make_checkpoint(path, **({"preset": "tiny", "seed": SEED} | VARIANTS[request.param]))
    return path, reference_logits(Oracle(path)), [*VARIANTS].index(request.param)


def assert_logits(logits, expected):
    torch.testing.assert_close(logits, expected, atol=ATOL, rtol=0)
    assert torch.equal(logits.argmax(dim=-1), expected.argmax(dim=-1)), "greedy tokens"


@pytest.mark.parametrize("is_other", [False, pytest.param(True, marks=pytest.mark.system)])
def test_logits_are_those_of_transformers(variant, is_other):
    """On one instance and on two by turns; `make test-system` has the other two ways of each."""
    checkpoint, expected, number = variant
    ways = [(1, "latent"), (2, "absorbed")]
    way = ways.pop(number % 2)
    for num_instances, wire_form in [*ways, (4, "latent")] if is_other else [way]:
        logits = decode_logits(checkpoint, num_instances, wire_form)
        assert logits.dtype == torch.float32
        assert_logits(logits, expected)


@pytest.mark.parametrize(
    ("num_instances", "wire_form"),
    [(2, "latent"), pytest.param(1, "absorbed", marks=pytest.mark.system)],
)
def test_logits_of_the_native_kernels_are_those_of_transformers(variant, num_instances, wire_form):
    checkpoint, expected, _ = variant
    kernels = native((torch.float32,))
    assert_logits(decode_logits(checkpoint, num_instances, wire_form, kernels=kernels), expected)


def test_logits_depend_on_every_page(tiny_checkpoint):
    """The tests of KV rely on it: logits show a lost or stale page anywhere in a long context."""
    decoder = SplitDecoder(tiny_checkpoint)
    rng = random.Random(5)
    ids = [rng.randrange(512) for _ in range(1500)]
    decoder.add_row(ids, chunk_tokens=512)
    position = len(ids) - 1
    whole = decoder.step([ids[-1]], [position])
    for page in (0, 7, 15, 22):
        frame = decoder.frames[0][0][page]
        kept = decoder.pools[0][:, frame].clone()
        decoder.pools[0][:, frame] = decoder.pools[0][:, decoder.frames[0][0][(page + 1) % 23]]
        assert (decoder.step([ids[-1]], [position]) - whole).abs().max() > 10 * ATOL, page
        decoder.pools[0][:, frame] = kept
    torch.testing.assert_close(decoder.step([ids[-1]], [position]), whole, atol=1e-6, rtol=0)


@pytest.mark.parametrize("wire_form", ["latent", "absorbed"])
@pytest.mark.parametrize("name", ["tiny", "tiny, every expert"])
def test_bf16_logits_are_near_the_fp32_ones(models, name, wire_form):
    """Near a tie of the gate bf16 visits another expert and logits jump: most are near, not all."""
    model = models(name)
    logits = decode_logits(model.path, 2, wire_form, torch.bfloat16)
    error = (logits - reference_logits(model.oracle)).abs().amax(dim=-1)
    assert error.median() < 0.15
    assert name == "tiny" or error.max() < 0.2  # seen: 0.07 and 0.08
