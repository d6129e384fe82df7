"""Batch dimension of each value in a TorchDynamo graph, by its symbol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node


class CannotSplit(Exception):
    """The model runs in program order on the whole batch, for the reason given."""


@dataclass(frozen=True)
class Cut:
    """A tensor has `rows_each` rows for each of the batch, along dimension `dim`."""

    dim: int
    rows_each: int


@dataclass(frozen=True)
class Size:
    """An integer that follows from the batch size."""

    expression: sympy.Expr
    symbol: sympy.Symbol

    def of(self, batch_size: int) -> int:
        """The integer for a batch, or for a micro-batch, of that many rows."""
        return int(self.expression.subs(self.symbol, batch_size))


Kind = Cut | Size | None
"""Relation of a value to the batch; None: the same for every micro-batch."""


@dataclass(frozen=True)
class BatchSymbol:
    """The symbol of the batch size."""

    symbol: sympy.Symbol
    same: Mapping[sympy.Symbol, sympy.Symbol]
    """Equal symbols of other inputs, each with `symbol`."""
    inputs: frozenset[str]

    def kind(self, node: Node) -> Kind:
        """The kind of the node's value. Raises CannotSplit."""
        value = node.meta.get("example_value", node.meta.get("val"))
        if isinstance(value, torch.SymInt):
            expression = value.node.expr.subs(self.same)
            return Size(expression, self.symbol) if self.symbol in expression.free_symbols else None
        if not isinstance(value, torch.Tensor):
            return None
        found: list[Cut] = []
        for dim, size in enumerate(value.shape):
            expression = size.node.expr.subs(self.same) if isinstance(size, torch.SymInt) else None
            if expression is not None and self.symbol in expression.free_symbols:
                rows_each = sympy.simplify(expression / self.symbol)
                if not rows_each.is_Integer:
                    raise CannotSplit(
                        f"{node.name} has {expression} rows for a batch of {self.symbol}"
                    )
                found.append(Cut(dim, int(rows_each)))
        if len(found) > 1:
            raise CannotSplit(f"{node.name} has the batch in {len(found)} dimensions")
        return found[0] if found else None


def batch_of(graph: GraphModule) -> BatchSymbol:
    """The first dimension of the inputs that have a symbolic one. Raises CannotSplit.

    Inputs of equal length share one batch.
    """
    found: dict[sympy.Symbol, str] = {}
    lengths: set[int] = set()
    for node in graph.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        size = value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else None
        if isinstance(size, torch.SymInt):
            lengths.add(size.node.hint)
            for symbol in size.node.expr.free_symbols:
                found.setdefault(symbol, node.name)
    if not found:
        raise CannotSplit("no input has a dynamic first dimension; mark the batch as dynamic")
    if len(lengths) > 1:
        raise CannotSplit(
            "inputs have several dynamic first dimensions: "
            + ", ".join(f"{symbol} of {name}" for symbol, name in found.items())
        )
    first = next(iter(found))
    return BatchSymbol(first, dict.fromkeys(found, first), frozenset(found.values()))


def storage_of(node: Any) -> int | None:
    """The memory of a tensor, or None: views of one tensor have the same."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    return int(value.untyped_storage()._cdata)
