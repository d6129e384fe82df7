"""The layout of rotated vectors: `transformers` keeps two halves, NanoCP the checkpoint's pairs."""

import torch


def side_by_side(halves: torch.Tensor) -> torch.Tensor:
    """(x0, x2, ..., x1, x3, ...) in the last dimension becomes (x0, x1, x2, x3, ...)."""
    return torch.stack(halves.chunk(2, dim=-1), dim=-1).flatten(-2)
