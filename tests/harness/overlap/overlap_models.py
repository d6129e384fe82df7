"""A small model for tests of the overlap engine, and the engine of a model."""

import torch
from torch import nn

from nanocp.overlap.engine.backend import overlap
from nanocp.overlap.ops import SplitModule

LINEARS = (SplitModule(nn.Linear, "attention"),)
WIDTH = 16


class Chain(nn.Module):
    """Linears with residuals."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, rows):
        for layer in self.layers:
            rows = rows + torch.relu(layer(rows))
        return rows


def rules_of(model, name, tag="attention"):
    """A rule that cuts out modules of the class by that name, which a library may hide."""
    return (SplitModule({type(e).__name__: type(e) for e in model.modules()}[name], tag),)


def compiled(model, policy):
    engines = []
    return overlap(model, policy, engines.append), engines


def recorded(engine, rows):
    """What is recorded for batches of so many rows."""
    return engine.recordings[rows, None]
