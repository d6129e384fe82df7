"""Operators that write an output in place, for merging without copies (DynaFlow, Algorithm 2)."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from nanocp.overlap.engine.partition import Program

Place = Callable[[Sequence[int], Tensor], Tensor]
"""Allocates an output of a shape, like a given tensor."""


def linear_into(rows: Tensor, weight: Tensor, bias: Tensor | None, place: Place) -> Tensor:
    """`torch.nn.functional.linear` that writes to `place`, which must be contiguous there."""
    out = place((*rows.shape[:-1], weight.shape[0]), rows)
    flat, target = rows.reshape(-1, rows.shape[-1]), out.view(-1, out.shape[-1])
    if bias is None:
        torch.mm(flat, weight.t(), out=target)
    else:
        torch.addmm(bias, flat, weight.t(), out=target)
    return out


def _into(function: Any) -> Callable[[Tensor, Tensor, Place], Tensor]:
    def into(one: Tensor, other: Tensor, place: Place) -> Tensor:
        shape = torch.broadcast_shapes(one.shape, other.shape)  # type: ignore[no-untyped-call]
        written: Tensor = function(one, other, out=place(shape, one))
        return written

    return into


_INTO: dict[Any, Any] = dict.fromkeys((operator.add, torch.add), _into(torch.add))
_INTO |= dict.fromkeys((operator.mul, torch.mul), _into(torch.mul))


def writer(module: nn.Module, place: int | None) -> GraphModule | None:
    """The module with one more input, the `Place` that output number `place` is written to.

    place: None for a single output. Returns None if it cannot write there, the output is read
    again, or the module was compiled.
    """
    if not isinstance(module, GraphModule):
        return None
    module = copy.deepcopy(module)
    (returned,) = (node.args[0] for node in module.graph.find_nodes(op="output"))
    made_by = returned if place is None else returned[place]
    if not isinstance(made_by, Node) or made_by.op != "call_function" or len(made_by.users) > 1:
        return None
    last_input = list(module.graph.find_nodes(op="placeholder"))[-1]
    with module.graph.inserting_after(last_input):
        out = module.graph.placeholder("out_of_micro_batches")
    with module.graph.inserting_after(made_by):
        if made_by.target is torch.nn.functional.linear:
            arguments = [*made_by.args, *made_by.kwargs.values(), None][:3]
            written = module.graph.call_function(linear_into, (*arguments, out))
        elif made_by.target in _INTO and not made_by.kwargs and _are_alike(made_by.args):
            written = module.graph.call_function(_INTO[made_by.target], (*made_by.args, out))
        else:
            return None
    made_by.replace_all_uses_with(written, propagate_meta=True)
    module.graph.erase_node(made_by)
    module.recompile()
    return module


def _are_alike(arguments: Sequence[Any]) -> bool:
    values = [node.meta.get("example_value") for node in arguments if isinstance(node, Node)]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return len(arguments) == len(tensors) == 2 and tensors[0].dtype == tensors[1].dtype


class Writers:
    """Cache of operators that write one of their outputs into a given tensor."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._made: dict[tuple[int, Set[int]], tuple[int, GraphModule] | None] = {}

    def of(self, number: int, merged: Set[int]) -> tuple[int, GraphModule] | None:
        """(the output's place, the operator that writes it), or None if there is none."""
        operator = self._program.operators[number]
        key = number, merged & frozenset(operator.outputs)
        if key not in self._made:
            found = (
                (place, writer(operator.module, place if operator.is_tuple else None))
                for place, value in enumerate(operator.outputs)
                if value in merged
            )
            self._made[key] = next(((at, made) for at, made in found if made is not None), None)
        return self._made[key]


def joined(parts: Sequence[Tensor], dim: int) -> Tensor | None:
    """The tensor whose neighbouring slices along `dim` the parts are; None if they are not."""
    first, total = parts[0], 0
    for part in parts:
        offset = first.storage_offset() + total * first.stride(dim)
        is_alike = (part.stride(), part.dtype) == (first.stride(), first.dtype)
        is_there = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not is_alike or not is_there or part.storage_offset() != offset:
            return None
        total += part.shape[dim]
    shape = list(first.shape)
    shape[dim] = total
    return first.as_strided(shape, first.stride(), first.storage_offset())
