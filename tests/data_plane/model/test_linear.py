"""The packed linear layer computes what the plain one does, for any number of rows and strides."""

import pytest
import torch
import torch.nn.functional as F

from data_plane.model import linear
from data_plane.model.linear import Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(512, 256), (96, 33), (1, 7)])
def test_packed_agrees_with_plain(shape, dtype):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    layer = Linear(weight.to(dtype))
    assert layer.shape == shape
    for num_rows in (0, 1, 2, 5, 16, 64, 200):
        x = torch.randn(num_rows, shape[1], generator=torch.Generator().manual_seed(num_rows)).to(
            dtype
        )
        expected = F.linear(x.double(), weight.to(dtype).double())
        tolerance = {torch.float32: 1e-4, torch.bfloat16: 2e-2 * shape[1] ** 0.5}[dtype]
        assert layer(x).dtype == dtype
        torch.testing.assert_close(layer(x).double(), expected, atol=tolerance, rtol=1e-5)


def test_rows_may_be_slices_of_wider_ones():
    wide = torch.randn(6, 100, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(24, 40, generator=torch.Generator().manual_seed(2))
    for x in (
        wide[:, 30:70],
        wide[::2, :40],
        wide[:, :80:2],
        wide.T[:6, :4].T.repeat(1, 1)[:, :1].expand(4, 40),
    ):
        torch.testing.assert_close(Linear(weight)(x), F.linear(x, weight), atol=1e-5, rtol=1e-5)


def test_the_weight_given_may_be_a_slice_and_is_not_shared():
    whole = torch.randn(10, 64, generator=torch.Generator().manual_seed(3))
    weight = whole[2:8, ::2]
    layer, x = Linear(weight), torch.ones(3, 32)
    expected = F.linear(x, weight.clone())
    whole.zero_()
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_machine_without_packed_layouts_takes_the_plain_one(monkeypatch, dtype):
    weight = torch.randn(24, 40, generator=torch.Generator().manual_seed(4)).to(dtype)
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(5)).to(dtype)
    monkeypatch.setattr(linear, "_can_pack", lambda _: False)
    torch.testing.assert_close(Linear(weight)(x), F.linear(x, weight))
