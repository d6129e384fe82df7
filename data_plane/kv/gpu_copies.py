"""Copies of pages between a GPU and pinned memory (NanoFlow's section 4.2.2)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from data_plane.transport.gpu.cuda_runtime import CudaError, CudaRuntime


class GpuCopies:
    """A stream of its own for an instance's copies, and the memory that it pins for them."""

    def __init__(self, runtime: CudaRuntime, device: torch.device, memory: np.ndarray) -> None:
        """memory: [slots, page_bytes] uint8; torch's own pinned memory is up to twice as large.

        Raises ValueError if it cannot be pinned.
        """
        self._runtime, self._device, self._pinned = runtime, device, memory.ctypes.data
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._page = torch.empty(memory.shape[1], dtype=torch.uint8, device=device)
        try:
            runtime.pin(self._pinned, memory.nbytes)
        except CudaError as error:
            raise ValueError(
                f"kv_offload.host_gib: {memory.nbytes:,} bytes of memory cannot be pinned for the "
                f"GPU, so it must be less ({error})"
            ) from error

    def follow(self) -> None:
        """Let later copies wait for all that the caller's thread has launched."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def stream(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread launches copies, and waits for them."""
        return torch.cuda.stream(self._stream)

    def copy_out(self, page: Any, place: np.ndarray) -> None:
        """Copy a page into a slot, layer by layer: copy engines want contiguous bytes.

        page: [layers, bytes] or [bytes], uint8.
        """
        layers = torch.as_tensor(page)
        layers = layers.view(-1, layers.shape[-1])
        for layer, to in zip(layers, torch.from_numpy(place).view(layers.shape), strict=True):
            to.copy_(layer, non_blocking=True)
        self._stream.synchronize()

    def copy_in(self, payload: np.ndarray) -> torch.Tensor:
        """Begin to copy a page to the device; launches on this stream may read what is returned."""
        return self._page.copy_(torch.from_numpy(payload), non_blocking=True)

    def close(self) -> None:
        """Release the memory, once no copy is under way. Idempotent."""
        if self._pinned:
            self._runtime.unpin(self._pinned)
            self._pinned = 0
