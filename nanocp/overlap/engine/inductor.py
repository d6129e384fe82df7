"""Inductor compilation of operators, once for all that differ only in parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from nanocp.overlap.engine.partition import Program
from nanocp.overlap.policies.orders import NETWORK


def compiled_module(module: GraphModule) -> Any:
    """The module, compiled at its first call with a recompile limit of its own."""
    compile_alone: Any = torch.compile  # whose overloads lack the argument
    return compile_alone(module, isolate_recompiles=True)


def compiled(program: Program) -> Program:
    """The program with compiled operators; communication stays uncompiled, and starts at once."""
    made: dict[str, Any] = {}
    operators = []
    for each in program.operators:
        module = each.module
        if each.tag != NETWORK and isinstance(module, GraphModule):
            kind = kind_of(module)
            if kind not in made:
                made[kind] = compiled_module(module)
            each = replace(each, module=made[kind])
        operators.append(each)
    return replace(program, operators=tuple(operators))


def kind_of(module: GraphModule) -> str:
    """A key of operators that differ in parameters only."""
    places: dict[Node, Any] = {node: f"%{place}" for place, node in enumerate(module.graph.nodes)}
    lines = []
    for node in module.graph.nodes:
        target: Any = node.target
        if node.op == "placeholder":
            value = node.meta.get("example_value")
            is_tensor = isinstance(value, torch.Tensor)
            target = (value.dtype, tuple(value.shape)) if is_tensor else type(value)
        elif node.op == "get_attr":
            target = id(getattr(module, str(target)))
        read = map_arg((node.args, dict(node.kwargs)), places.__getitem__)
        lines.append(f"{node.op} {target} {read}")
    return "\n".join(lines)
