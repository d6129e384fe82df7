"""Pages of 64 tokens and several layers, from blocks of another size that each have one layer.

Enters: an engine's KV tensors, a request's blocks. Leaves: a page's payload. Does not know:
tickets, vLLM, whether the tensors are torch's or NumPy's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nanocp.values.plan import PAGE_SIZE


class PagedKv:
    """Reads pages; each read overwrites the payload of the one before."""

    def __init__(
        self, layers: Sequence[Any], page: Any, payload: Callable[[Any], Any] = lambda page: page
    ) -> None:
        """layers: [blocks, tokens of a block, width] each. page: zeros, [layers, 64, width].

        payload: makes of a page what a ring takes.
        """
        self._layers = layers
        self._page = page
        self._payload = payload
        self._block_size: int = layers[0].shape[1]

    def read(self, blocks: Sequence[int], page: int, num_tokens: int, num_layers: int) -> Any:
        """Return the payload of a page of which num_tokens tokens count; the others are zero.

        blocks: the request's, from position 0 on. num_layers: of the payload; layers that are not
        there are zero.
        """
        first, size = page * PAGE_SIZE, self._block_size
        end = first + num_tokens
        here = list(blocks[first // size : -(-end // size)])
        skipped = first % size
        wanted = self._page[:num_layers]
        for layer, kept in zip(self._layers, wanted, strict=False):
            rows = layer[here].reshape(-1, layer.shape[-1])
            kept[:num_tokens] = rows[skipped : skipped + num_tokens]
        wanted[:, num_tokens:] = 0
        return self._payload(wanted)
