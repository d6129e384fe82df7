"""The state with which a row continues hashing its pages."""

from __future__ import annotations

from collections.abc import Sequence

from nanocp.values.plan import PAGE_SIZE


def page_state(token_ids: Sequence[int], hashes: Sequence[bytes]) -> tuple[bytes, tuple[int, ...]]:
    """Return `RowInput.page_hash` and `page_ids` after these hashes; empty without any."""
    num_full = (len(token_ids) - 1) // PAGE_SIZE
    if len(hashes) < num_full:
        return b"", ()
    return (hashes[-1] if hashes else b""), tuple(token_ids[num_full * PAGE_SIZE :])
