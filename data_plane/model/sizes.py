"""Sizes of stored tensors and of KV, from config.json alone: no torch is needed to know them.

Enters: a ModelConfig, what is configured. Leaves: names and shapes, bytes. Does not know: files,
frames.
"""

from __future__ import annotations

from collections.abc import Sequence

from data_plane.model.config import ModelConfig
from data_plane.model.families import PLAIN_NAMES, MixtureNames
from nanocp.config.whole import Config
from nanocp.values.plan import PAGE_SIZE

NUM_SCALES = 4
"""Scales of one token's latent KV in FP8."""


def token_bytes(rank: int, rope_dim: int) -> int:
    """Size of one token's latent KV in FP8, in bytes."""
    return rank + 4 * NUM_SCALES + 2 * rope_dim


def item_bytes(config: Config) -> int:
    """Bytes of a number of the configured dtype."""
    return 2 if config.data_plane.dtype == "bfloat16" else 4


def page_bytes(model: ModelConfig, config: Config) -> int:
    """Compute the bytes of a page of all layers. Raises ValueError if KV cannot be kept in FP8."""
    kind, num_tokens = model.attention, PAGE_SIZE * model.num_kept_layers
    if config.data_plane.kv_dtype == "fp8":
        rank = kind.fp8_rank()
        return num_tokens * token_bytes(rank, kind.kv_width - rank)
    return num_tokens * kind.kv_width * item_bytes(config)


def mlp_names(prefix: str, names: MixtureNames = PLAIN_NAMES) -> tuple[str, str, str]:
    """Name the tensors of a gated MLP: gate, up, down."""
    gate, up, down = (f"{prefix}{name}.weight" for name in (names.gate, names.up, names.down))
    return gate, up, down


def stored_shapes(config: ModelConfig, experts: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """List the tensors that an instance with these experts reads: name -> shape."""
    shapes = embedding_shapes(config) | head_shapes(config)
    for index in range(config.num_kept_layers):
        shapes |= layer_shapes(config, index, experts)
    return shapes | (mtp_shapes(config) if config.num_mtp_layers else {})


def mtp_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """List what the MTP layer has beside a decoder layer: name -> shape."""
    layer, hidden = f"model.layers.{config.num_layers}.", config.hidden_size
    return {
        layer + "enorm.weight": (hidden,),
        layer + "hnorm.weight": (hidden,),
        layer + "eh_proj.weight": (hidden, 2 * hidden),
        layer + "shared_head.norm.weight": (hidden,),
    }


def embedding_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """List the tensors that turn token ids into hidden rows: name -> shape."""
    return {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}


def head_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """List the tensors that turn hidden rows into logits: name -> shape."""
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (config.hidden_size,)}
    if config.tied_embeddings:
        return shapes | embedding_shapes(config)
    return shapes | {"lm_head.weight": (config.vocab_size, config.hidden_size)}


def layer_shapes(
    config: ModelConfig, index: int, experts: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """List the tensors of one layer with these experts: name -> shape."""
    hidden, kind = config.hidden_size, config.attention
    layer = f"model.layers.{index}."
    attention, mlp = layer + "self_attn.", layer + "mlp."
    shapes: dict[str, tuple[int, ...]] = {
        layer + "input_layernorm.weight": (hidden,),
        layer + "post_attention_layernorm.weight": (hidden,),
        **kind.stored_shapes(attention, hidden),
        attention + "o_proj.weight": (hidden, kind.num_heads * kind.value_dim),
    }

    def add_mlp(prefix: str, size: int, names: MixtureNames = PLAIN_NAMES) -> None:
        gate, up, down = mlp_names(prefix, names)
        shapes[gate] = shapes[up] = (size, hidden)
        shapes[down] = (hidden, size)

    if index < config.num_dense_layers:
        add_mlp(mlp, config.dense_size)
        return shapes
    mlp = layer + config.names.prefix
    shapes[mlp + "gate.weight"] = (config.num_experts, hidden)
    if not config.softmax_gate:
        shapes[mlp + "gate.e_score_correction_bias"] = (config.num_experts,)
    for expert in experts:
        add_mlp(f"{mlp}experts.{expert}.", config.expert_size, config.names)
    if config.num_shared_experts:
        add_mlp(mlp + "shared_experts.", config.num_shared_experts * config.expert_size)
    return shapes


def is_packed(name: str, shape: Sequence[int]) -> bool:
    """Whether a stored tensor is a matrix in the dtype of the weights; a gate's is fp32."""
    return len(shape) == 2 and not name.endswith(".gate.weight")
