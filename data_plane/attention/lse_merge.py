"""LSE merge: partial attention outputs of one row over several instances, combined exactly.

A log-sum-exp is natural, fp32; an empty partial is (0, -inf). (The paper's section 5.1, phase 4.)
Legend: Q partials, B rows, H heads, V width.
"""

from __future__ import annotations

from torch import Tensor


def lse_merge(partial_QBHV: Tensor, lse_QBH: Tensor) -> tuple[Tensor, Tensor]:
    """Merge partials of any float dtype into (output [B, H, V], lse [B, H]), both fp32.

    All-empty partials become (0, -inf), never NaN.
    """
    if partial_QBHV.is_cuda:
        from data_plane.attention.triton_merge import merge_partials

        return merge_partials(partial_QBHV, lse_QBH)
    lse_BH = lse_QBH.logsumexp(dim=0)
    # An empty row has lse -inf. -inf - -inf would be NaN where the weight is 0.
    weight_QBH = (lse_QBH - lse_BH.masked_fill(lse_BH == float("-inf"), 0.0)).exp()
    return (partial_QBHV.float() * weight_QBH[..., None]).sum(dim=0), lse_BH
