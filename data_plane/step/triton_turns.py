"""The turns of drafting in Triton, for rows that take the highest logit: no host takes part.

The slow reference is instance/drafting.py. A row that stops in the step drafts on, for nobody.
Legend: B step rows, WIDTH of each row, T turns, X hidden size.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def next_turn_kernel(
    by_host_ptr, turn_ptr, ids_ptr, token_ptr, position_ptr, live_ptr, last_ptr, after_ptr,
    hidden_ptr, drafted_ptr, ids_stride, hidden_size, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Program r: set up row r for a turn, unless the host has.

    ids_ptr [1 + T, ids_stride] int64: the step's tokens, then each turn's drafts. The first turn
    takes the step's tokens behind right drafts, and writes the row's last such step row and the
    position after it, last_ptr and after_ptr [rows] int64. A later one takes the last draft, and
    drafted_ptr for hidden_ptr, both [B, hidden_size].
    """
    if tl.load(by_host_ptr) != 0:
        return
    row = tl.program_id(0)
    first = row * WIDTH
    turn = tl.load(turn_ptr)
    offset = tl.arange(0, BLOCK_W)
    inside = offset < WIDTH
    at = first + offset
    live = tl.load(live_ptr + at, mask=inside, other=0).to(tl.int32)
    if turn == 0:
        given = tl.load(ids_ptr + at, mask=inside, other=-1)
        # The draft that the token after an input is compared with, if there is one.
        has_draft = offset + 1 < WIDTH
        draft = tl.load(token_ptr + at + 1, mask=has_draft, other=0)
        is_live = tl.load(live_ptr + at + 1, mask=has_draft, other=0) != 0
        position = tl.load(position_ptr + first)
        wrong = tl.where(has_draft & is_live & (draft == given), 0, 1)
        is_known = inside & (live != 0) & (tl.cumsum(wrong, 0) - wrong == 0)
        count = tl.sum(is_known.to(tl.int32), 0)
        tl.debug_barrier()
        tl.store(token_ptr + at, given, mask=inside)
        tl.store(live_ptr + at, is_known.to(tl.uint8), mask=inside)
        tl.store(last_ptr + row, (first + tl.maximum(count - 1, 0)).to(tl.int64))
        tl.store(after_ptr + row, position + count)
    else:
        last = tl.load(last_ptr + row)
        drafted = tl.load(ids_ptr + turn * ids_stride + last)
        after = tl.load(after_ptr + row)
        column = tl.arange(0, BLOCK_X)
        for begin in range(0, hidden_size, BLOCK_X):
            is_column = begin + column < hidden_size
            x = tl.load(drafted_ptr + last * hidden_size + begin + column, mask=is_column)
            tl.store(hidden_ptr + first * hidden_size + begin + column, x, mask=is_column)
        tl.debug_barrier()
        tl.store(token_ptr + first, drafted)
        tl.store(position_ptr + first, after + turn - 1)
        tl.store(live_ptr + at, tl.where(offset == 0, live, 0).to(tl.uint8), mask=inside)
        tl.store(last_ptr + row, first.to(tl.int64))
