"""What a row needs to go on hashing its pages, by which the scheduler finds equal pages.

Enters: token ids and their hashes. Leaves: a state. Does not know: requests, which pages are where.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanocp.values.plan import PAGE_SIZE


def page_state(token_ids: Sequence[int], hashes: Sequence[bytes]) -> tuple[bytes, tuple[int, ...]]:
    """What a row needs to go on with these hashes: `RowInput.page_hash` and `page_ids`.

    Without the hashes it gets nothing: who brings none shares nothing.
    """
    num_full = (len(token_ids) - 1) // PAGE_SIZE
    if len(hashes) < num_full:
        return b"", ()
    return (hashes[-1] if hashes else b""), tuple(token_ids[num_full * PAGE_SIZE :])
