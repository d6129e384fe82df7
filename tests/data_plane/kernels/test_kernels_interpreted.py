"""Every attention kernel agrees with its reference, interpreted: all layouts and dtypes, small."""

from itertools import pairwise

import pytest
import torch

from data_plane.attention.fp8_latent import dequantise
from data_plane.attention.torch_paged import KvHeads
from data_plane.attention.triton_gqa import TritonHeads
from data_plane.attention.triton_merge import merge_partials
from data_plane.attention.triton_mla import TritonMla
from harness.kernels.kernel_cases import LENGTHS, AttentionCase, make_partials, poisoned
from harness.kernels.slow_references import reference_lse_merge

RANK, ROPE, HEADS = 64, 16, 3
TOLERANCE = {torch.float32: (2e-5, 2e-5), torch.float16: (5e-3, 5e-3), torch.bfloat16: (3e-2, 2e-2)}
"""dtype -> tolerance of (output, lse): the kernel rounds weights and outputs on equal inputs."""


@pytest.mark.parametrize("num_parts", [1, 2, 7])
@pytest.mark.parametrize("name", LENGTHS)
def test_decode_over_kv_heads_agrees_with_the_reference(name, num_parts):
    case = AttentionCase(LENGTHS[name], 6, 0, 0, torch.float32, layout=KvHeads(2, 32))
    case.check(*case.run(TritonHeads(2, 32, 6, num_parts)), *TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_kv_heads", "num_heads"), [(1, 20), (3, 3), (2, 34)])
def test_groups_of_any_size_agree_with_the_reference(dtype, num_kv_heads, num_heads):
    """A group smaller than a tile, and one that takes several."""
    layout = KvHeads(num_kv_heads, 16)
    case = AttentionCase([3, 300, 1, 0, 70], num_heads, 0, 0, dtype, layout=layout)
    case.check(*case.run(TritonHeads(num_kv_heads, 16, num_heads, 3)), *TOLERANCE[dtype])


def backend(num_parts, heads=HEADS):
    return TritonMla(RANK, ROPE, heads, num_parts)


@pytest.mark.parametrize("num_parts", [1, 2, 7])
@pytest.mark.parametrize("name", LENGTHS)
def test_decode_agrees_with_the_reference(name, num_parts):
    case = AttentionCase(LENGTHS[name], HEADS, RANK, ROPE, torch.float32)
    case.check(*case.run(backend(num_parts)), *TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_16_bits_agree_with_the_reference(dtype, is_fp8):
    case = AttentionCase([3, 900, 1, 0, 70], HEADS, RANK, ROPE, dtype, is_fp8=is_fp8)
    case.check(*case.run(backend(3)), *TOLERANCE[dtype])


@pytest.mark.parametrize("num_queries", [2, 3])
@pytest.mark.parametrize("num_parts", [1, 2, 7])
@pytest.mark.parametrize("kind", ["latent", "fp8", "heads"])
def test_queries_of_a_row_read_its_pages_once(kind, num_parts, num_queries):
    """Each of its own length, over a page's end too; a query may read nothing of a row."""
    lengths = [63, 3, 640, 1, 128, 0] if num_queries == 2 else [64, 65, 0]
    lengths += [*(500 + each for each in range(num_queries)), *[0] * num_queries]
    layout = KvHeads(2, 32) if kind == "heads" else None
    case = AttentionCase(
        lengths, 6, RANK, ROPE, torch.float32, is_fp8=kind == "fp8", layout=layout,
        num_queries=num_queries,
    )  # fmt: skip
    kernel = TritonHeads(2, 32, 6, num_parts) if layout else backend(num_parts, heads=6)
    case.check(*case.run(kernel), *TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_fp8_frames_are_read_as_frames_of_their_values_rounded_to_the_queries_dtype(dtype):
    case = AttentionCase([3, 200, 0, 70], HEADS, RANK, ROPE, dtype, is_fp8=True)
    read = case.run(backend(3))
    case.check(*read, *TOLERANCE[dtype])
    case.pool = dequantise(case.pool, RANK).to(dtype)
    assert all(map(torch.equal, read, case.run(backend(3))))


def test_heads_fill_several_tiles():
    case = AttentionCase([200, 1], 70, RANK, ROPE, torch.float16)
    case.check(*case.run(backend(2, heads=70)), *TOLERANCE[torch.float16])


@pytest.mark.parametrize("num_parts", [1, 3, 66])
@pytest.mark.parametrize(
    "lengths", [[1], [0, 0], [64_000, 64, 0, 65], [100] * 33, [1_000_000, 2_000], []]
)
def test_the_parts_cover_every_page_once_and_none_does_much_more_than_another(lengths, num_parts):
    plan = backend(num_parts).plan(
        torch.zeros(len(lengths), 1, dtype=torch.int32), torch.tensor(lengths).int()
    )
    begins = [tuple(begin) for begin in plan.begin_N2.tolist()]
    pages = [-(-length // 64) for length in lengths]
    done = [[] for _ in lengths]
    work = []
    for part, (begin, end) in enumerate(pairwise(begins)):
        assert begin <= end
        work.append(0)
        for row in range(begin[0], min(end[0] + 1, len(lengths))):
            low = begin[1] if row == begin[0] else 0
            high = end[1] if row == end[0] else pages[row]
            if high > low:
                done[row].append((part, low, high))
                work[-1] += high - low + 5
    for row, pieces in enumerate(done):
        assert [low for _, low, _ in pieces] == [0, *(high for _, _, high in pieces)][: len(pieces)]
        assert (pieces[-1][2] if pieces else 0) == pages[row]
        parts = [part for part, _, _ in pieces]
        first, count = plan.row_parts_R2[row].tolist()
        assert count == len(parts) and parts == list(range(first, first + count))[: len(parts)]
    total = sum(count + 5 for count in pages if count)
    assert max(work, default=0) <= -(-total // num_parts) + 5


@pytest.mark.parametrize("empty", [(), (0,), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_merge_agrees_with_the_reference(dtype, empty):
    partial, lse = make_partials(3, 2, 3, 24, seed=1, empty=empty, dtype=dtype)
    with poisoned():
        merged, merged_lse = merge_partials(partial, lse)
    expected, expected_lse = reference_lse_merge(partial, lse)
    torch.testing.assert_close(merged, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(merged_lse, expected_lse, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("num_partials", [1, 2, 9])
def test_any_number_of_partials_merges(num_partials):
    partial, lse = make_partials(num_partials, 2, 2, 16, seed=2)
    expected, expected_lse = reference_lse_merge(partial, lse)
    merged, merged_lse = merge_partials(partial, lse)
    torch.testing.assert_close(merged, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(merged_lse, expected_lse, atol=1e-5, rtol=1e-6)
