"""What the brain knows a prompt's pages by: a hash of everything up to each one's end.

Enters: token ids. Leaves: hashes. Does not know: requests, which pages are where.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from nanocp.plan import PAGE_SIZE

_HASH_BYTES = 16
"""Nobody finds a prompt with the hash of another's page: that takes 2^128 tries."""


def page_hashes(token_ids: Sequence[int]) -> tuple[bytes, ...]:
    """See `Arrival.page_hashes`. All requests have the same weights, so tokens are all that makes
    KV differ. The KV of the last one is written by the first decode step, so its page is left out.
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
