"""The state with which a row continues hashing its pages."""

from __future__ import annotations

from collections.abc import Sequence

from nanocp.values.plan import PAGE_SIZE


def page_state(
    token_ids: Sequence[int], hashes: Sequence[bytes], salt: bytes = b""
) -> tuple[bytes, tuple[int, ...]]:
    """Return `RowInput.page_hash` and `page_ids` after these hashes; empty if they are not all.

    salt: see `page_hashes`; a prompt that fills no page begins with it.
    """
    num_full = (len(token_ids) - 1) // PAGE_SIZE
    if len(hashes) < num_full:
        return b"", ()
    return (hashes[-1] if hashes else salt), tuple(token_ids[num_full * PAGE_SIZE :])
