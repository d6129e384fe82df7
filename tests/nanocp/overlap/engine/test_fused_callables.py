"""Policies that replace operators by one callable: which they get, and what its errors say."""

import pytest
import torch
from torch import nn

from harness.overlap.overlap_models import LINEARS, WIDTH, Chain, compiled, recorded
from nanocp.overlap.ops import SplitModule
from nanocp.overlap.policies.orders import Comet, Flux, NanoFlow, TokenWeave

pytestmark = pytest.mark.usefixtures("fresh")


def linears(calls):
    """A fused callable of any linears on four rows each; it notes how many there were."""

    def linear(inputs):
        tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
        rows = next(each for each in tensors if each.shape[0] == 4 and each.dim() == 2)
        weight = next(each for each in tensors if each.shape == (WIDTH, WIDTH))
        bias = next(each for each in tensors if each.dim() == 1)
        return (torch.nn.functional.linear(rows, weight, bias),)

    return lambda *operators: calls.append(len(operators)) or [*map(linear, operators)]


def test_a_fused_callable_takes_the_place_of_operators():
    model = Chain().eval()
    calls = []
    run, _ = compiled(model, TokenWeave((SplitModule("Linear", "network"),), linears(calls)))
    batch = torch.randn(8, WIDTH)
    assert torch.equal(run(batch), model(batch)) and torch.equal(run(batch), model(batch))
    assert calls == [1] * (3 * 2 * 2)


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


@pytest.mark.parametrize(("policy", "tag"), [(Flux, "linear_all_reduce"), (Comet, "gemm_combine")])
def test_flux_and_comet_replace_what_their_tags_say(policy, tag):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).eval()
    calls = []

    def fused(inputs):
        calls.append(inputs)
        shapes = {each.dim(): each for each in inputs if isinstance(each, torch.Tensor)}
        rows = next(each for each in inputs if isinstance(each, torch.Tensor) and len(each) == 8)
        weight = next(
            each
            for each in inputs
            if isinstance(each, torch.Tensor) and each.shape[0] == WIDTH and each.dim() == 2
        )
        return [(torch.nn.functional.linear(rows, weight, shapes[1]),)]

    run, _ = compiled(model, policy((SplitModule("Linear", tag),), fused))
    batch = torch.randn(8, WIDTH)
    assert torch.equal(run(batch), model(batch))
    assert len(calls) == 2


def test_an_error_in_an_operator_names_it():
    def fails(inputs):
        raise RuntimeError("the kernel is missing")

    run, _ = compiled(Chain().eval(), Flux((SplitModule("Linear", "linear_all_reduce"),), fails))
    with pytest.raises(RuntimeError, match="the kernel is missing") as raised:
        run(torch.randn(8, WIDTH))
    assert "operator 0 (linear_all_reduce) of micro-batch 0" in " ".join(raised.value.__notes__)
