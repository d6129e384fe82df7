"""The arithmetic of a captured step's rows around attention: fused for latent KV, else by torch.

The slow reference is model/layers.py. Legend: step/cpu.py's.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from data_plane.kv.frame_pool import FramePool
from data_plane.kv.triton_latent import (
    LatentFrames,
    absorbed_queries,
    append_rows,
    heads_values,
    start_rows,
)
from data_plane.model import layers as ops
from data_plane.model.attention_kinds.mla import LATENT_NORM_EPS, MlaConfig
from data_plane.model.config import ModelConfig
from data_plane.model.rope import RopeTable
from data_plane.model.weights import LayerWeights


class StartedRows(NamedTuple):
    """Own rows of a layer, for its attention and its peers."""

    wire_q_BC: Tensor
    """The latent wire form's row."""
    kv_BW: Tensor
    """The new KV; empty unless asked for."""
    q_BHD: Tensor


class AttentionRows(Protocol):
    """Rows before and after attention."""

    def start(
        self, place: int, layer: LayerWeights, normed_BX: Tensor, position_B: Tensor,
        slot_B: Tensor, keeps_kv: bool,
    ) -> StartedRows:  # fmt: skip
        """Project normed rows, and append their KV to the slots of frames' layer `place`."""

    def append(self, place: int, slot_A: Tensor, kv_AW: Tensor) -> None:
        """Append peers' KV."""

    def queries(self, layer: LayerWeights, wire_q_AC: Tensor, position_A: Tensor) -> Tensor:
        """Make queries [A, H, D] from the latent wire form's rows."""

    def finish(self, layer: LayerWeights, partial_BHO: Tensor) -> Tensor:
        """Turn partial outputs into heads' values [B, H, V], contiguous."""


def attention_rows(model: ModelConfig, rope: RopeTable, frames: FramePool) -> AttentionRows:
    """Choose by the model's kind of attention."""
    if isinstance(model.attention, MlaConfig):
        return LatentRows(model.attention, rope, frames)
    return PlainRows(model, rope, frames)


class PlainRows:
    """AttentionRows of any kind, by torch."""

    def __init__(self, model: ModelConfig, rope: RopeTable, frames: FramePool) -> None:
        self._model, self._rope, self._frames = model, rope, frames

    def start(
        self, place: int, layer: LayerWeights, normed_BX: Tensor, position_B: Tensor,
        slot_B: Tensor, keeps_kv: bool,
    ) -> StartedRows:  # fmt: skip
        """Project normed rows and append their KV."""
        kind = self._model.attention
        wire_q_BC, kv_BW = kind.inputs(normed_BX, position_B, layer.attention, self._rope)
        self._frames.append(place, slot_B, kv_BW)
        return StartedRows(wire_q_BC, kv_BW, self.queries(layer, wire_q_BC, position_B))

    def append(self, place: int, slot_A: Tensor, kv_AW: Tensor) -> None:
        """Append peers' KV."""
        self._frames.append(place, slot_A, kv_AW)

    def queries(self, layer: LayerWeights, wire_q_AC: Tensor, position_A: Tensor) -> Tensor:
        """Make queries from peers' rows."""
        return ops.attention_queries(wire_q_AC, position_A, layer, self._rope, self._model)

    def finish(self, layer: LayerWeights, partial_BHO: Tensor) -> Tensor:
        """Turn partial outputs into heads' values."""
        return ops.finish_attention(partial_BHO, layer, self._model).contiguous()


class LatentRows:
    """AttentionRows of latent attention, by the kernels of kv/triton_latent.py."""

    def __init__(self, kind: MlaConfig, rope: RopeTable, frames: FramePool) -> None:
        self._kind, self._rope, self._frames = kind, rope, frames

    def start(
        self, place: int, layer: LayerWeights, normed_BX: Tensor, position_B: Tensor,
        slot_B: Tensor, keeps_kv: bool,
    ) -> StartedRows:  # fmt: skip
        """Project normed rows and append their KV."""
        weights = layer.attention
        q_BC, kv_BW = start_rows(
            weights.down_proj(normed_BX), weights.q_norm, weights.kv_norm, self._rope, position_B,
            slot_B, self._slots(place), LATENT_NORM_EPS, keeps_kv,
        )  # fmt: skip
        wire_q_BC = normed_BX if weights.q_norm is None else q_BC
        return StartedRows(wire_q_BC, kv_BW, self.queries(layer, wire_q_BC, position_B))

    def append(self, place: int, slot_A: Tensor, kv_AW: Tensor) -> None:
        """Append peers' KV."""
        append_rows(kv_AW, slot_A, self._slots(place))

    def queries(self, layer: LayerWeights, wire_q_AC: Tensor, position_A: Tensor) -> Tensor:
        """Make queries from peers' rows."""
        weights = layer.attention
        return absorbed_queries(
            weights.q_proj(wire_q_AC), position_A, self._rope, weights.k_up, self._kind.rope_dim
        )

    def finish(self, layer: LayerWeights, partial_BHO: Tensor) -> Tensor:
        """Turn partial outputs into heads' values."""
        return heads_values(partial_BHO, layer.attention.v_up)

    def _slots(self, place: int) -> LatentFrames:
        kind = self._kind
        return LatentFrames(self._frames.slots[place], kind.kv_lora_rank, kind.rope_dim)
