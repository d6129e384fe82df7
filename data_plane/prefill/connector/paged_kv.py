"""Pages of 64 tokens and several layers, from an engine's blocks of another size and one layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nanocp.values.plan import PAGE_SIZE


class PagedKv:
    """Reads pages; each read overwrites the last payload."""

    def __init__(
        self,
        layers: Sequence[Sequence[Any]],
        block_size: int,
        page: Any,
        payload: Callable[[Any], Any] = lambda page: page,
    ) -> None:
        """layers: for each layer the parts of a page, such as keys and values.

        Each is [blocks, tokens of a block, numbers of a token], where several axes may be one.
        page: zeros, [layers, 64, width]. payload: converts a page for a ring.
        """
        self._layers = layers
        self._block_size = block_size
        self._page = page
        self._payload = payload

    def read(self, blocks: Sequence[int], page: int, num_tokens: int, num_layers: int) -> Any:
        """Return the payload of a page; tokens after num_tokens and absent layers are zero."""
        first, size = page * PAGE_SIZE, self._block_size
        end = first + num_tokens
        here: Any = list(blocks[first // size : -(-end // size)])
        num = len(here) * size
        if here == list(range(here[0], here[0] + len(here))):
            here = slice(here[0], here[-1] + 1)  # a view, where the list would make a copy
        skipped = first % size
        wanted = self._page[:num_layers]
        for layer, kept in zip(self._layers, wanted, strict=False):
            begin = 0
            for part in layer:
                rows = part[here].reshape(num, -1)[skipped : skipped + num_tokens]
                kept[:num_tokens, begin : begin + rows.shape[1]] = rows
                begin += rows.shape[1]
        wanted[:, num_tokens:] = 0
        return self._payload(wanted)
