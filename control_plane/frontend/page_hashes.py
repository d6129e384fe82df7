"""Hashes of a prompt's pages, by which the scheduler finds equal pages.

Enters: token ids. Leaves: hashes. Does not know: requests, which pages are where.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from nanocp.values.offload import next_page_hash
from nanocp.values.plan import PAGE_SIZE


def page_hashes(token_ids: Sequence[int]) -> tuple[bytes, ...]:
    """One hash for each full page, of all tokens up to its end (see `Arrival.page_hashes`).

    All requests have the same weights, so equal tokens have equal KV. The page of the last token is
    left out: the first decode step writes its KV.
    """
    tokens = array("I", token_ids)
    hashes: list[bytes] = []
    page_hash = b""
    for first in range(0, (len(token_ids) - 1) // PAGE_SIZE * PAGE_SIZE, PAGE_SIZE):
        page_hash = next_page_hash(page_hash, tokens[first : first + PAGE_SIZE])
        hashes.append(page_hash)
    return tuple(hashes)


def page_state(token_ids: Sequence[int], hashes: Sequence[bytes]) -> tuple[bytes, tuple[int, ...]]:
    """What a row needs to go on with these hashes: `RowInput.page_hash` and `page_ids`.

    Without the hashes it gets nothing: who brings none shares nothing.
    """
    num_full = (len(token_ids) - 1) // PAGE_SIZE
    if len(hashes) < num_full:
        return b"", ()
    return (hashes[-1] if hashes else b""), tuple(token_ids[num_full * PAGE_SIZE :])
