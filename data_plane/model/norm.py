"""The root mean square norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise rows by their root mean square, computed in fp32; returns the dtype of x."""
    if weight.dtype == torch.float32:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return weight * F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)
