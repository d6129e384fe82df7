"""The frames of one instance: latent KV of every layer, private to the instance.

Enters: rows of latent KV and the slots they belong to; whole pages at step boundaries. Leaves:
per-layer views. Does not know: requests, tickets, who holds what.

Legend: F frames + the scratch frame, S tokens of a frame, D latent KV width.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from data_plane.attention.fp8_latent import quantise, token_bytes
from data_plane.graph.pool_cpu import LocalPages
from nanocp.plan import PAGE_SIZE


class FramePool:
    """Memory of `num_frames` frames, and one scratch frame behind them that takes what must not be
    kept."""

    def __init__(
        self,
        num_layers: int,
        num_frames: int,
        width: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        fp8_rank: int | None = None,
    ) -> None:
        """Zeroed, so that no frame ever holds a NaN that a masked read could spread. fp8_rank:
        kv_lora_rank, if latent KV is kept in FP8 (fp8_latent.py), whatever dtype it comes in.

        Raises ValueError if there is not so much memory.
        """
        self._fp8_rank, self._kv_width = fp8_rank, width
        if fp8_rank is not None:
            width, dtype = token_bytes(fp8_rank, width - fp8_rank), torch.uint8
        shape = num_layers, num_frames + 1, PAGE_SIZE, width
        try:
            self.layers = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            raise ValueError(
                f"num_frames is {num_frames}: the frames of one instance take "
                f"{math.prod(shape) * dtype.itemsize / 2**30:.1f} GiB, which cannot be allocated"
            ) from error
        self.slots = self.layers.view(num_layers, -1, width).unbind()
        """Of each layer [slots, D]: a token's is frame * 64 + offset."""
        self.scratch_slot = num_frames * PAGE_SIZE

    def append(self, layer: int, slot_B: torch.Tensor, kv_BD: torch.Tensor) -> None:
        """Write one token a row to its slot (frame * 64 + offset) of the layer."""
        self.slots[layer].index_copy_(0, slot_B, self._as_kept(kv_BD))

    def _as_kept(self, kv: torch.Tensor) -> torch.Tensor:
        return kv if self._fp8_rank is None else quantise(kv, self._fp8_rank)

    def write_payload(
        self, frame: int, num_tokens: int, payload: np.ndarray | torch.Tensor
    ) -> None:
        """Write the first tokens of a frame, all layers, from a page's bytes ([L, 64, D] in the
        pool's dtype). The payload may be overwritten when this returns."""
        layers = self.layers
        data = torch.from_numpy(payload) if isinstance(payload, np.ndarray) else payload
        kv_LSD = data.view(layers.dtype).view(len(layers), PAGE_SIZE, -1)
        layers[:, frame, :num_tokens] = kv_LSD[:, :num_tokens].to(layers.device)
        if layers.is_cuda:
            torch.cuda.current_stream(layers.device).synchronize()

    def read_payload(self, frame: int) -> np.ndarray | torch.Tensor:
        """A frame's bytes as `write_payload` takes them: a copy, where the frames are."""
        payload = self.layers[:, frame].contiguous().view(torch.uint8).flatten()
        return payload if payload.is_cuda else payload.numpy()

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, all layers."""
        return self.layers[:, 0].numel() * self.layers.element_size()

    def fill_synthetic(self, frame: int, num_tokens: int, request_id: int, page: int) -> None:
        """Fill a frame with noise that depends on (request_id, page) only: the same at any CP
        degree."""
        generator = torch.Generator().manual_seed((request_id << 24) ^ page)
        if self._fp8_rank is None and not self.layers.is_cuda:
            self.layers[:, frame, :num_tokens].uniform_(-0.5, 0.5, generator=generator)
            return
        kv_LTD = torch.empty(len(self.layers), num_tokens, self._kv_width).uniform_(
            -0.5, 0.5, generator=generator
        )
        self.layers[:, frame, :num_tokens] = self._as_kept(kv_LTD).to(self.layers)


class LocalStep:
    """Where a step's rows read and write in this instance's frames."""

    def __init__(
        self, pages: LocalPages, position: np.ndarray, live: np.ndarray, scratch_slot: int
    ) -> None:
        """position, live: [rows]. A row that stopped, or whose page is held elsewhere, appends to
        the scratch frame."""
        tail_page = position // PAGE_SIZE
        width = max(int(pages.num_pages.max(initial=0)), 1)
        page, frame = pages.page[:, :width], pages.frame[:, :width]
        is_local = np.arange(width) < pages.num_pages[:, None]
        num_full = (is_local & (page < tail_page[:, None])).sum(axis=1)
        rows = np.arange(len(position))
        last = np.minimum(num_full, width - 1)
        has_tail = (num_full < pages.num_pages) & (page[rows, last] == tail_page)
        offset = position % PAGE_SIZE
        lengths = num_full * PAGE_SIZE + np.where(has_tail, offset + 1, 0)
        self.lengths = torch.from_numpy(lengths.astype(np.int32))
        """[rows] int32: tokens that attention reads, the new one included where it is appended
        here. A row that stopped keeps the length it had before."""
        self.slots = torch.from_numpy(
            np.where(
                has_tail & live,
                frame[rows, last].astype(np.int64) * PAGE_SIZE + offset,
                scratch_slot,
            )
        )
        self.frames = torch.from_numpy(frame)
        """[rows, pages] int32: of each row as many as its length fills."""
