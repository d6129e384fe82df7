"""Weights of one instance, prepared for decode: everything replicated but the experts, which it reads only its own of.

Enters: a checkpoint folder, its ModelConfig, a range of experts. Leaves: tensors, ready for layers.py.
Does not know: instances' number, batches.

Legend: X hidden, C q latent, R kv_lora_rank, P rope, H heads, N nope, V value width, I expert width, E local experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from data_plane.model.config import ModelConfig
from data_plane.model.linear import Linear
from data_plane.model.rope import RopeTable
from data_plane.model.safetensors_reader import SafetensorsReader


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """A gated MLP."""

    gate_up: Linear
    """X -> 2I: gate, then up."""
    down: Linear
    """I -> X."""


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """A mixture of experts: the gate of all experts, this instance's experts, the shared expert."""

    gate: Tensor
    """[num_experts, X] fp32."""
    gate_bias: Tensor | None
    """[num_experts] fp32: for the choice only; None for a softmax gate."""
    experts: range
    """Global ids of the experts that are here."""
    mlps: tuple[MlpWeights, ...]
    """Theirs, in that order."""
    shared: MlpWeights | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; exactly one of `mlp` and `moe` is there."""

    input_norm: Tensor
    post_attention_norm: Tensor
    down_proj: Linear
    """X -> C + R + P with q LoRA: q_a, then kv_a; X -> R + P without."""
    q_norm: Tensor | None
    """[C]; None without q LoRA."""
    kv_norm: Tensor
    """[R]."""
    q_proj: Linear
    """C (X without q LoRA) -> H * (N + P)."""
    k_up: Tensor
    """W_UK, [H, N, R]: absorbed into the query."""
    v_up: Tensor
    """W_UV, [H, R, V]: applied to the output of attention."""
    o_proj: Linear
    """H * V -> X."""
    mlp: MlpWeights | None
    moe: MoeWeights | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A decoder, with the experts of one instance."""

    embedding: Tensor
    """[vocabulary, X]."""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Linear
    """X -> vocabulary."""
    rope: RopeTable


def expert_range(config: ModelConfig, instance: int, num_instances: int) -> range:
    """The experts that an instance holds. Raises ValueError if they cannot be shared out evenly."""
    if config.num_experts % num_instances:
        raise ValueError(
            f"the model has {config.num_experts} experts, which {num_instances} instances cannot share evenly; "
            f"the number of instances must divide {config.num_experts}"
        )
    share = config.num_experts // num_instances
    return range(instance * share, (instance + 1) * share)


def load_weights(path: str | Path, config: ModelConfig, dtype: torch.dtype, experts: range) -> ModelWeights:
    """Read and prepare. Raises ValueError naming the file and tensor that is missing, truncated or of another shape."""
    return _Loader(SafetensorsReader(Path(path), config.fp8_block), config, dtype, experts).model()


class _Loader:
    def __init__(self, reader: SafetensorsReader, config: ModelConfig, dtype: torch.dtype, experts: range) -> None:
        self._reader = reader
        self._config = config
        self._dtype = dtype
        self._experts = experts

    def model(self) -> ModelWeights:
        config = self._config
        vocabulary = (config.vocab_size, config.hidden_size)
        embedding = self._read("model.embed_tokens.weight", *vocabulary)
        lm_head = embedding if config.tied_embeddings else self._read("lm_head.weight", *vocabulary)
        return ModelWeights(
            embedding=embedding,
            layers=tuple(self._layer(index) for index in range(config.num_layers)),
            final_norm=self._read("model.norm.weight", config.hidden_size),
            lm_head=Linear(lm_head),
            rope=RopeTable(config.rope, config.rope_dim),
        )

    def _layer(self, index: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{index}."
        attention = prefix + "self_attn."
        hidden, heads = config.hidden_size, config.num_heads
        kv_a = self._read(attention + "kv_a_proj_with_mqa.weight", config.latent_dim, hidden)
        q_norm, q_name, down_proj = None, "q_proj.weight", kv_a
        if config.q_lora_rank is not None:
            q_a = self._read(attention + "q_a_proj.weight", config.q_lora_rank, hidden)
            down_proj = torch.cat((q_a, kv_a))
            q_norm = self._read(attention + "q_a_layernorm.weight", config.q_lora_rank)
            q_name = "q_b_proj.weight"
        kv_b = self._read(
            attention + "kv_b_proj.weight", heads * (config.nope_dim + config.v_dim), config.kv_lora_rank
        ).view(heads, config.nope_dim + config.v_dim, config.kv_lora_rank)
        is_dense = index < config.num_dense_layers
        return LayerWeights(
            input_norm=self._read(prefix + "input_layernorm.weight", hidden),
            post_attention_norm=self._read(prefix + "post_attention_layernorm.weight", hidden),
            down_proj=Linear(down_proj),
            q_norm=q_norm,
            kv_norm=self._read(attention + "kv_a_layernorm.weight", config.kv_lora_rank),
            q_proj=self._linear(attention + q_name, heads * (config.nope_dim + config.rope_dim), config.q_latent_dim),
            k_up=kv_b[:, : config.nope_dim].contiguous(),
            v_up=kv_b[:, config.nope_dim :].transpose(1, 2).contiguous(),
            o_proj=self._linear(attention + "o_proj.weight", hidden, heads * config.v_dim),
            mlp=self._mlp(prefix + "mlp.", config.dense_size) if is_dense else None,
            moe=None if is_dense else self._moe(prefix + "mlp."),
        )

    def _moe(self, prefix: str) -> MoeWeights:
        config = self._config
        shared_size = config.num_shared_experts * config.expert_size
        gate_bias = None
        if not config.softmax_gate:
            gate_bias = self._read(prefix + "gate.e_score_correction_bias", config.num_experts, dtype=torch.float32)
        return MoeWeights(
            gate=self._read(prefix + "gate.weight", config.num_experts, config.hidden_size, dtype=torch.float32),
            gate_bias=gate_bias,
            experts=self._experts,
            mlps=tuple(self._mlp(f"{prefix}experts.{expert}.", config.expert_size) for expert in self._experts),
            shared=self._mlp(prefix + "shared_experts.", shared_size) if shared_size else None,
        )

    def _mlp(self, prefix: str, size: int) -> MlpWeights:
        hidden = self._config.hidden_size
        gate_up = torch.empty(2 * size, hidden, dtype=self._dtype)
        self._reader.read_into(prefix + "gate_proj.weight", gate_up[:size])
        self._reader.read_into(prefix + "up_proj.weight", gate_up[size:])
        return MlpWeights(Linear(gate_up), self._linear(prefix + "down_proj.weight", hidden, size))

    def _linear(self, name: str, *shape: int) -> Linear:
        return Linear(self._read(name, *shape))

    def _read(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype or self._dtype)
        self._reader.read_into(name, tensor)
        return tensor
