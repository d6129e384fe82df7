"""Hashes of a prompt's pages, by which the scheduler finds equal pages.

Enters: token ids. Leaves: hashes. Does not know: requests, which pages are where.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from nanocp.plan import PAGE_SIZE

_HASH_BYTES = 16
"""Long enough that no prompt with the hash of another's page can be found: that takes 2^128
tries."""


def page_hashes(token_ids: Sequence[int]) -> tuple[bytes, ...]:
    """One hash for each full page, of all tokens up to its end (see `Arrival.page_hashes`).

    All requests have the same weights, so equal tokens have equal KV. The page of the last token is
    left out: the first decode step writes its KV.
    """
    tokens = memoryview(array("I", token_ids)).cast("B")
    page_bytes = PAGE_SIZE * tokens.nbytes // len(token_ids)
    hashes: list[bytes] = []
    page_hash = b""
    for page in range((len(token_ids) - 1) // PAGE_SIZE):
        page_hash = blake2b(
            page_hash + tokens[page * page_bytes : (page + 1) * page_bytes], digest_size=_HASH_BYTES
        ).digest()
        hashes.append(page_hash)
    return tuple(hashes)
