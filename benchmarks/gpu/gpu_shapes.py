"""DeepSeek-V3's shapes, and small ones, with random weights for one GPU.

Enters: nothing. Leaves: `StepShapes`, weights. Does not know: what is measured with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from data_plane.model.attention_kinds.mla import MlaConfig, MlaWeights
from data_plane.model.config import ModelConfig
from data_plane.model.linear import LinearLayer, PlainLinear
from data_plane.model.rope import RopeTable
from data_plane.model.rope_config import RopeConfig
from data_plane.model.weights import LayerWeights, MlpWeights, ModelWeights, MoeWeights
from data_plane.moe.gpu.gpu_weights import GpuWeights
from data_plane.moe.gpu.grouped import GroupedExperts, GroupedGemm
from nanocp.config.cluster import BoundsConfig

PAPER_BOUNDS = BoundsConfig(max_rows=256, max_links=64, max_attention_rows=384, max_partials=256)
ROW_BUCKETS = (64, 128, 256)


@dataclass(frozen=True)
class StepShapes:
    """What is measured: DeepSeek-V3's, or small ones."""

    model: ModelConfig
    bounds: BoundsConfig
    row_buckets: tuple[int, ...]
    exchange: tuple[int, int]
    """Instances, and links of each pair, when the exchange is measured alone."""
    batches: tuple[tuple[int, int], ...]
    """(rows, context) of the whole step."""
    max_pages: int
    """Pages of a request, for the tables of the graphs."""
    linked_rows: int
    dtype: str
    rounds: int


def deepseek_v3(num_layers: int = 61, experts: int = 8) -> ModelConfig:
    """Make DeepSeek-V3's shape, with the experts of one instance of 32, in one group.

    A row visits all of them: so an instance's experts see as many rows as in the cluster.
    """
    return ModelConfig(
        vocab_size=129_280, hidden_size=7168, num_layers=num_layers,
        attention=MlaConfig(
            hidden_size=7168, num_heads=128, q_lora_rank=1536, kv_lora_rank=512, nope_dim=128,
            rope_dim=64, value_dim=128,
        ),
        dense_size=18_432,
        num_dense_layers=3, num_experts=experts, num_experts_per_token=8, expert_size=2048,
        num_shared_experts=1, shared_size=2048, softmax_gate=False, num_groups=1,
        num_groups_per_token=1, weights_normalised=True, routed_scale=2.5, norm_eps=1e-6,
        tied_embeddings=False, max_len=2**20, eos_token_ids=(1,),
        rope=RopeConfig(10_000.0, True, None), fp8_block=None,
    )  # fmt: skip


FULL = StepShapes(
    deepseek_v3(), PAPER_BOUNDS, ROW_BUCKETS, exchange=(4, 64), batches=((16, 65_536), (64, 8192),
    (128, 8192)), max_pages=16_384, linked_rows=32, dtype="bfloat16", rounds=20,
)  # fmt: skip
TINY = StepShapes(
    replace(
        deepseek_v3(2, experts=4), vocab_size=64, hidden_size=32,
        attention=MlaConfig(
            hidden_size=32, num_heads=2, q_lora_rank=16, kv_lora_rank=16, nope_dim=16, rope_dim=16,
            value_dim=16,
        ),
        dense_size=32, num_dense_layers=1,
        num_experts_per_token=2, expert_size=16, shared_size=16,
    ),
    BoundsConfig(max_rows=4, max_links=2, max_attention_rows=4, max_partials=2), (4,),
    exchange=(2, 1), batches=((1, 70), (2, 70)), max_pages=2, linked_rows=1, dtype="float32",
    rounds=1,
)  # fmt: skip


def latent(model: ModelConfig) -> MlaConfig:
    """Return the model's attention, which these benchmarks know to be latent."""
    assert isinstance(model.attention, MlaConfig)
    return model.attention


def random_weights(
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    experts: range,
    gemm: GroupedGemm,
    is_alone: bool,
    linear: Callable[[torch.Tensor], LinearLayer] = PlainLinear,
) -> GpuWeights:
    """Noise; layers of a kind share theirs, which a card would not hold 61 times.

    is_alone: shared experts lie with the experts, as gpu_weights.place_weights has them. linear:
    makes the dense layers, but the head.
    """

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device) * shape[-1] ** -0.5

    def mlp(size: int) -> MlpWeights:
        return MlpWeights(
            linear(weight(2 * size, model.hidden_size)),
            linear(weight(model.hidden_size, size)),
        )

    kind = latent(model)
    ones, heads = torch.ones(model.hidden_size, dtype=dtype, device=device), kind.num_heads
    gate = torch.randn(model.num_experts, model.hidden_size, device=device) * 0.02
    moe = MoeWeights(
        gate,
        torch.zeros(model.num_experts, device=device),
        list(experts),
        [],
        None if is_alone else mlp(model.expert_size),
    )
    dense = LayerWeights(
        input_norm=ones,
        post_attention_norm=ones,
        attention=MlaWeights(
            down_proj=linear(weight(kind.q_latent_dim + kind.kv_width, model.hidden_size)),
            q_norm=ones[: kind.q_latent_dim],
            kv_norm=ones[: kind.kv_lora_rank],
            q_proj=linear(weight(heads * (kind.nope_dim + kind.rope_dim), kind.q_latent_dim)),
            k_up=weight(heads, kind.nope_dim, kind.kv_lora_rank),
            v_up=weight(heads, kind.value_dim, kind.kv_lora_rank).transpose(1, 2).contiguous(),
        ),
        o_proj=linear(weight(model.hidden_size, heads * kind.value_dim)),
        mlp=mlp(model.dense_size),
        moe=None,
    )
    sparse, size = replace(dense, mlp=None, moe=moe), model.expert_size
    num_shared = model.num_shared_experts if is_alone else 0
    grouped = GroupedExperts(
        gemm,
        weight(len(experts) + num_shared, 2 * size, model.hidden_size),
        weight(len(experts) + num_shared, model.hidden_size, size),
        num_shared,
    )
    rope = RopeTable(model.rope, kind.rope_dim)
    rope.place(device, 2**17)
    is_dense = [index < model.num_dense_layers for index in range(model.num_layers)]
    layers = tuple(dense if flag else sparse for flag in is_dense)
    embedding, head = (
        weight(model.vocab_size, model.hidden_size),
        PlainLinear(weight(model.vocab_size, model.hidden_size)),
    )
    return GpuWeights(
        ModelWeights(embedding, layers, ones, head, rope),
        tuple(None if flag else grouped for flag in is_dense),
    )
