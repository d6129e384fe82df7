"""What every test of a compiled model begins with."""

import pytest
import torch


@pytest.fixture
def fresh():
    """Nothing was compiled before, numbers are drawn anew, and no gradients are kept."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield
