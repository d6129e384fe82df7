"""Paged attention: the fast path agrees with the slow reference for every layout of frames."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_plane.attention.torch_paged import AttentionPlan, KvHeads, LatentKv, paged_attention
from harness.kernels.slow_references import reference_attention

DTYPES = [torch.float32, torch.bfloat16]
RANK, ROPE, HEADS, NUM_FRAMES = 16, 8, 3, 150
SCALE, LAYOUT = 0.3, LatentKv(RANK)


def make_pool(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(NUM_FRAMES, 64, RANK + ROPE, generator=generator).to(dtype)


def make_queries(num_rows, dtype=torch.float32):
    return (
        2 * torch.randn(num_rows, HEADS, RANK + ROPE, generator=torch.Generator().manual_seed(4))
    ).to(dtype)


def assert_agree(frames, lengths, dtype=torch.float32, atol=1e-5, lse_atol=1e-5):
    pool, q = make_pool(dtype), make_queries(len(frames), dtype)
    # After a row's last token its frame holds another row's tokens, or was never written.
    for row_frames, length in zip(frames, lengths, strict=True):
        if row_frames and length % 64:
            pool[row_frames[-1], length % 64 :] = 1e4
    partial, lse = paged_attention(q, pool, AttentionPlan(frames, lengths), SCALE, LAYOUT)
    expected, expected_lse = reference_attention(q, pool, frames, lengths, SCALE, LAYOUT)
    assert partial.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(
        partial, expected, atol=atol, rtol=1e-5 if dtype == torch.float32 else 2e-2
    )
    torch.testing.assert_close(lse, expected_lse, atol=lse_atol, rtol=1e-6)


LAYOUTS = {
    "one token": ([[5]], [1]),
    "one full page": ([[5]], [64]),
    "a run": ([[7, 8, 9, 10]], [200]),
    "descending": ([[10, 9, 8, 7]], [200]),
    "scattered": ([[3, 50, 4, 90]], [193]),
    "a long run, then scattered pages": ([[*range(20, 32), 3, 50]], [64 * 13 + 7]),
    "scattered pages, then a long run": ([[3, 50, *range(20, 32)]], [64 * 13 + 7]),
    "two long runs": ([[*range(100, 110), *range(20, 32)]], [64 * 21 + 1]),
    "more scattered pages than one gather takes": ([[*range(149, 10, -2), 0]], [64 * 70 + 3]),
    "a gather that ends with the row": ([list(range(149, 21, -2))], [64 * 64]),
    "many rows of one page": ([[1], [2], [3], [4]], [1, 64, 13, 40]),
    "empty rows between": ([[], [1], [], [2, 3], [4], []], [0, 5, 0, 100, 64, 0]),
    "nothing at all": ([[], []], [0, 0]),
    "rows that share frames": ([[1, 2], [1, 2], [1]], [128, 100, 64]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_fast_path_agrees_with_the_reference(name):
    frames, lengths = LAYOUTS[name]
    assert_agree(frames, lengths)


@pytest.mark.parametrize("name", LAYOUTS)
def test_bf16_agrees_with_the_fp64_reference_within_its_eight_bits(name):
    frames, lengths = LAYOUTS[name]
    assert_agree(frames, lengths, torch.bfloat16, atol=2e-2, lse_atol=2e-2)


@st.composite
def layouts(draw):
    """Draw rows of frames, no frame twice: runs and scattered pages in any mix."""
    frames = draw(st.permutations(range(40)))
    if draw(st.booleans()):
        frames = sorted(frames[:20]) + frames[20:]
    rows, lengths = [], []
    for count in draw(st.lists(st.integers(0, 12), min_size=1, max_size=6)):
        row, frames = frames[:count], frames[count:]
        rows.append(row)
        lengths.append(64 * (len(row) - 1) + draw(st.integers(1, 64)) if row else 0)
    return rows, lengths


@settings(max_examples=60)
@given(layouts())
def test_any_layout_agrees_with_the_reference(layout):
    assert_agree(*layout)


def test_an_empty_row_is_zero_and_minus_infinity():
    partial, lse = paged_attention(
        make_queries(1), make_pool(), AttentionPlan([[]], [0]), SCALE, LAYOUT
    )
    assert (partial == 0).all() and (lse == float("-inf")).all()


def test_adjacent_frames_are_read_in_place_and_copies_are_bounded():
    (piece,) = AttentionPlan([list(range(5, 45))], [40 * 64 - 3]).pieces[0]
    assert piece.frames is None and (piece.begin, piece.num_tokens) == (5 * 64, 40 * 64 - 3)
    pieces = AttentionPlan([list(range(149, 0, -1))], [64 * 149]).pieces[0]
    assert [len(piece.frames) for piece in pieces] == [32, 32, 32, 32, 21]


def test_lengths_that_do_not_fit_the_frames_are_a_bug():
    for frames, lengths in (([[1, 2]], [64]), ([[1]], [65]), ([[]], [1]), ([[1]], [0])):
        with pytest.raises(AssertionError):
            AttentionPlan(frames, lengths)


@settings(max_examples=30)
@given(layout=layouts(), num_kv_heads=st.sampled_from([1, 3]), dtype=st.sampled_from(DTYPES))
def test_kv_heads_in_any_layout_agree_with_the_reference(layout, num_kv_heads, dtype):
    frames, lengths = layout
    generator = torch.Generator().manual_seed(6)
    kv = KvHeads(num_kv_heads, head_dim=16)
    pool = torch.randn(NUM_FRAMES, 64, 2 * num_kv_heads * 16, generator=generator).to(dtype)
    q = (2 * torch.randn(len(frames), 6, 16, generator=generator)).to(dtype)
    for row_frames, length in zip(frames, lengths, strict=True):
        if row_frames and length % 64:
            pool[row_frames[-1], length % 64 :] = 1e4
    plan = AttentionPlan(frames, lengths)
    partial, lse = paged_attention(q, pool, plan, SCALE, kv)
    expected, expected_lse = reference_attention(q, pool, frames, lengths, SCALE, kv)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert partial.dtype == dtype
    torch.testing.assert_close(partial, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, expected_lse, atol=tolerance, rtol=1e-6)
