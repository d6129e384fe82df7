"""Recurrent states of one instance's rows in linear attention layers, private to the instance.

An abandoned step runs again, but a state cannot take a token twice. So it is folded late
(protocol.md, late fold): beside it lie, by position, the newest tokens' records (decay, key,
correction) and the convolution's last inputs; a step folds those that `depth` newer tokens have
followed.

Legend: that of attention/delta_rule.py, C channels, L layers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

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
    """Each row's frame; the scratch frame for stopped rows. int64, or int32 on a GPU."""
    position_B: Tensor
    """int64."""
    live_B: Tensor
    """bool."""


class CarryFields(NamedTuple):
    """A layer's part of every state, [frames, ...]: views of one memory."""

    state: Tensor
    """[H, K, V] fp32."""
    decay: Tensor
    """[places, H, D] fp32, records by position; so are `key` and `u`."""
    key: Tensor
    """[places, J, K] fp32."""
    u: Tensor
    """[places, H, V] fp32."""
    channels: Tensor
    """[conv_size - 1 + places, C], by position, in the dtype of rows."""
    folded: Tensor
    """[H] int32: tokens in each head's state."""


class CarryPool:
    """Memory of `num_frames` states, and a scratch frame."""

    def __init__(
        self,
        config: DeltaConfig,
        num_layers: int,
        num_frames: int,
        dtype: torch.dtype,
        page_bytes: int = 1,
        depth: int = CARRY_DEPTH,
        device: str | torch.device = "cpu",
        held: range | None = None,
    ) -> None:
        """Allocate the frames, all zero. dtype: of rows. depth: newest tokens never folded.

        page_bytes: of the pages of states. held: the layers here; None: all. Raises ValueError if
        the device has too little memory.
        """
        self.config, self.depth, self.scratch = config, depth, num_frames
        fields, layer_bytes = carry_layout(config, dtype.itemsize, depth)
        held = range(num_layers) if held is None else held
        is_last, num_layers, used = held.stop == num_layers, len(held), len(held) * layer_bytes
        self._first_byte, end = held.start * layer_bytes, held.stop * layer_bytes
        end = -(-end // page_bytes) * page_bytes if is_last else end
        self.frame_bytes, self._page_bytes = end - self._first_byte, page_bytes
        num_bytes = (num_frames + 1) * self.frame_bytes
        try:
            if torch.device(device).type == "cpu":
                memory = torch.from_numpy(huge_pages(num_bytes, is_taken=True))
            else:
                memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        except (RuntimeError, OSError, OverflowError) as error:
            gib = num_bytes / 2**30
            raise ValueError(
                f"the states of {num_frames} rows take {gib:.1f} GiB, which cannot be allocated: "
                "an instance has cluster.bounds.max_rows of them, the prefill 64"
            ) from error
        self._bytes = memory.view(num_frames + 1, self.frame_bytes)
        by_layer = self._bytes[:, :used].view(num_frames + 1, num_layers, layer_bytes)
        views = {}
        for name, offset, shape, item_bytes in fields:
            kind = {"folded": torch.int32, "channels": dtype}.get(name, torch.float32)
            part = by_layer[..., offset : offset + math.prod(shape) * item_bytes].view(kind)
            views[name] = part.view(num_frames + 1, num_layers, *shape).transpose(0, 1)
        self._folded = views["folded"]
        self.layers = [
            CarryFields(**{name: view[layer] for name, view in views.items()})
            for layer in range(num_layers)
        ]

    def clear(self, frame: int, num_tokens: int = 0) -> None:
        """Give a frame the state of no token, or of tokens without content."""
        self._bytes[frame] = 0
        self._folded[:, frame] = num_tokens

    def step(self, layer: int, rows: CarryRows, x_BX: Tensor, weights: DeltaWeights) -> Tensor:
        """Run one token of each row, repeatably; returns heads' outputs, gated, [B, H, V].

        x_BX: normed hidden rows. Raises RuntimeError if a state has tokens after the row's
        position, or too few before it.
        """
        config, (frame_B, position_B, live_B) = self.config, rows
        given, fields = config.inputs(x_BX, weights), self.layers[layer]
        ring = fields.channels
        ring[frame_B, position_B % ring.shape[1]] = given.channels_BC
        seen_BS = position_B[:, None] + torch.arange(1 - config.conv_size, 1)
        seen_BSC = ring[frame_B[:, None], seen_BS % ring.shape[1]] * (seen_BS >= 0)[..., None]
        q_BJK, key_BJK, value_BHV = config.heads(seen_BSC.transpose(1, 2), weights)
        q_BHK, key_BHK = (of_heads(x, config.num_heads) for x in (q_BJK, key_BJK))
        state = self._until(fields, rows)
        decay = given.decay_BHD
        u_BHV = correction(state, decay, key_BHK, value_BHV, given.beta_BH)
        place_B = position_B % fields.u.shape[1]
        fields.decay[frame_B, place_B] = decay
        fields.key[frame_B, place_B] = key_BJK
        fields.u[frame_B, place_B] = u_BHV
        o_BHV = token_output(state, decay, q_BHK, key_BHK, u_BHV)
        o_BHV = config.finish(o_BHV, given.gate_BHV, weights)
        # The scratch frame's state is that of many rows: nobody may read it.
        return torch.where(live_B[:, None, None], o_BHV, 0.0)

    def _until(self, fields: CarryFields, rows: CarryRows) -> Tensor:
        """Fold due records; return the states before the rows' tokens, [B, H, K, V]."""
        frame_B, position_B, live_B = rows
        folded_B = fields.folded[frame_B, 0]
        num_behind_B = position_B - folded_B
        if bool((live_B & (num_behind_B < 0)).any()):
            raise RuntimeError(AHEAD)
        if bool((live_B & (num_behind_B > self.depth)).any()):
            raise RuntimeError(LACKS)
        if bool((due := live_B & (num_behind_B == self.depth)).any()):
            frame, at = frame_B[due], folded_B[due]
            fields.state[frame] = self._with_record(fields, frame, at, fields.state[frame])
            fields.folded[frame] += 1
        state_BHKV: Tensor = fields.state[frame_B]
        for back in range(self.depth - 1, 0, -1):
            at_B = position_B - back
            is_record = (live_B & (at_B >= folded_B))[:, None, None, None]
            added = self._with_record(fields, frame_B, at_B.clamp(min=0), state_BHKV)
            state_BHKV = torch.where(is_record, added, state_BHKV)
        return state_BHKV

    def _with_record(
        self, fields: CarryFields, frame_B: Tensor, at_B: Tensor, state: Tensor
    ) -> Tensor:
        place_B = at_B.long() % fields.u.shape[1]
        key = of_heads(fields.key[frame_B, place_B], self.config.num_heads)
        return add_token(state, fields.decay[frame_B, place_B], key, fields.u[frame_B, place_B])

    def extend(
        self, layer: int, frame: int, first: int, x_TX: Tensor, weights: DeltaWeights
    ) -> Tensor:
        """Run a prompt's tokens from position `first` on; returns heads' outputs, [T, H, V].

        They are folded at once: an abandoned prompt begins anew.
        """
        config, given = self.config, self.config.inputs(x_TX, weights)
        fields, before = self.layers[layer], config.conv_size - 1
        ring = fields.channels[frame]
        earlier = torch.arange(first - before, first)
        earlier_SC = ring[earlier % len(ring)] * (earlier >= 0)[:, None]
        all_TC = torch.cat((earlier_SC, given.channels_BC))
        q_TJK, key_TJK, value_THV = config.heads(all_TC.unfold(0, config.conv_size, 1), weights)
        kept = torch.arange(max(len(x_TX) - before, 0), len(x_TX))
        ring[(first + kept) % len(ring)] = given.channels_BC[kept]
        q_THK, key_THK = (of_heads(x, config.num_heads) for x in (q_TJK, key_TJK))
        o_THV, fields.state[frame] = many_tokens(
            fields.state[frame], q_THK, key_THK, value_THV, given.decay_BHD, given.beta_BH
        )
        fields.folded[frame] = first + len(x_TX)
        return config.finish(o_THV, given.gate_BHV, weights)

    def num_folded(self, frame: int) -> int:
        """Return the tokens in a state, of the head and layer with most."""
        return int(self._folded[:, frame].max())

    def page(self, frame: int, number: int) -> Any:
        """Return this pool's part of a page of a state, without a copy."""
        begin = number * self._page_bytes - self._first_byte
        page = self._bytes[frame, max(begin, 0) : max(begin + self._page_bytes, 0)]
        return page if page.is_cuda else page.numpy()

    def part(self, frame: int, number: int) -> tuple[int, Any]:
        """Return the offset of `page` in the whole page, in bytes, and the page."""
        before = max(self._first_byte - number * self._page_bytes, 0)
        return before, self.page(frame, number)
