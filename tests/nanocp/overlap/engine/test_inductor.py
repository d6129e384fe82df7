"""Inductor compiles each kind of operator once; the result is the model's."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from harness.overlap.overlap_models import recorded
from nanocp.overlap.engine.backend import overlap
from nanocp.overlap.ops import SplitFunc, SplitModule
from nanocp.overlap.policies.orders import NETWORK, NanoFlow

pytestmark = pytest.mark.usefixtures("fresh")

RULES = (SplitModule(nn.Linear, "attention"), SplitFunc("sigmoid", NETWORK))
WIDTH, DEPTH = 16, 4


class Layers(nn.Module):
    """Equal layers, one that communicates, and a head of another width."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WIDTH // 2)

    def forward(self, rows):
        for layer in self.layers:
            rows = rows + torch.relu(layer(rows)) * 2
        return self.head(torch.sigmoid(rows))


def test_operators_that_differ_in_parameters_only_are_compiled_once(monkeypatch):
    found, compiled = [], []
    model, rows = Layers().eval(), torch.randn(8, WIDTH)
    run = overlap(model, NanoFlow(RULES), found.append, inductor=True)

    class Noted(nn.Module):
        def __init__(self, module, **_):
            super().__init__()
            compiled.append(self)
            self.forward = module.forward

    monkeypatch.setattr(torch, "compile", Noted)
    assert torch.equal(run(rows), model(rows)) and torch.equal(run(rows), model(rows))
    (engine,) = found
    operators = engine.program.operators
    assert len(operators) == 2 * DEPTH + 2 and recorded(engine, 8) is not None
    assert len(compiled) == 4, "layers, what is between them, the head, and the whole graph"
    assert [each.tag for each in operators if each.module not in compiled] == [NETWORK]
    assert engine.num_copied_bytes == 2 * 4 * 8 * WIDTH // 2, "the head writes into no given memory"


@pytest.mark.system
def test_the_result_of_compiled_operators_is_the_model_s():
    found, model = [], Layers().eval()
    run = overlap(model, NanoFlow(RULES), found.append, inductor=True)
    counters.clear()
    num_compiled = []
    for num_rows in (8, 12, 6):
        rows = torch.randn(num_rows, WIDTH)
        for _ in range(2):
            torch.testing.assert_close(run(rows), model(rows))
        num_compiled.append(counters["stats"]["unique_graphs"])
    (engine,) = found
    assert all(engine.recordings.values())
    assert num_compiled[0] < len(engine.program.operators), "kinds are compiled, not operators"
    assert num_compiled[1] == num_compiled[2], "the second size is compiled for any other"
