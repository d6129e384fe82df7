"""Recurrent states of Gated DeltaNet layers, from vLLM's blocks to pages.

Legend: B blocks, C channels of the convolution, S inputs of it that are kept, H value heads, K
width of a key, V of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data_plane.kv.carry_pool import CarryPool
from data_plane.model.attention_kinds.delta import DeltaConfig


class StateViews(NamedTuple):
    """vLLM's states of one layer."""

    group: int
    """vLLM's, for the block of a request's state."""
    inputs: Tensor
    """[B, S, C]: the convolution's newest inputs."""
    state: Tensor
    """[B, H, K, V] fp32."""


def state_views(
    name: str, kept: Sequence[Tensor], delta: DeltaConfig, dtype: torch.dtype, is_cpu: bool
) -> tuple[Tensor, Tensor]:
    """Return the layer's inputs and states as of StateViews, without a copy. dtype: of the rows.

    kept: vLLM's [B, S, C] or [B, C, S], and [B, H, V, K], on a CPU [B, H, K, V]. Raises ValueError
    for other shapes or dtypes.
    """
    inputs, state = kept
    wide = (delta.conv_size - 1, delta.num_channels)
    if tuple(inputs.shape[1:]) == wide[::-1]:
        inputs = inputs.transpose(1, 2)
    named = (delta.num_heads, delta.value_dim, delta.key_dim)
    if tuple(inputs.shape[1:]) != wide or tuple(state.shape[1:]) != named:
        raise ValueError(
            f"the states of {name} are {[list(each.shape) for each in kept]}; they must be the "
            f"{list(wide)} inputs of the convolution and a state of {list(named)}"
        )
    if state.dtype != torch.float32 or inputs.dtype != dtype:
        raise ValueError(
            f"the states of {name} are {inputs.dtype} and {state.dtype}; NanoCP takes the inputs "
            f"of the convolution in {dtype} and states in torch.float32: --mamba-cache-dtype auto "
            "--mamba-ssm-cache-dtype float32"
        )
    if is_cpu:
        return inputs, state.view(-1, delta.num_heads, delta.key_dim, delta.value_dim)
    return inputs, state.transpose(2, 3)


class StateReader:
    """Reads states; each read overwrites the last pages."""

    def __init__(
        self, delta: DeltaConfig, layers: Sequence[StateViews], dtype: torch.dtype, page_bytes: int
    ) -> None:
        """layers: in order. dtype: of rows. page_bytes: of a page of KV."""
        self._layers = layers
        device = layers[0].state.device
        self._pool = CarryPool(delta, len(layers), 1, dtype, page_bytes, device=device)

    def page(self, blocks: Sequence[Sequence[int]], num_tokens: int, number: int) -> Any:
        """Return a page of the state of a prompt's num_tokens tokens, uint8.

        blocks: the request's, by group. Pages come in order: the first call reads.
        """
        if number == 0:
            self._read(blocks, num_tokens)
        page = self._pool.page(0, number)
        return page.cpu().numpy() if isinstance(page, Tensor) else page

    def _read(self, blocks: Sequence[Sequence[int]], num_tokens: int) -> None:
        self._pool.clear(0, num_tokens)
        for (group, inputs, state), fields in zip(self._layers, self._pool.layers, strict=True):
            # Without prefix caching vLLM has one state of a request, in one block.
            block, ring = blocks[group][0], fields.channels[0]
            num_kept = min(num_tokens, inputs.shape[1])
            positions = torch.arange(num_tokens - num_kept, num_tokens)
            ring[positions % len(ring)] = inputs[block, -num_kept:]
            fields.state[0] = state[block]
