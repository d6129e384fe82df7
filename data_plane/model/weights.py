"""Weights of one instance: its experts, and all that is none.

Legend: X hidden, H heads, V value width, I expert width, E local experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from data_plane.model.config import ModelConfig
from data_plane.model.fp8_weight import FP8, Fp8Linear, Fp8Weight
from data_plane.model.linear import LinearLayer, Packing, TorchPacking
from data_plane.model.rope import RopeTable
from data_plane.model.safetensors_reader import SafetensorsReader, scale_shape, staging_tensor
from data_plane.model.sizes import (
    is_packed,
    mlp_names,
    mtp_shapes,
    output_name,
    stored_shapes,
)
from nanocp.values.experts import home_experts


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """A gated MLP."""

    gate_up: LinearLayer
    """From X to 2I: gate, then up."""
    down: LinearLayer
    """From I to X."""
    limit: float = math.inf


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """A MoE layer: the gate of all experts, this instance's experts, the shared expert."""

    gate: Tensor
    """[num_experts, X] fp32, packed (linear.Packing)."""
    gate_bias: Tensor | None
    """[num_experts] fp32, for the choice only."""
    held: list[int]
    """The expert in each slot, -1: none."""
    mlps: list[MlpWeights]
    """By slot; empty on a GPU (moe.gpu.gpu_weights)."""
    shared: MlpWeights | None
    shared_gate: Tensor | None = None
    """[1, X]."""
    limit: float = math.inf


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; exactly one of `mlp` and `moe` is None."""

    input_norm: Tensor
    post_attention_norm: Tensor
    attention: Any
    o_proj: LinearLayer
    """From H * V to X."""
    mlp: MlpWeights | None
    moe: MoeWeights | None


class LogitsWeights(Protocol):
    """Weights from hidden rows to logits: a model's, or HeadWeights."""

    @property
    def final_norm(self) -> Tensor:
        """[X]."""

    @property
    def lm_head(self) -> LinearLayer:
        """From X to the vocabulary."""


class HeadWeights(NamedTuple):
    """Weights from hidden rows to logits."""

    final_norm: Tensor
    lm_head: LinearLayer
    """From X to the vocabulary."""


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A decoder, with the experts of one instance."""

    embedding: Tensor
    """[vocabulary, X]; bf16 if the packing keeps it."""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: LinearLayer
    """From X to the vocabulary."""
    rope: RopeTable
    mtp: MtpWeights | None = None
    """The additions of an MTP layer, if the last one is."""


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """An MTP layer's weights beside its decoder layer."""

    embedding_norm: Tensor
    hidden_norm: Tensor
    projection: LinearLayer
    """From 2X to X: the normed embedding of the next token, then the normed hidden row."""
    head_norm: Tensor


def expert_range(config: ModelConfig, instance: int, num_instances: int) -> range:
    """Return the ids of an instance's first experts (experts.home_experts)."""
    return home_experts(config.num_experts, instance, num_instances)


def open_tensors(
    path: str | Path, config: ModelConfig, experts: Sequence[int]
) -> tuple[SafetensorsReader, dict[str, tuple[int, ...]]]:
    """Open folder `path`, after a check of names and shapes by config.json.

    Raises ValueError naming a field and sizes.
    """
    reader = SafetensorsReader(Path(path), config.fp8_block)
    for what, number in (("layers", config.num_stored_layers), ("experts", config.num_experts)):
        if number > reader.num_tensors:
            raise ValueError(
                f"{path}: config.json says that there are {number} {what}, and the folder has "
                f"{reader.num_tensors} tensors"
            )
    shapes = stored_shapes(config, experts)
    reader.check(shapes)
    reader.check_dtypes(shapes)
    for name, shape in shapes.items():
        if (stored := reader.shape(name)) != shape:
            sizes = ", ".join(
                f"{field.name} is {size}"
                for field in fields(config)
                if (size := getattr(config, field.name)) in set(shape) - set(stored)
            )
            raise ValueError(
                f"{path}: the tensor {name} has shape {list(stored)}; by config.json it must have "
                f"{list(shape)}{sizes and f' ({sizes})'}"
            )
    return reader, shapes


def stores_bf16(path: str | Path, config: ModelConfig) -> bool:
    """True if every matrix but gates' is in bf16; ValueError naming missing tensors."""
    reader, shapes = open_tensors(path, config, range(config.num_experts))
    return all(reader.is_bf16(name) for name, shape in shapes.items() if is_packed(name, shape))


def stores_fp8_experts(path: str | Path, config: ModelConfig) -> bool:
    """True if every matrix of experts is in FP8; ValueError naming missing tensors."""
    reader, shapes = open_tensors(path, config, range(config.num_experts))
    others = stored_shapes(config, range(0))
    return all(reader.is_fp8(name) for name in shapes if name not in others)


Progress = Callable[[int, int], None]
"""Called after every tensor with (elements done, elements in all)."""


def say_nothing(done: int, total: int) -> None:
    """The default Progress."""


def load_weights(
    path: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    experts: range,
    progress: Progress = say_nothing,
    packing: Packing | None = None,
) -> ModelWeights:
    """Read a checkpoint's weights and prepare them, with at most one stored tensor beside them.

    dtype: of all weights but gates (fp32), and FP8 or bf16 matrices that `packing` keeps. Raises
    ValueError naming missing tensors, before any is read, or the file and tensor that is truncated
    or has another shape.
    """
    reader, shapes = open_tensors(path, config, experts)
    return WeightLoader(
        reader, config, dtype, experts, shapes, progress, packing or TorchPacking()
    ).model()


class WeightLoader:
    """Reads one checkpoint, one stored tensor at a time."""

    def __init__(
        self,
        reader: SafetensorsReader,
        config: ModelConfig,
        dtype: torch.dtype,
        experts: range,
        shapes: Mapping[str, tuple[int, ...]],
        progress: Progress,
        packing: Packing,
    ) -> None:
        """shapes: of all tensors to read. Other arguments: load_weights."""
        self._reader = reader
        self._config = config
        self._dtype = dtype
        self._matrix_dtype = torch.bfloat16 if packing.keeps_bf16 else dtype
        self._experts = experts
        self._shapes = shapes
        self._progress = progress
        self.packing = packing
        self._total = sum(math.prod(shape) for shape in shapes.values())
        self._done = 0

    def model(self) -> ModelWeights:
        """Return all weights of an instance."""
        config = self._config
        embedding = self.embedding()
        return ModelWeights(
            embedding=embedding,
            layers=tuple(self.layer(index) for index in range(config.num_stored_layers)),
            **self.head(embedding)._asdict(),
            rope=RopeTable(config.rope, config.attention.rope_dim),
            mtp=self.mtp() if config.num_mtp_layers else None,
        )

    def mtp(self) -> MtpWeights:
        """Return the MTP layer's additions."""
        names = iter(mtp_shapes(self._config))
        return MtpWeights(
            self.tensor(next(names)),
            self.tensor(next(names)),
            self.linear(next(names)),
            self.tensor(next(names)),
        )

    def embedding(self) -> Tensor:
        """Return [vocabulary, X]."""
        return self.tensor(f"{self._config.names.embedding}.weight", self._matrix_dtype)

    def head(self, embedding: Tensor | None) -> HeadWeights:
        """Return the head. embedding: if it has been read."""
        final_norm = self.tensor("model.norm.weight")
        if not self._config.tied_embeddings:
            return HeadWeights(final_norm, self._plain_linear("lm_head.weight"))
        if embedding is None:
            embedding = self.embedding()
        return HeadWeights(final_norm, self.packing.linear(embedding))

    def layer(self, index: int, experts: Sequence[int] | None = None) -> LayerWeights:
        """Return one decoder layer, with these experts; None: with the instance's."""
        experts = self._experts if experts is None else experts
        config, prefix = self._config, f"model.layers.{index}."
        is_dense, names = index < config.num_dense_layers, config.names
        if config.delta is not None and index in config.linear_layers:
            attention: Any = config.delta.load(self, prefix)
        else:
            attention = config.attention.load(self, prefix + names.attention)
        return LayerWeights(
            input_norm=self.tensor(prefix + "input_layernorm.weight"),
            post_attention_norm=self.tensor(prefix + "post_attention_layernorm.weight"),
            attention=attention,
            o_proj=self.linear(output_name(config, index)),
            mlp=self._mlp(*mlp_names(prefix + names.dense)) if is_dense else None,
            moe=None if is_dense else self._moe(index, prefix + names.mixture, experts),
        )

    def _moe(self, index: int, prefix: str, experts: Sequence[int]) -> MoeWeights:
        bias, (limit, shared_limit) = None, self._config.limits_of(index)
        if not self._config.softmax_gate:
            bias = self.tensor(prefix + self._config.names.gate_bias, torch.float32)
        return MoeWeights(
            gate=self.packing.gate_weight(self.tensor(prefix + "gate.weight", torch.float32)),
            gate_bias=bias,
            held=list(experts),
            mlps=self._expert_mlps([f"{prefix}experts.{expert}." for expert in experts]),
            shared=self._mlp(*mlp_names(prefix + self._config.names.shared), shared_limit)
            if self._config.num_shared_experts
            else None,
            shared_gate=self.tensor(prefix + "shared_expert_gate.weight")
            if self._config.has_shared_gate
            else None,
            limit=limit,
        )

    def expert(self, layer: int, expert: int) -> MlpWeights:
        """Return one expert of a layer."""
        prefix = f"model.layers.{layer}.{self._config.names.mixture}experts.{expert}."
        (mlp,) = self._expert_mlps([prefix])
        return mlp

    def _expert_mlps(self, prefixes: list[str]) -> list[MlpWeights]:
        return self._mlps([mlp_names(prefix, self._config.names) for prefix in prefixes])

    def _mlps(self, expert_names: list[tuple[str, str, str]]) -> list[MlpWeights]:
        names = [name for expert in expert_names for name in expert]
        # Either all experts of a layer stay FP8, or none: one grouped GEMM takes them all.
        is_fp8 = self.packing.keeps_fp8 and all(map(self._reader.is_fp8, names))
        linear = self._fp8_linear if is_fp8 else self._plain_linear
        return [MlpWeights(linear(gate, up), linear(down)) for gate, up, down in expert_names]

    def _mlp(self, gate: str, up: str, down: str, limit: float = math.inf) -> MlpWeights:
        return MlpWeights(self.linear(gate, up), self.linear(down), limit)

    def linear(self, *names: str) -> LinearLayer:
        """Make one linear layer of these weights, one under the other."""
        block = self._config.fp8_block
        stays_fp8 = (
            block is not None
            and self.packing.keeps_fp8
            and all(map(self._reader.is_fp8, names))
            # Else a block would have rows of two weights, each with a scale of its own.
            and not any(self._shapes[name][0] % block[0] for name in names[:-1])
        )
        return self._fp8_linear(*names) if stays_fp8 else self._plain_linear(*names)

    def _plain_linear(self, *names: str) -> LinearLayer:
        shapes = [self._shapes[name] for name in names]
        num_rows = sum(rows for rows, _ in shapes)
        weight = staging_tensor((num_rows, shapes[0][1]), self._matrix_dtype)
        for name, part in zip(
            names, torch.split(weight, [rows for rows, _ in shapes]), strict=True
        ):
            self._read_into(name, part)
        return self.packing.linear(weight)

    def _fp8_linear(self, *names: str) -> LinearLayer:
        """Make one FP8 layer of weights, whose rows end at a block's end."""
        assert self._config.fp8_block is not None
        shapes = [self._shapes[name] for name in names]
        rows, width = sum(rows for rows, _ in shapes), shapes[0][1]
        values = staging_tensor((rows, width), FP8)
        scale = torch.empty(scale_shape((rows, width), self._config.fp8_block))
        row = block_row = 0
        for name, shape in zip(names, shapes, strict=True):
            num_blocks, _ = scale_shape(shape, self._config.fp8_block)
            own = values[row : row + shape[0]], scale[block_row : block_row + num_blocks]
            self._reader.read_fp8_into(name, *own)
            self._report(shape[0] * width)
            row, block_row = row + shape[0], block_row + num_blocks
        return Fp8Linear(Fp8Weight(values, scale, self._config.fp8_block))

    def staged(self, name: str) -> Tensor:
        """Read a matrix to be laid out anew, into memory that is given back."""
        tensor = staging_tensor(self._shapes[name], self._matrix_dtype)
        self._read_into(name, tensor)
        return tensor

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor as it is, by default in the rows' dtype."""
        if (
            self._config.has_offset_norms
            and name.endswith("norm.weight")
            and "attn.norm" not in name
        ):
            # A weight near 0 would lose its last bits if 1 + it were rounded to bf16.
            tensor = torch.empty(self._shapes[name], dtype=torch.float32)
            self._read_into(name, tensor)
            return tensor + 1
        tensor = torch.empty(self._shapes[name], dtype=dtype or self._dtype)
        self._read_into(name, tensor)
        return tensor

    def _read_into(self, name: str, target: Tensor) -> None:
        self._reader.read_into(name, target)
        self._report(target.numel())

    def _report(self, num_elements: int) -> None:
        self._done += num_elements
        self._progress(self._done, self._total)
