"""A captured step's tables in Triton: adopt the staged ones, find the rows' slots and lengths.

Legend: pool_cpu.py's.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adopt_kernel(
    parity_ptr,
    staged_ptr,
    live_ptr,
    table_words,
    small_words,
    first_pages,
    num_rows,
    max_pages,
    BLOCK: tl.constexpr,
):
    """Copy the staged tables of a parity over the live ones; nothing if the parity is negative.

    staged_ptr [2, table_words], live_ptr [table_words] int32: small_words words, copied whole, with
    the page counts of num_rows attention rows from first_pages on; then max_pages pages of each
    row, then as many frames, copied as far as used. Program p copies a block of the first words,
    and row p.
    """
    program = tl.program_id(0)
    parity = tl.load(parity_ptr)
    if parity < 0:
        return
    from_ptr = staged_ptr + parity * table_words
    word = program * BLOCK + tl.arange(0, BLOCK)
    tl.store(
        live_ptr + word, tl.load(from_ptr + word, mask=word < small_words), mask=word < small_words
    )
    if program < num_rows:
        num_pages = tl.load(from_ptr + first_pages + program)
        pages = small_words + program.to(tl.int64) * max_pages
        frames = small_words + (program + num_rows).to(tl.int64) * max_pages
        for begin in range(0, num_pages, BLOCK):
            page = begin + tl.arange(0, BLOCK)
            inside = page < num_pages
            tl.store(
                live_ptr + pages + page, tl.load(from_ptr + pages + page, mask=inside), mask=inside
            )
            tl.store(
                live_ptr + frames + page,
                tl.load(from_ptr + frames + page, mask=inside),
                mask=inside,
            )


@triton.jit
def locate_kernel(
    num_pages_ptr,
    page_ptr,
    frame_ptr,
    position_ptr,
    live_ptr,
    error_ptr,
    slot_ptr,
    length_ptr,
    num_rows,
    max_pages,
    scratch_slot,
    PAGE: tl.constexpr,
    NUM_HALVINGS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the slot of each row's new token, and the row's local length with it.

    Writes slot_ptr [B] int64 and length_ptr [B] int32; the reference is kv.frame_pool.LocalStep.
    Once the exchange's error word is set every row appends to the scratch slot: its position is
    old, with committed KV.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    num_pages = tl.load(num_pages_ptr + row, mask=inside, other=0)
    position = tl.load(position_ptr + row, mask=inside, other=0)
    is_live = tl.load(live_ptr + row, mask=inside, other=0) != 0
    is_right = tl.load(error_ptr) == 0
    tail_page = (position // PAGE).to(tl.int32)
    offset = (position % PAGE).to(tl.int32)
    first = row.to(tl.int64) * max_pages
    low = tl.zeros([BLOCK], tl.int32)
    high = num_pages
    for _ in range(NUM_HALVINGS):
        middle = (low + high) // 2
        open = low < high
        page = tl.load(page_ptr + first + middle, mask=inside & open, other=0)
        low = tl.where(open & (page < tail_page), middle + 1, low)
        high = tl.where(open & (page >= tail_page), middle, high)
    is_there = inside & (low < num_pages)
    has_tail = is_there & (tl.load(page_ptr + first + low, mask=is_there, other=0) == tail_page)
    frame = tl.load(frame_ptr + first + low, mask=has_tail, other=0).to(tl.int64)
    length = low * PAGE + tl.where(has_tail, offset + 1, 0)
    slot = tl.where(has_tail & is_live & is_right, frame * PAGE + offset, scratch_slot)
    tl.store(slot_ptr + row, slot, mask=inside)
    tl.store(length_ptr + row, length, mask=inside)


@triton.jit
def route_kernel(
    count_ptr, row_ptr, slot_ptr, num_rows, num_links, BLOCK_B: tl.constexpr, BLOCK_L: tl.constexpr
):
    """Find the slot of each row among those for each instance.

    count_ptr [N], row_ptr [N, L]: the rows to send. Program n writes slot_ptr [N, B] int32 for
    instance n, -1 for a row that is not sent.
    """
    target = tl.program_id(0)
    row = tl.arange(0, BLOCK_B)
    tl.store(
        slot_ptr + target * num_rows + row, tl.full([BLOCK_B], -1, tl.int32), mask=row < num_rows
    )
    tl.debug_barrier()
    slot = tl.arange(0, BLOCK_L)
    is_sent = slot < tl.load(count_ptr + target)
    sent_row = tl.load(row_ptr + target * num_links + slot, mask=is_sent, other=0)
    tl.store(slot_ptr + target * num_rows + sent_row, slot, mask=is_sent)
