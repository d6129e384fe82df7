"""Which dtype a kernel's products take: the tensor's, but where Triton's interpreter cannot.

Enters: a torch dtype. Leaves: a Triton dtype. Does not know: kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """Of the operands of tl.dot. The interpreter keeps bf16 as its bits and would multiply those:
    fp32 there."""
    if dtype == torch.bfloat16 and triton.knobs.runtime.interpret:
        return tl.float32
    return _DTYPES[dtype]
