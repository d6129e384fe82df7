"""Paged attention in plain torch: the fast path of the CPU.

Legend: A attention rows, H heads, D width of a query, O width of a partial, F frames, S = 64, T
tokens, W width of KV. Latent KV: W = D, O = R (kv_lora_rank), and the first R of W are the values.
K/V heads: G of them, D = O = E (the width of a head), W = 2GE, keys first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from data_plane.attention.lse_merge import lse_merge
from data_plane.attention.paged import Attention
from nanocp.values.plan import PAGE_SIZE

_MIN_RUN_PAGES = 8
"""Least run of adjacent frames that is read in place; shorter runs are gathered."""
_MAX_GATHERED_PAGES = 32
_MAX_PIECE_TOKENS = 2048
"""It bounds memory at any length."""


@dataclass(frozen=True, slots=True)
class _Piece:
    num_tokens: int
    begin: int
    """The first slot (frame * 64 + offset) of a piece read in place."""
    frames: Tensor | None = None
    """[pages] int64, gathered: the piece is their first tokens. None: read in place."""


class AttentionPlan:
    """The frames that a step's rows read: made once a step, used by every layer."""

    def __init__(self, frames: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Cut the rows of a step into pieces.

        frames[a]: of row a by page, all full but the last. lengths[a]: its local tokens.
        """
        assert all(
            PAGE_SIZE * (len(row) - 1) < length <= PAGE_SIZE * len(row) or (not row and not length)
            for row, length in zip(frames, lengths, strict=True)
        ), (frames, lengths)
        single = [row for row, row_frames in enumerate(frames) if len(row_frames) == 1]
        # Several rows of one page are worth one batched call; a lone one is read in place.
        single = single if len(single) > 1 else []
        self.single_rows = torch.tensor(single, dtype=torch.int64)
        self.single_frames = torch.tensor([frames[row][0] for row in single], dtype=torch.int64)
        single_lengths = torch.tensor([lengths[row] for row in single], dtype=torch.int64)
        self.single_mask = torch.zeros(len(single), 1, 1, PAGE_SIZE).masked_fill_(
            (torch.arange(PAGE_SIZE) >= single_lengths[:, None])[:, None, None], float("-inf")
        )
        self.pieces = {
            row: list(_pieces(row_frames, lengths[row]))
            for row, row_frames in enumerate(frames)
            if row_frames and not (single and len(row_frames) == 1)
        }
        """Row -> its pieces, for every other row."""


class KvLayout(Protocol):
    """The layout of a token's KV for queries."""

    @property
    def out_width(self) -> int:
        """Width of a head's partial output, O."""

    def attend(
        self, q_AHD: Tensor, kv_ATW: Tensor, scale: float, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Call torch's kernel: (out [A, H, O], lse [A, H] fp32). mask: [A, 1, 1, T], added."""

    def chunk_heads(self, kv_TW: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
        """Show each query head its keys and values [H, T, D], the first O of them valid."""


@dataclass(frozen=True, slots=True)
class LatentKv(KvLayout):
    """Latent KV: a token is a key for all heads, and its first `rank` columns a value."""

    rank: int

    @property
    def out_width(self) -> int:
        return self.rank

    def attend(
        self, q_AHD: Tensor, kv_ATW: Tensor, scale: float, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend with a row's heads as the kernel's queries; columns after R are dropped."""
        kv = kv_ATW[:, None]
        out, lse = _flash(q_AHD[:, None], kv, kv, scale, mask)
        return out[:, 0, :, : self.rank], lse[:, 0]

    def chunk_heads(self, kv_TW: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
        kv_HTW = kv_TW.expand(num_heads, -1, -1)
        return kv_HTW, kv_HTW


@dataclass(frozen=True, slots=True)
class KvHeads(KvLayout):
    """K/V heads, each shared by several query heads: all keys, then values."""

    num_kv_heads: int
    head_dim: int

    @property
    def out_width(self) -> int:
        return self.head_dim

    def attend(
        self, q_AHD: Tensor, kv_ATW: Tensor, scale: float, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend with the heads of a group as the kernel's queries: no key is copied."""
        rows, heads, width = q_AHD.shape
        q = q_AHD.view(rows, self.num_kv_heads, heads // self.num_kv_heads, width)
        key, value = self._heads(kv_ATW)
        out, lse = _flash(q, key, value, scale, mask)
        return out.flatten(1, 2), lse.flatten(1, 2)

    def chunk_heads(self, kv_TW: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
        key, value = (
            heads[0].repeat_interleave(num_heads // self.num_kv_heads, dim=0)
            for heads in self._heads(kv_TW[None])
        )
        return key, value

    def _heads(self, kv_ATW: Tensor) -> tuple[Tensor, Tensor]:
        rows, tokens, _ = kv_ATW.shape
        both = kv_ATW.view(rows, tokens, 2, self.num_kv_heads, self.head_dim)
        return both[:, :, 0].transpose(1, 2), both[:, :, 1].transpose(1, 2)


class TorchPaged(Attention):
    """The attention backend `torch`."""

    def __init__(self, layout: KvLayout) -> None:
        self._layout = layout

    def plan(self, frame_AP: Tensor, length_A: Tensor, num_queries: int = 1) -> AttentionPlan:
        frame, lengths = frame_AP.numpy(), length_A.tolist()
        return AttentionPlan(
            [frame[row, : -(-n // PAGE_SIZE)].tolist() for row, n in enumerate(lengths)], lengths
        )

    def run(
        self, q_AHD: Tensor, pool_FSW: Tensor, plan: AttentionPlan, scale: float,
        needs_lse: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return paged_attention(q_AHD, pool_FSW, plan, scale, self._layout)


def paged_attention(
    q_AHD: Tensor, pool_FSW: Tensor, plan: AttentionPlan, scale: float, layout: KvLayout
) -> tuple[Tensor, Tensor]:
    """Attend to a plan's frames: (partial_o [A, H, O] in q's dtype, lse [A, H] fp32)."""
    num_rows, num_heads, _ = q_AHD.shape
    partial = q_AHD.new_zeros(num_rows, num_heads, layout.out_width)
    lse = q_AHD.new_full((num_rows, num_heads), float("-inf"), dtype=torch.float32)
    if len(plan.single_rows):
        # index_select copies five times as fast as indexing does.
        kv_ATW = pool_FSW.index_select(0, plan.single_frames)
        mask = plan.single_mask.to(q_AHD.dtype)
        partial[plan.single_rows], lse[plan.single_rows] = layout.attend(
            q_AHD[plan.single_rows], kv_ATW, scale, mask
        )
    slots = pool_FSW.flatten(0, 1)
    for row, pieces in plan.pieces.items():
        parts = [
            layout.attend(q_AHD[row : row + 1], _read(piece, pool_FSW, slots)[None], scale)
            for piece in pieces
        ]
        out, out_lse = parts[0]
        if len(parts) > 1:
            outs, lses = zip(*parts, strict=True)
            out, out_lse = lse_merge(torch.stack(outs), torch.stack(lses))
        partial[row], lse[row] = out[0], out_lse[0]
    return partial, lse


def causal_attention(
    q_THD: Tensor,
    kv_UW: Tensor,
    scale: float,
    heads_of: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """Attend with the last T tokens of a sequence to all of it, each to none after it: [T, H, O].

    heads_of: shows each head its keys [H, U, D] and values [H, U, O] of a piece of kv_UW. Pieces
    are merged by their lse.
    """
    begin = len(kv_UW) - len(q_THD)
    q_HTD, out_width, partials = q_THD.transpose(0, 1), 0, []
    for first, last in pairwise((*range(0, begin, _MAX_PIECE_TOKENS), begin, len(kv_UW))):
        key, value = heads_of(kv_UW[first:last])
        out_width, width = value.shape[-1], max(q_THD.shape[-1], value.shape[-1])
        partials.append(
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *(_of_width(x, width)[None] for x in (q_HTD, key, value)),
                0.0,
                first == begin,
                scale=scale,
            )
        )
    out, lse = zip(*partials, strict=True)
    merged = lse_merge(torch.cat(out), torch.cat(lse))[0] if len(partials) > 1 else out[0][0]
    return merged[..., :out_width].transpose(0, 1).to(kv_UW.dtype)


def _of_width(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _flash(
    q: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Call F.scaled_dot_product_attention's kernel by its own name: it also gives the lse."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, key, value, 0.0, False, attn_mask=mask, scale=scale
    )
    return out, lse


def _read(piece: _Piece, pool_FSW: Tensor, slots: Tensor) -> Tensor:
    if piece.frames is None:
        return slots[piece.begin : piece.begin + piece.num_tokens]
    return pool_FSW.index_select(0, piece.frames).flatten(0, 1)[: piece.num_tokens]


def _pieces(frames: Sequence[int], length: int) -> Iterator[_Piece]:
    runs = _runs(frames)
    scattered: list[int] = []
    done = 0
    for first, num_pages in runs:
        num_tokens = min(num_pages * PAGE_SIZE, length - done)
        done += num_tokens
        if num_pages >= _MIN_RUN_PAGES or len(runs) == 1:
            yield _Piece(num_tokens, begin=first * PAGE_SIZE)
        else:
            scattered += range(first, first + num_pages)
    if not scattered:
        return
    # All scattered pages are full, except the row's last page: it is then the last of them too.
    missing = len(frames) * PAGE_SIZE - length if scattered[-1] == frames[-1] else 0
    for begin in range(0, len(scattered), _MAX_GATHERED_PAGES):
        part = scattered[begin : begin + _MAX_GATHERED_PAGES]
        num_tokens = len(part) * PAGE_SIZE - (missing if begin + len(part) == len(scattered) else 0)
        yield _Piece(num_tokens, begin=0, frames=torch.tensor(part))


def _runs(frames: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for frame in frames:
        if runs and sum(runs[-1]) == frame:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((frame, 1))
    return runs
