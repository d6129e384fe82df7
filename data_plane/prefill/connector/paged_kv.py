"""Pages of 64 tokens and several layers, from blocks of another size that each have one layer.

Enters: views of an engine's KV, a request's blocks. Leaves: a page's payload. Does not know:
tickets, vLLM, whether the views are torch's or NumPy's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nanocp.values.plan import PAGE_SIZE


class PagedKv:
    """Reads pages; each read overwrites the payload of the one before."""

    def __init__(
        self,
        layers: Sequence[Sequence[Any]],
        block_size: int,
        page: Any,
        payload: Callable[[Any], Any] = lambda page: page,
    ) -> None:
        """layers: for each, what lies side by side in a page, such as keys and values.

        Each is [blocks, tokens of a block, numbers of a token], where several axes may be one: what
        lies in another order needs no copy. block_size: tokens of a block. page: zeros,
        [layers, 64, width]. payload: makes of a page what a ring takes.
        """
        self._layers = layers
        self._block_size = block_size
        self._page = page
        self._payload = payload

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
            begin = 0
            for part in layer:
                rows = part[here].reshape(len(here) * size, -1)[skipped : skipped + num_tokens]
                kept[:num_tokens, begin : begin + rows.shape[1]] = rows
                begin += rows.shape[1]
        wanted[:, num_tokens:] = 0
        return self._payload(wanted)
