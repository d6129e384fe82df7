"""The experts of one instance: which its slots hold, and how others get there."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from data_plane.model.config import ModelConfig
from data_plane.model.fp8_weight import Fp8Linear
from data_plane.model.linear import Packing, TorchPacking
from data_plane.model.weights import (
    MlpWeights,
    ModelWeights,
    WeightLoader,
    open_tensors,
    say_nothing,
)
from nanocp.values.experts import ExpertTable


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """A seat's experts, which come from a checkpoint; arguments as of load_weights."""

    path: str | Path
    config: ModelConfig
    dtype: torch.dtype
    weights: ModelWeights
    seat: int
    packing: Packing | None = None
    put: Callable[[int, int, MlpWeights], None] | None = None
    """Takes an expert for (layer, slot) in place of `mlps`."""

    def load(self, table: ExpertTable, loaded: Callable[[int], None] | None = None) -> int:
        """Let slots hold the seat's experts of the table; return how many were loaded.

        loaded: called after each with its size in bytes. Raises as load_weights, with a note that
        names the expert; what was loaded by then stays.
        """
        layers = [
            (index, layer.moe) for index, layer in enumerate(self.weights.layers) if layer.moe
        ]
        missing = [
            (index, moe, slot, expert)
            for number, (index, moe) in enumerate(layers)
            for slot, expert in table.at(self.seat, number).items()
            if moe.held[slot : slot + 1] != [expert]
        ]
        if not missing:
            return 0
        experts = sorted({expert for *_, expert in missing})
        reader, shapes = open_tensors(self.path, self.config, experts)
        packing = self.packing or TorchPacking()
        loader = WeightLoader(
            reader, self.config, self.dtype, range(0), shapes, say_nothing, packing
        )
        for index, moe, slot, expert in missing:
            moe.held.extend([-1] * (slot + 1 - len(moe.held)))
            moe.held[slot] = -1
            try:
                mlp = loader.expert(index, expert)
            except Exception as error:
                error.add_note(f"expert {expert} of layer {index} of {self.path}")
                raise
            if self.put is not None:
                self.put(index, slot, mlp)
            else:
                # A slot that is passed over is written before it is used.
                moe.mlps.extend([mlp] * (slot + 1 - len(moe.mlps)))
                moe.mlps[slot] = mlp
            moe.held[slot] = expert
            if loaded is not None:
                width = 1 if isinstance(mlp.down, Fp8Linear) else self.dtype.itemsize
                loaded(width * sum(math.prod(each.shape) for each in (mlp.gate_up, mlp.down)))
        return len(missing)

    def held(self, num_slots: int) -> tuple[bytes, ...]:
        """Return for each MoE layer the expert in each of this many slots, int16; -1: none."""
        return tuple(
            array("h", [*moe.held, *[-1] * (num_slots - len(moe.held))]).tobytes()
            for layer in self.weights.layers
            if (moe := layer.moe) is not None
        )
