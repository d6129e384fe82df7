"""The gate chooses `transformers`' experts and weights, for all groups, biases, normalisations."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from data_plane.model.config import ModelConfig
from data_plane.moe.gate import gate

NUM_EXPERTS, HIDDEN = 16, 24
SHAPES = {
    "groups": {"num_groups": 4, "num_groups_per_token": 2},
    "all groups": {"num_groups": 4, "num_groups_per_token": 4},
    "one group": {"num_groups": 1, "num_groups_per_token": 1},
    "not normalised": {"num_groups": 4, "num_groups_per_token": 2, "weights_normalised": False},
    "softmax": {"softmax_gate": True, "num_groups": 1, "num_groups_per_token": 1,
                "weights_normalised": False},
    "softmax, groups": {"softmax_gate": True, "num_groups": 4, "num_groups_per_token": 2,
                        "weights_normalised": False},
    "one expert": {"num_groups": 8, "num_groups_per_token": 1, "num_experts_per_token": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def config(tiny_checkpoint):
    return dataclasses.replace(
        ModelConfig.from_folder(tiny_checkpoint),
        num_experts=NUM_EXPERTS,
        hidden_size=HIDDEN,
        routed_scale=2.5,
    )


def make_weights(seed, bias_scale=0.3):
    generator = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        gate=torch.randn(NUM_EXPERTS, HIDDEN, generator=generator),
        gate_bias=bias_scale * torch.randn(NUM_EXPERTS, generator=generator),
    )


def reference_gate(x_BX, moe, config):
    """Choose experts and weights by `transformers`' own router."""
    from transformers import DeepseekV2Config, DeepseekV3Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    fields = {
        "n_routed_experts": NUM_EXPERTS, "hidden_size": HIDDEN, "num_attention_heads": 8,
        "num_experts_per_tok": config.num_experts_per_token, "n_group": config.num_groups,
        "topk_group": config.num_groups_per_token, "norm_topk_prob": config.weights_normalised,
        "routed_scaling_factor": config.routed_scale,
    }  # fmt: skip
    if config.softmax_gate:
        topk_method = "greedy" if config.num_groups == 1 else "group_limited_greedy"
        router = DeepseekV2TopkRouter(DeepseekV2Config(**fields, topk_method=topk_method))
    else:
        router = DeepseekV3TopkRouter(DeepseekV3Config(**fields))
        router.e_score_correction_bias.copy_(moe.gate_bias)
    router.weight.data.copy_(moe.gate)
    with torch.no_grad():
        _, weights, experts = router(x_BX)
    return experts, weights


def dense(expert_BK, weight_BK):
    """Spread weights over all experts, [B, experts]: the order of the list means nothing."""
    return torch.zeros(len(expert_BK), NUM_EXPERTS).scatter_(1, expert_BK, weight_BK)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_is_that_of_transformers(config, name, dtype):
    config = dataclasses.replace(config, **SHAPES[name])
    for seed in range(5):
        moe = make_weights(seed)
        if config.softmax_gate:
            moe.gate_bias = None
        x_BX = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(100 + seed)).to(
            dtype
        )
        expert_BK, weight_BK = gate(x_BX, moe, config)
        assert expert_BK.dtype == torch.int64 and weight_BK.dtype == torch.float32
        assert expert_BK.shape == weight_BK.shape == (40, config.num_experts_per_token)
        torch.testing.assert_close(
            dense(expert_BK, weight_BK), dense(*reference_gate(x_BX, moe, config))
        )


def test_the_bias_chooses_but_does_not_weigh(config):
    config = dataclasses.replace(config, **SHAPES["one group"])
    moe = make_weights(7, bias_scale=0.0)
    x_BX = torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(8))
    moe.gate_bias[5] = 10.0
    expert_BK, weight_BK = gate(x_BX, moe, config)
    assert (expert_BK == 5).any(dim=1).all()
    score_BK = torch.sigmoid(x_BX @ moe.gate.T).gather(1, expert_BK)
    torch.testing.assert_close(
        weight_BK, score_BK / score_BK.sum(dim=1, keepdim=True) * config.routed_scale
    )


def test_only_experts_of_the_best_groups_are_chosen(config):
    config = dataclasses.replace(config, **SHAPES["groups"])
    moe = make_weights(9)
    # Expert 0 is the best of all, but the second of its group is the worst, and a group's score is
    # the sum of its best two.
    moe.gate_bias = torch.tensor([3.0, -9.0, -9.0, -9.0] + [0.0] * 12)
    expert_BK, _ = gate(
        torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(10)), moe, config
    )
    assert (expert_BK >= 4).all()
    assert all(len(set((row // 4).tolist())) <= 2 for row in expert_BK)
