"""The frames of one instance: its KV of every layer, private to the instance.

Legend: F frames + the scratch frame, S tokens of a frame, D latent KV width.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from data_plane.attention.fp8_latent import quantise
from data_plane.graph.pool_cpu import LocalPages
from data_plane.kv.carry_pool import CarryPool
from data_plane.kv.huge_pages import huge_pages
from data_plane.model.sizes import token_bytes
from nanocp.values.plan import PAGE_SIZE


class FramePool:
    """Memory of `num_frames` frames, and a scratch frame for tokens that must not be kept."""

    def __init__(
        self,
        num_layers: int,
        num_frames: int,
        width: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        fp8_rank: int | None = None,
    ) -> None:
        """Allocate the frames, all zero, since a masked read would spread a NaN.

        fp8_rank: the model's kv_lora_rank if latent KV is in FP8 (attention/fp8_latent.py). Raises
        ValueError if the device has too little memory.
        """
        self._fp8_rank, self._kv_width = fp8_rank, width
        if fp8_rank is not None:
            width, dtype = token_bytes(fp8_rank, width - fp8_rank), torch.uint8
        shape = num_layers, num_frames + 1, PAGE_SIZE, width
        try:
            if torch.device(device).type == "cpu":
                memory = huge_pages(math.prod(shape) * dtype.itemsize, is_taken=True)
                self.layers = torch.from_numpy(memory).view(dtype).view(shape)
            else:
                self.layers = torch.zeros(shape, dtype=dtype, device=device)
        except (RuntimeError, OSError, OverflowError) as error:
            raise ValueError(
                f"num_frames is {num_frames}: the frames of one instance take "
                f"{math.prod(shape) * dtype.itemsize / 2**30:.1f} GiB, which cannot be allocated"
            ) from error
        self.slots = self.layers.flatten(1, 2).unbind()
        """[slots, D] for each layer; a slot is frame * 64 + offset in the frame."""
        self.carry: CarryPool | None = None
        """None without linear attention layers."""
        self.scratch_slot = num_frames * PAGE_SIZE

    def append(self, layer: int, slot_B: torch.Tensor, kv_BD: torch.Tensor) -> None:
        """Write each row's new token to its slot of the layer. slot_B: [B] int64. kv_BD: [B, D]."""
        self.slots[layer].index_copy_(0, slot_B, self._as_kept(kv_BD))

    def _as_kept(self, kv: torch.Tensor) -> torch.Tensor:
        return kv if self._fp8_rank is None else quantise(kv, self._fp8_rank)

    def write_payload(self, frame: int, num_tokens: int, payload: Any, offset: int = 0) -> None:
        """Write the first `num_tokens` tokens of a frame from a page's bytes.

        payload: uint8 of [layers, 64, D] in the pool's dtype: an array, or a tensor on its device.
        offset: bytes of the page's layers before these.
        """
        data = torch.as_tensor(payload)
        layer_bytes = self.page_bytes // len(self.layers)
        layers = self.layers[offset // layer_bytes :][: len(data) // layer_bytes]
        kv_LSD = data.view(layers.dtype).view(len(layers), PAGE_SIZE, -1)
        layers[:, frame, :num_tokens] = kv_LSD[:, :num_tokens].to(layers.device)
        if layers.is_cuda:
            torch.cuda.current_stream(layers.device).synchronize()

    def page_view(self, frame: int) -> Any:
        """Return [layers, bytes] uint8: a frame's own bytes."""
        view = self.layers[:, frame].view(torch.uint8).flatten(1)
        return view if view.is_cuda else view.numpy()

    def read_layer(self, layer: int, frame: int) -> np.ndarray:
        """Return a copy of a frame's bytes of one layer, uint8, on the CPU."""
        return np.array(self.page_view(frame)[layer])

    def write_layer(self, layer: int, frame: int, payload: np.ndarray) -> None:
        """Write a frame of one layer from the bytes of `read_layer`."""
        self.page_view(frame)[layer] = payload

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers."""
        return self.layers[:, 0].numel() * self.layers.element_size()

    def fill_synthetic(self, frame: int, num_tokens: int, request_id: int, page: int) -> None:
        """Fill a frame's first tokens with noise of only request and page."""
        generator = torch.Generator().manual_seed((request_id << 24) ^ page)
        if self._fp8_rank is None and not self.layers.is_cuda:
            self.layers[:, frame, :num_tokens].uniform_(-0.5, 0.5, generator=generator)
            return
        kv_LTD = torch.empty(len(self.layers), num_tokens, self._kv_width).uniform_(
            -0.5, 0.5, generator=generator
        )
        self.layers[:, frame, :num_tokens] = self._as_kept(kv_LTD).to(self.layers)


class LocalStep:
    """A step's reads and appends in this instance's frames."""

    def __init__(
        self, pages: LocalPages, position: np.ndarray, live: np.ndarray, scratch_slot: int
    ) -> None:
        """position: [rows] int64. live: [rows] bool.

        A row that stopped, or whose tail page is elsewhere, appends to the scratch slot.
        """
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
        """[rows] int32: local tokens for attention, with the new one if it is appended here."""
        self.slots = torch.from_numpy(
            np.where(
                has_tail & live,
                frame[rows, last].astype(np.int64) * PAGE_SIZE + offset,
                scratch_slot,
            )
        )
        self.frames = torch.from_numpy(frame)
        """[rows, pages] int32: frames of each row, valid up to its length."""
