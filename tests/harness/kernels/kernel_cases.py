"""Inputs for kernels, and what they must give: the same under the interpreter and on a GPU."""

from contextlib import contextmanager

import torch
import torch.nn.functional as F

from data_plane.attention.fp8_latent import dequantise, quantise
from data_plane.attention.torch_paged import KvHeads, LatentKv
from data_plane.model.fp8_weight import FP8, Fp8Weight
from data_plane.model.linear import Linear
from data_plane.model.weights import MlpWeights, MoeWeights
from data_plane.moe.gpu.grouped import GroupedExperts
from harness.kernels.slow_references import (
    group_rows,
    reference_attention,
    reference_experts_forward,
    ungroup_rows,
)

LENGTHS = {
    "one token": [1],
    "one full page": [64],
    "pages and a bit": [200],
    "empty": [0],
    "empty rows between": [0, 5, 0, 0, 130, 64, 0],
    "one long row among short ones": [3, 900, 1, 0, 70],
    "many rows of a page": [1, 64, 13, 40, 64, 2, 33, 64, 5],
}


class AttentionCase:
    """Random rows over scattered frames; numbers after a row's last token must weigh nothing."""

    def __init__(
        self, lengths, heads, rank, rope, dtype, device="cpu", is_fp8=False, seed=0, scale=0.3,
        layout=None, num_queries=1,
    ):  # fmt: skip
        """layout: KvHeads in place of latent KV of these widths. num_queries: of a row."""
        layout = layout or LatentKv(rank)
        q_width = kv_width = rank + rope
        if isinstance(layout, KvHeads):
            q_width, kv_width = layout.head_dim, 2 * layout.num_kv_heads * layout.head_dim
        self.scale, self.rank, self.lengths = scale, rank, lengths
        generator = torch.Generator().manual_seed(seed)
        pages = [-(-length // 64) for length in lengths]
        num_frames, width = sum(pages) + 3, max([*pages, 1]) + 2
        pool = torch.randn(num_frames, 64, kv_width, generator=generator).to(dtype)
        self.q = (2 * torch.randn(len(lengths), heads, q_width, generator=generator)).to(dtype)
        order = torch.randperm(num_frames, generator=generator).tolist()
        self.num_queries = num_queries
        self.frames = []
        for query in range(len(lengths)):
            if query % num_queries == 0:
                most = max(pages[query : query + num_queries])
                self.frames += [[order.pop() for _ in range(most)]] * num_queries
        # Entries after a row's pages are no frame at all.
        table = torch.full((len(lengths), width), 2_147_480_000, dtype=torch.int32)
        for row, row_frames in enumerate(self.frames):
            table[row, : len(row_frames)] = torch.tensor(row_frames, dtype=torch.int32)
            first = row // num_queries * num_queries
            most = max(lengths[first : first + num_queries])
            if row_frames and most % 64:
                pool[row_frames[-1], most % 64 :] = 1e4
        self.pool = quantise(pool, rank) if is_fp8 else pool
        # A kernel rounds values that it has scaled to the dtype of the queries.
        exact_pool = dequantise(self.pool, rank).to(dtype) if is_fp8 else pool
        self.expected = reference_attention(
            self.q.float(), exact_pool.float(), self.frames, lengths, scale, layout
        )
        length_A = torch.tensor(lengths, dtype=torch.int32)
        self.q, self.pool, self.frame_AP, self.length_A = (
            t.to(device) for t in (self.q, self.pool, table, length_A)
        )

    def run(self, backend):
        """Run a backend on the case; memory that it does not write holds NaN."""
        with poisoned():
            plan = backend.plan(self.frame_AP, self.length_A, self.num_queries)
            return backend.run(self.q, self.pool, plan, self.scale)

    def check(self, partial, lse, atol, lse_atol):
        """Compare with the reference; raises AssertionError."""
        assert partial.dtype == self.q.dtype and lse.dtype == torch.float32
        expected, expected_lse = self.expected
        torch.testing.assert_close(partial.float().cpu(), expected, atol=atol, rtol=atol)
        torch.testing.assert_close(lse.cpu(), expected_lse, atol=lse_atol, rtol=1e-6)


@contextmanager
def poisoned():
    """Let torch fill what it allocates with NaN, so that what a kernel leaves out is seen."""
    # Deterministic algorithms fill uninitialised memory by default. What else they forbid is only
    # warned of.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def make_partials(num_partials, rows, heads, width, seed, empty=(), dtype=torch.float32):
    """Draw partials whose lse are far apart; those of `empty` are empty."""
    generator = torch.Generator().manual_seed(seed)
    partial = torch.randn(num_partials, rows, heads, width, generator=generator).to(dtype)
    lse = 20 * torch.randn(num_partials, rows, heads, generator=generator)
    for index in empty:
        partial[index], lse[index] = 0, float("-inf")
    return partial, lse


def in_fp8(weight_ENX, block):
    """Quantise weights; every block's largest value becomes FP8's largest."""
    rows, columns = weight_ENX.shape[1:]
    scale = F.max_pool2d(weight_ENX.abs(), block, ceil_mode=True) / torch.finfo(FP8).max
    of_each = scale.repeat_interleave(block[0], 1)[:, :rows].repeat_interleave(block[1], 2)[
        ..., :columns
    ]
    return Fp8Weight((weight_ENX / of_each).to(FP8), scale, block)


def dense_in_fp8(shape, block=(128, 128), device="cpu"):
    """Draw one weight [N, X] in FP8."""
    generator = torch.Generator(device).manual_seed(2)
    stacked = in_fp8(torch.randn(1, *shape, generator=generator, device=device), block)
    return stacked._replace(values=stacked.values[0], scale=stacked.scale[0])


def visited(experts, x_TX, slot_TK, weight_TK):
    """Run grouped experts on rows, as experts.experts_forward does: [T, X]."""
    x_ESX, count_E, place_TK = group_rows(x_TX, slot_TK, experts.num_here, len(x_TX))
    return ungroup_rows(experts.run_grouped(x_ESX, count_E), place_TK, weight_TK)


class ExpertCase:
    """Random rows and experts; some rows have no expert here, some experts have no row.

    fp8_block: rows and columns of a block; weights are then in FP8.
    """

    def __init__(
        self, dtype, num_rows=20, hidden=48, size=40, experts=range(2, 7), per_token=3,
        device="cpu", fp8_block=None,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(num_rows)
        num_experts = experts.stop + 2
        x_TX = torch.randn(num_rows, hidden, generator=generator).to(dtype)
        expert_TK = torch.rand(num_rows, num_experts, generator=generator).argsort(dim=1)[
            :, :per_token
        ]
        expert_TK[expert_TK == experts.start] = num_experts  # an expert that nobody visits
        weight_TK = torch.rand(num_rows, per_token, generator=generator)
        gate_up = torch.randn(len(experts), 2 * size, hidden, generator=generator) / hidden**0.5
        down = torch.randn(len(experts), hidden, size, generator=generator) / size**0.5
        stored = [weight.to(dtype) for weight in (gate_up, down)]
        exact = [weight.float() for weight in stored]
        if fp8_block is not None:
            stored = [in_fp8(weight, fp8_block) for weight in (gate_up, down)]
            exact = [weight.dequantised() for weight in stored]
        slot_TK = expert_TK - experts.start
        self.rows = [t.to(device) for t in (x_TX, slot_TK, weight_TK)]
        self.weights = [weight.to(device) for weight in stored]
        mlps = [MlpWeights(Linear(g), Linear(d)) for g, d in zip(*exact, strict=True)]
        moe = MoeWeights(torch.zeros(0), None, list(experts), mlps, shared=None)
        self.expected = reference_experts_forward(x_TX.float(), slot_TK, weight_TK, moe)

    def run(self, gemm):
        with poisoned():
            return visited(GroupedExperts(gemm, *self.weights), *self.rows)

    def check(self, y_TX, tolerance):
        assert y_TX.dtype == self.rows[0].dtype
        torch.testing.assert_close(
            y_TX.float().cpu(), self.expected, atol=tolerance, rtol=tolerance
        )
