"""Sizes of stored tensors and of KV, from config.json alone: no torch is needed to know them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from data_plane.model.attention_kinds.delta import DeltaConfig
from data_plane.model.attention_kinds.kind import AttentionKind
from data_plane.model.config import ModelConfig
from data_plane.model.families import PLAIN_NAMES, TensorNames
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.values.plan import PAGE_SIZE

NUM_SCALES = 4
"""Scales of one token's latent KV in FP8."""
CARRY_DEPTH = 1
"""A row's newest tokens, not folded into its recurrent state."""
_CARRY_ALIGNMENT = 64
_NOT_DENSE = ("kv_b_proj.weight", "eh_proj.weight")
"""W_UK and W_UV, which are absorbed, and weights that checkpoints publish in bf16."""


def token_bytes(rank: int, rope_dim: int) -> int:
    """Return the bytes of one token's latent KV in FP8."""
    return rank + 4 * NUM_SCALES + 2 * rope_dim


def item_bytes(data_plane: DataPlaneConfig) -> int:
    """Bytes of a number of the configured dtype."""
    return 2 if data_plane.dtype == "bfloat16" else 4


def page_bytes(model: ModelConfig, data_plane: DataPlaneConfig) -> int:
    """Compute the bytes of a page of all layers. Raises ValueError if KV cannot be kept in FP8."""
    kind, num_tokens = model.attention, PAGE_SIZE * model.num_kept_layers
    if data_plane.kv_dtype == "fp8":
        rank = kind.fp8_rank()
        return num_tokens * token_bytes(rank, kind.kv_width - rank)
    return num_tokens * kind.kv_width * item_bytes(data_plane)


class CarryField(NamedTuple):
    """One tensor of a row's recurrent state in one linear attention layer."""

    name: str
    offset: int
    shape: tuple[int, ...]
    item_bytes: int


def carry_layout(
    delta: DeltaConfig, item_bytes: int, depth: int
) -> tuple[tuple[CarryField, ...], int]:
    """Return the fields of a row's state in each linear attention layer, and its bytes.

    depth: newest tokens outside the state. Records have one place more.
    """
    places, heads = depth + 1, delta.num_heads
    fields, offset = [], 0
    for name, shape, size in (
        ("state", (heads, delta.key_dim, delta.value_dim), 4),
        ("decay", (places, heads, delta.decay_width), 4),
        ("key", (places, delta.num_key_heads, delta.key_dim), 4),
        ("u", (places, heads, delta.value_dim), 4),
        ("channels", (delta.conv_size - 1 + places, delta.num_channels), item_bytes),
        ("folded", (heads,), 4),
    ):
        fields.append(CarryField(name, offset, shape, size))
        offset += -(-math.prod(shape) * size // _CARRY_ALIGNMENT) * _CARRY_ALIGNMENT
    return tuple(fields), offset


def carry_bytes(model: ModelConfig, item_bytes: int, depth: int = CARRY_DEPTH) -> int:
    """Return the bytes of a row's recurrent state, or 0."""
    if model.delta is None:
        return 0
    return carry_layout(model.delta, item_bytes, depth)[1] * len(model.linear_layers)


def carry_pages(model: ModelConfig, data_plane: DataPlaneConfig) -> int:
    """Pages that a row's state takes; 0: the model has no linear attention layers."""
    return -(-carry_bytes(model, item_bytes(data_plane)) // page_bytes(model, data_plane))


def mlp_names(prefix: str, names: TensorNames = PLAIN_NAMES) -> tuple[str, str, str]:
    """Name the tensors of a gated MLP: gate, up, down."""
    gate, up, down = (f"{prefix}{name}.weight" for name in (names.gate, names.up, names.down))
    return gate, up, down


def stored_shapes(config: ModelConfig, experts: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return an instance's tensors with these experts: name -> shape."""
    shapes = embedding_shapes(config) | head_shapes(config)
    for index in range(config.num_stored_layers):
        shapes |= layer_shapes(config, index, experts)
    return shapes | (mtp_shapes(config) if config.num_mtp_layers else {})


def mtp_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the MTP layer's additional tensors: name -> shape."""
    layer, hidden = f"model.layers.{config.num_layers}.", config.hidden_size
    return {
        layer + "enorm.weight": (hidden,),
        layer + "hnorm.weight": (hidden,),
        layer + "eh_proj.weight": (hidden, 2 * hidden),
        layer + "shared_head.norm.weight": (hidden,),
    }


def embedding_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors between token ids and hidden rows: name -> shape."""
    return {f"{config.names.embedding}.weight": (config.vocab_size, config.hidden_size)}


def head_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors between hidden rows and logits: name -> shape."""
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (config.hidden_size,)}
    if config.tied_embeddings:
        return shapes | embedding_shapes(config)
    return shapes | {"lm_head.weight": (config.vocab_size, config.hidden_size)}


def layer_shapes(
    config: ModelConfig, index: int, experts: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Return one layer's tensors with these experts: name -> shape."""
    hidden, names, layer = config.hidden_size, config.names, f"model.layers.{index}."
    shapes: dict[str, tuple[int, ...]] = {
        layer + "input_layernorm.weight": (hidden,),
        layer + "post_attention_layernorm.weight": (hidden,),
    }
    kind: AttentionKind | DeltaConfig = config.attention
    if config.delta is not None and index in config.linear_layers:
        kind = config.delta
        shapes |= config.delta.stored_shapes(layer)
    else:
        shapes |= config.attention.stored_shapes(layer + names.attention, hidden)
    shapes[output_name(config, index)] = (hidden, kind.num_heads * kind.value_dim)

    def add_mlp(prefix: str, size: int, names: TensorNames = PLAIN_NAMES) -> None:
        gate, up, down = mlp_names(prefix, names)
        shapes[gate] = shapes[up] = (size, hidden)
        shapes[down] = (hidden, size)

    if index < config.num_dense_layers:
        add_mlp(layer + names.dense, config.dense_size)
        return shapes
    mixture = layer + names.mixture
    shapes[mixture + "gate.weight"] = (config.num_experts, hidden)
    if not config.softmax_gate:
        shapes[mixture + names.gate_bias] = (config.num_experts,)
    for expert in experts:
        add_mlp(f"{mixture}experts.{expert}.", config.expert_size, names)
    if config.num_shared_experts:
        add_mlp(mixture + names.shared, config.shared_size)
    if config.has_shared_gate:
        shapes[mixture + "shared_expert_gate.weight"] = (1, hidden)
    return shapes


def output_name(config: ModelConfig, index: int) -> str:
    """Name the output projection of a layer's attention."""
    layer = f"model.layers.{index}."
    if config.delta is not None and index in config.linear_layers:
        return f"{layer}{config.delta.names.prefix}{config.delta.names.output}.weight"
    return f"{layer}{config.names.attention}{config.names.output}.weight"


def is_packed(name: str, shape: Sequence[int]) -> bool:
    """True for a matrix in the dtype of the weights; a gate's is fp32."""
    return len(shape) == 2 and not name.endswith(".gate.weight")


def stays_fp8(config: ModelConfig, name: str, shape: Sequence[int]) -> bool:
    """True if gpu/deep_gemm.py reads a dense layer's weight in FP8, if stored so.

    False for hybrid models' layers, and for weights that end inside a block, but for kv_a, the last
    of its layer.
    """
    is_dense = name.startswith("model.layers.") and is_packed(name, shape)
    return (
        config.fp8_block == (128, 128)
        and config.delta is None
        and is_dense
        and not name.endswith(_NOT_DENSE)
        and shape[1] % 128 == 0
        and (shape[0] % 128 == 0 or _ends_its_layer(config, name))
    )


def _ends_its_layer(config: ModelConfig, name: str) -> bool:
    begin = getattr(config.attention, "q_lora_rank", None) or 0
    return name.endswith("kv_a_proj_with_mqa.weight") and begin % 128 == 0
