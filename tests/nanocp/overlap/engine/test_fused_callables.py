"""Policies that replace operators by one callable: which they get, and what its errors say."""

import pytest
import torch
from torch import nn

from harness.overlap.overlap_models import LINEARS, WIDTH, Chain, compiled, recorded
from nanocp.overlap.ops import SplitModule
from nanocp.overlap.policies.orders import Comet, Flux, NanoFlow, TokenWeave

pytestmark = pytest.mark.usefixtures("fresh")


def linears(calls, rows=4):
    """A fused callable of any linears on so many rows each; it notes how many there were."""

    def linear(inputs):
        tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
        batch = next(each for each in tensors if each.shape[0] == rows and each.dim() == 2)
        weight = next(each for each in tensors if each.shape == (WIDTH, WIDTH))
        bias = next(each for each in tensors if each.dim() == 1)
        return (torch.nn.functional.linear(batch, weight, bias),)

    return lambda *operators: calls.append(len(operators)) or [*map(linear, operators)]


@pytest.mark.parametrize(("policy", "tag", "rows"), [
    (TokenWeave, "network", 4), (Flux, "linear_all_reduce", 8), (Comet, "gemm_combine", 8),
])  # fmt: skip
def test_a_fused_callable_takes_the_place_of_operators(policy, tag, rows):
    model, calls, batch = Chain().eval(), [], torch.randn(8, WIDTH)
    run, _ = compiled(model, policy((SplitModule(nn.Linear, tag),), linears(calls, rows)))
    assert torch.equal(run(batch), model(batch)) and torch.equal(run(batch), model(batch))
    assert calls == [1] * (3 * (8 // rows) * 2)


def test_different_operators_of_two_halves_are_one_fused_call():
    calls = []

    class Staggered(NanoFlow):
        """Half 1 is an operator behind; both heads are one call."""

        def next_round(self, ops):
            heads = [op for half in (0, 1) for op in ops.get_ready_ops(half)[:1]]
            is_pair = len({op.number for op in heads}) == 2
            ops.execute(heads if is_pair else heads[:1], linears(calls) if is_pair else None)

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).eval()
    run, engines = compiled(model, Staggered(LINEARS))
    batch = torch.randn(8, WIDTH)
    assert torch.equal(run(batch), model(batch)) and torch.equal(run(batch), model(batch))
    assert calls == [2] * (3 * 2) and recorded(engines[0], 8) is not None


def test_an_error_in_an_operator_names_it():
    def fails(inputs):
        raise RuntimeError("the kernel is missing")

    run, _ = compiled(Chain().eval(), Flux((SplitModule(nn.Linear, "linear_all_reduce"),), fails))
    with pytest.raises(RuntimeError, match="the kernel is missing") as raised:
        run(torch.randn(8, WIDTH))
    assert "operator 0 (linear_all_reduce) of micro-batch 0" in " ".join(raised.value.__notes__)
