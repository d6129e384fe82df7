"""Models of `transformers` give the same logits in any order, with and without caches."""

import itertools

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    StaticCache,
)

from harness.overlap.overlap_models import rules_of
from nanocp.overlap.engine.backend import overlap
from nanocp.overlap.policies.orders import DualBatchOverlap, NanoFlow

pytestmark = pytest.mark.usefixtures("fresh")

VOCABULARY = 64
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


def llama():
    return LlamaForCausalLM(LlamaConfig(**SMALL))


def qwen3_moe():
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts=4, head_dim=8))


def deepseek_v3():
    widths = {"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8}
    heads = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "first_k_dense_replace": 1}
    groups = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**SMALL, **EXPERTS, **widths, **heads, **groups))


MODELS = {
    "LlamaAttention": llama, "Qwen3MoeAttention": qwen3_moe, "DeepseekV3Attention": deepseek_v3,
}  # fmt: skip


def compiled(attention, policy):
    model = MODELS[attention]().eval()
    engines = []
    return model, overlap(model, policy(rules_of(model, attention)), engines.append), engines


def cases(ways, *quick):
    """Every model in each of the ways; those that are not named are system tests."""
    return [
        pytest.param(*case, marks=() if case in quick else pytest.mark.system)
        for case in itertools.product(MODELS, ways)
    ]


@pytest.mark.parametrize(("attention", "policy"), cases(
    (NanoFlow, DualBatchOverlap),
    ("LlamaAttention", NanoFlow),
    ("Qwen3MoeAttention", DualBatchOverlap),
    ("DeepseekV3Attention", NanoFlow),
))  # fmt: skip
def test_a_prompts_logits_are_the_models(attention, policy):
    """Bit by bit, but for experts: with half of the batch they have fewer rows each."""
    model, run, engines = compiled(attention, policy)
    for rows in (8, 5):
        ids = torch.randint(0, VOCABULARY, (rows, 7))
        expected = model(ids, use_cache=False).logits
        for _ in range(3):  # the first forward records
            logits = run(ids, use_cache=False).logits
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
            assert attention != "LlamaAttention" or torch.equal(logits, expected)
    (engine,) = engines
    assert len(engine.program.operators) == 5, "two attentions, and what lies between"
    assert all(len(each.sizes) == 2 for each in engine.recordings.values())


@pytest.mark.parametrize(
    ("attention", "is_static"),
    cases((False, True), ("DeepseekV3Attention", False), ("LlamaAttention", True)),
)
def test_a_cache_is_written_row_by_row_and_its_counter_advances_once(attention, is_static):
    """Micro-batches of few rows take other kernels: logits are close, not equal."""
    model, run, engines = compiled(attention, NanoFlow)
    for rows in (8, 6):
        caches = [
            StaticCache(model.config, max_cache_len=16) if is_static else DynamicCache()
            for _ in range(2)
        ]
        prompt = torch.randint(0, VOCABULARY, (rows, 7))
        for cache in caches:
            model(prompt, past_key_values=cache, use_cache=True)
        for _ in range(3):
            token = torch.randint(0, VOCABULARY, (rows, 1))
            mine = run(token, past_key_values=caches[0], use_cache=True).logits
            expected = model(token, past_key_values=caches[1], use_cache=True).logits
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
        for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
            torch.testing.assert_close(one.keys, other.keys, rtol=1e-5, atol=1e-6)
        assert caches[0].get_seq_length() == caches[1].get_seq_length() == 10
    assert len(engines) == (1 if is_static else 2), "a growing cache is a graph of its own"
