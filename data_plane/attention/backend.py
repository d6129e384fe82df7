"""Which attention this machine runs, chosen by name or `auto`, and why.

Enters: a name of the configuration. Leaves: the function and a sentence. Does not know: how it computes.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from data_plane.attention.torch_paged import AttentionPlan, paged_attention

AttentionFunction = Callable[[Tensor, Tensor, AttentionPlan, float, int], tuple[Tensor, Tensor]]
"""(q [A, H, D], frames [F, 64, D], plan, softmax scale, R) -> (partial_o [A, H, R], lse [A, H] fp32, natural log)."""


def attention_backend(name: str) -> tuple[AttentionFunction, str]:
    """`name` is auto or torch: config.py has refused anything else."""
    assert name in ("auto", "torch"), name
    if name == "auto":
        return paged_attention, "torch, because this instance runs on the CPU"
    return paged_attention, "torch, as configured"
