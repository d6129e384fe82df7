"""Decode steps of linear attention layers in compiled code.

The slow reference is kv/carry_pool.py, whose legend holds.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from data_plane.kv.carry_pool import AHEAD, LACKS, CarryPool, CarryRows
from data_plane.model.attention_kinds.delta import NORM_EPS, DeltaWeights
from data_plane.model.sizes import carry_layout
from data_plane.native.calls import DeltaFields


class NativeDelta:
    """Runs tokens of rows through their recurrent states."""

    def __init__(self, calls: SimpleNamespace) -> None:
        self._calls = calls
        # By the id of a layer's weights, which are kept too, so that no other object can get it.
        self._deltas: dict[int, tuple[Any, ...]] = {}

    def linear_attention(
        self, carry: CarryPool, layer: int, rows: CarryRows, x_BX: Tensor, weights: DeltaWeights
    ) -> Tensor:
        """Run one token of each row, or call CarryPool.step for other depths and widths."""
        config = carry.config
        if carry.depth != 1 or config.value_dim % 16:
            return carry.step(layer, rows, x_BX, weights)
        channels, gate, decay, beta = config.projections(x_BX, weights)
        num_rows = x_BX.shape[0]
        out_BHV = x_BX.new_empty(num_rows, config.num_heads, config.value_dim)
        wrong = self._calls.delta(
            self._delta(carry, weights),
            carry.layers[layer].state.data_ptr(),  # the first of a layer's fields
            carry.frame_bytes,
            rows.frame_B.data_ptr(),
            rows.position_B.data_ptr(),
            rows.live_B.data_ptr(),
            num_rows,
            channels.data_ptr(),
            beta.data_ptr(),
            channels.stride(0),
            gate.data_ptr(),
            gate.stride(0),
            decay.data_ptr(),
            decay.stride(0),
            out_BHV.data_ptr(),
        )
        if wrong:
            raise RuntimeError(AHEAD if wrong == 1 else LACKS)
        return out_BHV

    def _delta(self, carry: CarryPool, weights: DeltaWeights) -> Any:
        known = self._deltas.get(id(weights))
        if known is None:
            config, conv_SC = carry.config, weights.conv.T.contiguous()
            places, _ = carry_layout(config, conv_SC.itemsize, carry.depth)
            fields = DeltaFields(
                conv=conv_SC.data_ptr(),
                norm=weights.norm.data_ptr(),
                rate=weights.decay_rate.data_ptr(),
                bias=weights.decay_bias.data_ptr(),
                key_heads=config.num_key_heads,
                heads=config.num_heads,
                key_dim=config.key_dim,
                value_dim=config.value_dim,
                decays=config.decay_width,
                conv_size=config.conv_size,
                key_eps=NORM_EPS,
                norm_eps=config.norm_eps,
                decay_bound=config.decay_bound or 0,
                has_sigmoid_gate=config.has_channel_decay,
                **{place.name: place.offset for place in places},
            )
            known = self._deltas[id(weights)] = weights, conv_SC, ctypes.pointer(fields)
        return known[2]
