"""The grouped GEMM kernel, interpreted, gives what the slow reference of the experts does."""

import pytest
import torch

from data_plane.moe.gpu.gemm import TritonGemm
from harness.kernels.kernel_cases import ExpertCase


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]
)
def test_experts_agree_with_the_reference(dtype, tolerance):
    case = ExpertCase(dtype)
    case.check(case.run(TritonGemm()), tolerance)


@pytest.mark.parametrize("shape", [(1, 16, 8), (70, 150, 130)])
def test_tiles_need_not_fit(shape):
    num_rows, hidden, size = shape
    case = ExpertCase(torch.float32, num_rows, hidden, size, range(2))
    case.check(case.run(TritonGemm()), 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(
    ("shape", "block"), [((5, 256, 128), (128, 128)), ((5, 200, 40), (8, 128))], ids=str
)
def test_weights_in_fp8_are_multiplied_with_their_blocks_scales(dtype, tolerance, shape, block):
    """They are as exact as plain weights, since the reference multiplies with what FP8 stands for.

    A weight need not be made of whole blocks.
    """
    num_rows, hidden, size = shape
    case = ExpertCase(dtype, num_rows, hidden, size, range(2, 4), fp8_block=block)
    assert all(weight.values.dtype == torch.float8_e4m3fn for weight in case.weights)
    case.check(case.run(TritonGemm()), tolerance)
