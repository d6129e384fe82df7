"""The states of one instance's rows in linear attention layers, private to the instance.

Enters: rows of a step with their state frames; the tokens of prompts. Leaves: heads' outputs;
states as bytes. Does not know: requests, tickets, which row has which frame.

KV is written by position, so a step that is abandoned and run again does no harm. A state that
already has a token cannot take it again. So it is folded late (protocol.md, late fold): beside the
state lie, by position, the newest tokens' records (decay, key, correction) and the last inputs of
the convolution. A step folds only records that `depth` newer tokens have followed, and counts them.

Legend: B rows, T tokens, H value heads, K width of a key, V of a value, C channels, L layers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data_plane.attention.delta_rule import (
    add_token,
    correction,
    many_tokens,
    of_heads,
    token_output,
)
from data_plane.kv.huge_pages import huge_pages
from data_plane.model.attention_kinds.delta import DeltaConfig, DeltaWeights
from data_plane.model.sizes import CARRY_DEPTH, carry_layout

AHEAD = "a state has tokens after its row's position"
LACKS = "a state lacks tokens before its row's position"


class CarryRows(NamedTuple):
    """The rows of a step."""

    frame_B: Tensor
    """int64: where each row's state lies; rows that have stopped take the scratch frame."""
    position_B: Tensor
    """int64."""
    live_B: Tensor
    """bool."""


class CarryPool:
    """Memory of `num_frames` states, then a scratch frame for rows that must not change one."""

    def __init__(
        self,
        config: DeltaConfig,
        num_layers: int,
        num_frames: int,
        dtype: torch.dtype,
        page_bytes: int = 1,
        depth: int = CARRY_DEPTH,
    ) -> None:
        """Allocate the frames, all zero. dtype: of rows. depth: newest tokens never folded.

        page_bytes: of the pages that states travel in. Raises ValueError if the machine has too
        little memory.
        """
        self.config, self.depth, self.scratch = config, depth, num_frames
        fields, self._layer_bytes = carry_layout(config, dtype.itemsize, depth)
        layer_bytes = self._layer_bytes
        used = num_layers * layer_bytes
        self.frame_bytes = -(-used // page_bytes) * page_bytes
        self._page_bytes = page_bytes
        try:
            memory = huge_pages((num_frames + 1) * self.frame_bytes, is_taken=True)
        except (OSError, OverflowError) as error:
            gib = (num_frames + 1) * self.frame_bytes / 2**30
            raise ValueError(
                f"the states of {num_frames} rows take {gib:.1f} GiB, which cannot be allocated: "
                "an instance has cluster.bounds.max_rows of them, the prefill 64"
            ) from error
        self._bytes = torch.from_numpy(memory).view(num_frames + 1, self.frame_bytes)
        by_layer = self._bytes[:, :used].view(num_frames + 1, num_layers, layer_bytes)
        views = {}
        for name, offset, shape, item_bytes in fields:
            kind = {"folded": torch.int32, "channels": dtype}.get(name, torch.float32)
            part = by_layer[..., offset : offset + math.prod(shape) * item_bytes].view(kind)
            views[name] = part.view(num_frames + 1, num_layers, *shape).transpose(0, 1)
        self._state, self._folded = views["state"], views["folded"]
        self._channels = views["channels"]
        self._decay, self._key, self._u = views["decay"], views["key"], views["u"]

    def address(self, layer: int) -> int:
        """Where this layer's part of the first frame lies; the next is frame_bytes further."""
        return self._bytes.data_ptr() + layer * self._layer_bytes

    def clear(self, frame: int, num_tokens: int = 0) -> None:
        """The frame gets the state of no token, or of tokens without content."""
        self._bytes[frame] = 0
        self._folded[:, frame] = num_tokens

    def step(self, layer: int, rows: CarryRows, x_BX: Tensor, weights: DeltaWeights) -> Tensor:
        """Run one token of each row; returns heads' outputs, gated, [B, H, V].

        x_BX: normed hidden rows. Run again after a step that was abandoned, it does the same.
        Raises RuntimeError if a state has tokens after the row's position, or too few before it.
        """
        config, (frame_B, position_B, live_B) = self.config, rows
        given = config.inputs(x_BX, weights)
        ring = self._channels[layer]
        ring[frame_B, position_B % ring.shape[1]] = given.channels_BC
        seen_BS = position_B[:, None] + torch.arange(1 - config.conv_size, 1)
        seen_BSC = ring[frame_B[:, None], seen_BS % ring.shape[1]] * (seen_BS >= 0)[..., None]
        q_BJK, key_BJK, value_BHV = config.heads(seen_BSC.transpose(1, 2), weights)
        q_BHK, key_BHK = (of_heads(x, config.num_heads) for x in (q_BJK, key_BJK))
        state = self._until(layer, rows)
        decay = given.decay_BHD
        u_BHV = correction(state, decay, key_BHK, value_BHV, given.beta_BH)
        place_B = position_B % self._decay.shape[2]
        self._decay[layer, frame_B, place_B] = decay
        self._key[layer, frame_B, place_B] = key_BJK
        self._u[layer, frame_B, place_B] = u_BHV
        o_BHV = token_output(state, decay, q_BHK, key_BHK, u_BHV)
        o_BHV = config.finish(o_BHV, given.gate_BHV, weights)
        # The scratch frame's state is that of many rows: nobody may read it.
        return torch.where(live_B[:, None, None], o_BHV, 0.0)

    def _until(self, layer: int, rows: CarryRows) -> Tensor:
        """Fold what is due; the states of all tokens before the rows', [B, H, K, V]."""
        folded, state = self._folded[layer, :, 0], self._state[layer]
        frame_B, position_B, live_B = rows
        num_behind_B = position_B - folded[frame_B]
        if bool((live_B & (num_behind_B < 0)).any()):
            raise RuntimeError(AHEAD)
        if bool((live_B & (num_behind_B > self.depth)).any()):
            raise RuntimeError(LACKS)
        if bool((due := live_B & (num_behind_B == self.depth)).any()):
            frame = frame_B[due]
            state[frame] = self._with_record(layer, frame, folded[frame], state[frame])
            folded[frame] += 1
        state_BHKV: Tensor = state[frame_B]
        for back in range(self.depth - 1, 0, -1):
            at_B = position_B - back
            is_record = (live_B & (at_B >= folded[frame_B]))[:, None, None, None]
            added = self._with_record(layer, frame_B, at_B.clamp(min=0), state_BHKV)
            state_BHKV = torch.where(is_record, added, state_BHKV)
        return state_BHKV

    def _with_record(self, layer: int, frame_B: Tensor, at_B: Tensor, state: Tensor) -> Tensor:
        place_B = at_B.long() % self._decay.shape[2]
        key = of_heads(self._key[layer, frame_B, place_B], self.config.num_heads)
        decay, u = self._decay[layer, frame_B, place_B], self._u[layer, frame_B, place_B]
        return add_token(state, decay, key, u)

    def extend(
        self, layer: int, frame: int, first: int, x_TX: Tensor, weights: DeltaWeights
    ) -> Tensor:
        """Run a prompt's tokens from position `first` on; returns heads' outputs, [T, H, V].

        x_TX: normed hidden rows. They are folded at once: a prompt that is given up is begun anew.
        """
        config, given = self.config, self.config.inputs(x_TX, weights)
        ring, before = self._channels[layer, frame], config.conv_size - 1
        earlier = torch.arange(first - before, first)
        earlier_SC = ring[earlier % len(ring)] * (earlier >= 0)[:, None]
        all_TC = torch.cat((earlier_SC, given.channels_BC))
        q_TJK, key_TJK, value_THV = config.heads(all_TC.unfold(0, config.conv_size, 1), weights)
        kept = torch.arange(max(len(x_TX) - before, 0), len(x_TX))
        ring[(first + kept) % len(ring)] = given.channels_BC[kept]
        q_THK, key_THK = (of_heads(x, config.num_heads) for x in (q_TJK, key_TJK))
        o_THV, self._state[layer, frame] = many_tokens(
            self._state[layer, frame], q_THK, key_THK, value_THV, given.decay_BHD, given.beta_BH
        )
        self._folded[layer, frame] = first + len(x_TX)
        return config.finish(o_THV, given.gate_BHV, weights)

    def num_folded(self, frame: int) -> int:
        """Tokens that a state has, in the layer with most."""
        return int(self._folded[:, frame].max())

    def page(self, frame: int, number: int) -> np.ndarray:
        """A page of a frame's own bytes; no copy."""
        begin = number * self._page_bytes
        page: np.ndarray = self._bytes[frame, begin : begin + self._page_bytes].numpy()
        return page
