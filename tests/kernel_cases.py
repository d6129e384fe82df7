"""Inputs for kernels, and what they must give: the same under the interpreter and on a GPU."""

from contextlib import contextmanager

import torch

from data_plane.attention.fp8_latent import dequantise, quantise
from data_plane.attention.torch_paged import reference_attention

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
    """Random rows over scattered frames; what lies behind a row's last token weighs nothing, whatever it is."""

    def __init__(self, lengths, heads, rank, rope, dtype, device="cpu", is_fp8=False, seed=0, scale=0.3):
        self.scale, self.rank, self.lengths = scale, rank, lengths
        generator = torch.Generator().manual_seed(seed)
        pages = [-(-length // 64) for length in lengths]
        num_frames, width = sum(pages) + 3, max([*pages, 1]) + 2
        pool = torch.randn(num_frames, 64, rank + rope, generator=generator).to(dtype)
        self.q = (2 * torch.randn(len(lengths), heads, rank + rope, generator=generator)).to(dtype)
        order = torch.randperm(num_frames, generator=generator).tolist()
        self.frames = [[order.pop() for _ in range(count)] for count in pages]
        # An entry behind a row's pages is no frame of anybody.
        table = torch.full((len(lengths), width), 2_147_480_000, dtype=torch.int32)
        for row, row_frames in enumerate(self.frames):
            table[row, : len(row_frames)] = torch.tensor(row_frames, dtype=torch.int32)
            if row_frames and lengths[row] % 64:
                pool[row_frames[-1], lengths[row] % 64 :] = 1e4
        self.pool = quantise(pool, rank) if is_fp8 else pool
        exact_pool = dequantise(self.pool, rank) if is_fp8 else pool
        self.expected = reference_attention(self.q.float(), exact_pool.float(), self.frames, lengths, scale, rank)
        length_A = torch.tensor(lengths, dtype=torch.int32)
        self.q, self.pool, self.frame_AP, self.length_A = (t.to(device) for t in (self.q, self.pool, table, length_A))

    def run(self, backend):
        """Memory that is not written holds NaN."""
        with poisoned():
            plan = backend.plan(self.frame_AP, self.length_A)
            return backend.run(self.q, self.pool, plan, self.scale)

    def check(self, partial, lse, atol, lse_atol):
        """Raises AssertionError, as torch.testing.assert_close does."""
        assert partial.dtype == self.q.dtype and lse.dtype == torch.float32
        expected, expected_lse = self.expected
        torch.testing.assert_close(partial.float().cpu(), expected, atol=atol, rtol=atol)
        torch.testing.assert_close(lse.cpu(), expected_lse, atol=lse_atol, rtol=1e-6)


@contextmanager
def poisoned():
    """torch fills what it allocates with NaN, so that what a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True)  # torch.utils.deterministic.fill_uninitialized_memory is its default
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def make_partials(num_partials, rows, heads, width, seed, empty=(), dtype=torch.float32):
    """Partials with far apart lse; those of `empty` hold nothing."""
    generator = torch.Generator().manual_seed(seed)
    partial = torch.randn(num_partials, rows, heads, width, generator=generator).to(dtype)
    lse = 20 * torch.randn(num_partials, rows, heads, generator=generator)
    for index in empty:
        partial[index], lse[index] = 0, float("-inf")
    return partial, lse
