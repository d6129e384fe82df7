"""Residual sums, root mean square norms and gated products on a GPU, in one launch each.

The slow references are model/norm.py and model/layers.gated_mlp. Legend: B rows, X hidden size, V
vocabulary, I width of an MLP.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_NUM_WARPS = 8
_BLOCK_I = 1024


@triton.jit
def store_normed(x, weight_ptr, normed_ptr, column, inside, row, width, eps):
    """Write a row normed. x: fp32 [BLOCK_X], zeros outside, with the precision of the rows.

    A row is rounded before it meets a weight that is not fp32.
    """
    kind = normed_ptr.dtype.element_ty
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    if weight_ptr.dtype.element_ty != tl.float32:
        normed = normed.to(kind).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed_ptr + row * width + column, (weight * normed).to(kind), mask=inside)


@triton.jit
def norm_kernel(
    x_ptr, row_ptr, first_ptr, second_ptr, weight_ptr, out_ptr, normed_ptr, width, eps,
    HAS_ROWS: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_SECOND: tl.constexpr,
    BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Program b: add up to two tensors to row b; write the sum, and the sum normed.

    HAS_ROWS: row b is row row_ptr[b] (int64) of x, such as a table of embeddings.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_X)
    inside = column < width
    source = row
    if HAS_ROWS:
        source = tl.load(row_ptr + row)
    x = tl.load(x_ptr + source * width + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_FIRST:
        added = tl.load(first_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_SECOND:
            second = tl.load(second_ptr + row * width + column, mask=inside, other=0.0)
            added += second.to(tl.float32)
        x += added
    if HAS_FIRST or HAS_ROWS:
        rounded = x.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * width + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    store_normed(x, weight_ptr, normed_ptr, column, inside, row, width, eps)


def add_norm(
    x_BX: Tensor,
    weight_X: Tensor,
    eps: float,
    first_BX: Tensor | None = None,
    second_BX: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add up to two tensors to rows: (the sums, the sums normed); without any, x_BX itself."""
    return _launch(x_BX, None, (first_BX, second_BX), weight_X, eps)


def embed_norm(
    table_VX: Tensor, token_B: Tensor, weight_X: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Look tokens up in the table of embeddings: (the rows, the rows normed)."""
    return _launch(table_VX, token_B, (None, None), weight_X, eps)


def _launch(
    x: Tensor,
    row_B: Tensor | None,
    added: tuple[Tensor | None, Tensor | None],
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    (first, second), width = added, x.shape[1]
    num_rows = len(x) if row_B is None else len(row_B)
    normed = x.new_empty(num_rows, width)
    out = x if row_B is None and first is None else x.new_empty(num_rows, width)
    assert x.is_contiguous() and all(each is None or each.is_contiguous() for each in added)
    if num_rows:
        norm_kernel[(num_rows,)](
            x, x if row_B is None else row_B, x if first is None else first,
            x if second is None else second, weight, out, normed, width, eps,
            HAS_ROWS=row_B is not None, HAS_FIRST=first is not None,
            HAS_SECOND=second is not None, BLOCK_X=triton.next_power_of_2(width),
            num_warps=_NUM_WARPS,
        )  # fmt: skip
    return out, normed


@triton.jit
def gated_product(gate, up):
    """Return silu(gate) * up, computed in fp32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def gated_kernel(gate_up_ptr, out_ptr, width, BLOCK_I: tl.constexpr):
    """Program (row, column block): silu(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    inside = column < width
    at = gate_up_ptr + row * 2 * width + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    result = gated_product(gate, up)
    tl.store(out_ptr + row * width + column, result.to(out_ptr.dtype.element_ty), mask=inside)


def gated(gate_up_BY: Tensor) -> Tensor:
    """Return silu(gate) * up of rows [gate, up]: [B, I]."""
    num_rows, width = gate_up_BY.shape[0], gate_up_BY.shape[1] // 2
    out = gate_up_BY.new_empty(num_rows, width)
    if num_rows:
        block = min(_BLOCK_I, triton.next_power_of_2(width))
        gated_kernel[(num_rows, triton.cdiv(width, block))](gate_up_BY, out, width, BLOCK_I=block)
    return out
