"""The compiled kernels of every dtype and instruction set; tests skip those not here."""

import pytest
import torch

from data_plane.native.build import NativeUnavailable
from data_plane.native.kernels import NativeKernels

FORMS = [
    (torch.float32, "avx512"),
    (torch.float32, "avx2"),
    (torch.bfloat16, "amx"),
    (torch.bfloat16, "avx512"),
    (torch.bfloat16, "avx2"),
]
"""(dtype, instruction set)."""
# Relative to the largest value: bf16 has eight bits, and kernels round at other places.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.2e-2}


def native(form):
    """Load the kernels of a form, or skip the test if this CPU or compiler has none."""
    try:
        return NativeKernels(*form)
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


def available_forms():
    """List the forms that this machine has."""
    found = []
    for form in FORMS:
        try:
            NativeKernels(*form)
            found.append(form)
        except NativeUnavailable:
            continue
    return found


def assert_agree(value, expected, dtype):
    """Compare a kernel's result with its slow reference's."""
    assert value.dtype == expected.dtype and value.shape == expected.shape
    scale = expected.abs().max().item() if expected.numel() else 0
    torch.testing.assert_close(value, expected, atol=TOLERANCE[dtype] * scale, rtol=0)
