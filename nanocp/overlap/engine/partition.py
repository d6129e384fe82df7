"""Cut a traced model into operators; raises `CannotSplit`, naming the node, for unsafe ones."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.fx.passes.split_module import split_module
from torch.fx.traceback import annotate

from nanocp.overlap.engine.batch import CannotSplit, Cut, Kind, batch_of, storage_of
from nanocp.overlap.engine.proof import prove
from nanocp.overlap.ops import Rule, SplitFunc, SplitModule

_MARK = "nanocp_overlap"


def mark(tag: str) -> AbstractContextManager[Any]:
    """Make the code that runs inside an operator with this tag."""
    return annotate({_MARK: tag})


@dataclass(frozen=True)
class Operator:
    """A part of the model that runs as a whole."""

    tag: str
    module: nn.Module
    """A GraphModule, or its compiled form."""
    inputs: tuple[int, ...]
    """Numbers of values."""
    outputs: tuple[int, ...]
    is_tuple: bool
    after: tuple[int, ...]
    """Earlier operators with conflicting memory accesses."""


@dataclass(frozen=True)
class Program:
    """A model in operators; values are numbered, inputs first."""

    operators: tuple[Operator, ...]
    kinds: tuple[Kind, ...]
    num_inputs: int
    outputs: Any
    """`Value`s, constants, tuples and lists of them."""
    written: frozenset[int]
    mutated: frozenset[int]
    """Shared inputs that the model writes to: each micro-batch gets a copy."""
    batch: tuple[tuple[int, Cut], ...]
    """Inputs with the batch, and how to read its size."""

    @property
    def tags(self) -> list[str]:
        """Tags of the operators."""
        return [each.tag for each in self.operators]


@dataclass(frozen=True)
class Value:
    """A value among the model's outputs."""

    number: int


def partition(graph: GraphModule, rules: Sequence[Rule], given: Sequence[Any]) -> Program:
    """Cut the graph at the rules' matches. given: its inputs. Raises CannotSplit."""
    is_learned = any(isinstance(each, torch.Tensor) and each.requires_grad for each in given)
    if is_learned and torch.is_grad_enabled():
        raise CannotSplit("gradients are recorded, and an order repeats none")
    batch = batch_of(graph)
    segment_of, tags = _segments(graph, rules)
    writes = prove(graph, batch, given, segment_of)
    after = _after(writes, segment_of)
    whole = split_module(graph, graph, segment_of.__getitem__, keep_original_order=True)
    numbers: dict[str, int] = {}
    kinds: list[Kind] = []

    def number(node: Node, made_by: Node | None = None) -> int:
        if node.name not in numbers:
            numbers[node.name] = len(kinds)
            kinds.append(batch.kind(made_by or node))
        return numbers[node.name]

    inputs = [node for node in whole.graph.nodes if node.op == "placeholder"]
    for node in inputs:
        number(node)
    operators = []
    for node in whole.graph.nodes:
        if node.op == "call_module":
            module = getattr(whole, node.target)
            segment = int(str(node.target).rpartition("_")[2])
            read = tuple(number(each) for each in node.args)
            (returned,) = (each.args[0] for each in module.graph.find_nodes(op="output"))
            is_tuple = isinstance(returned, tuple)
            made_by = returned if is_tuple else (returned,)
            users = {user.args[1]: user for user in node.users if user.target is operator.getitem}
            made = tuple(
                number(users[place] if is_tuple else node, inner)
                for place, inner in enumerate(made_by)
            )
            operators.append(Operator(tags[segment], module, read, made, is_tuple, after[segment]))
    (output,) = (node for node in whole.graph.nodes if node.op == "output")
    as_value: Any = lambda each: Value(number(each)) if isinstance(each, Node) else each  # noqa: E731
    outputs = map_aggregate(output.args[0], as_value)
    written = frozenset(numbers[name] for name in _written(graph, writes))
    return Program(
        tuple(operators),
        tuple(kinds),
        len(inputs),
        outputs,
        written,
        frozenset(number for number in written if kinds[number] is None),
        tuple(
            (n, kind)
            for n, (node, kind) in enumerate(zip(inputs, kinds, strict=False))
            if node.name in batch.inputs and isinstance(kind, Cut)
        ),
    )


def _written(graph: GraphModule, writes: Mapping[Node, Sequence[Node]]) -> set[str]:
    """Inputs that are written in place; raises CannotSplit for written parameters."""
    writer_of = {storage_of(each): node for node in writes for each in writes[node]}
    for node in graph.graph.find_nodes(op="get_attr"):
        if writer := writer_of.get(storage_of(node)):
            raise CannotSplit(f"{writer.name} writes to {node.target}, which every forward shares")
    inputs = graph.graph.find_nodes(op="placeholder")
    return {node.name for node in inputs if storage_of(node) in writer_of}


def _after(
    writes: Mapping[Node, Sequence[Node]], segment_of: Mapping[Node, int]
) -> list[tuple[int, ...]]:
    touched: list[set[int | None]] = [set() for _ in {*segment_of.values()}]
    wrote = [set(each) for each in touched]
    for node, segment in segment_of.items():
        touched[segment] |= {*map(storage_of, (node, *node.all_input_nodes))}
        wrote[segment] |= {storage_of(each) for each in writes.get(node, ())}
    return [
        tuple(
            earlier
            for earlier in range(later)
            if wrote[earlier] & touched[later] or touched[earlier] & wrote[later]
        )
        for later in range(len(touched))
    ]


def _segments(graph: GraphModule, rules: Sequence[Rule]) -> tuple[dict[Node, int], list[str]]:
    segment_of: dict[Node, int] = {}
    tags: list[str] = []
    last: Any = ()
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        match, tag = _match(node, rules)
        if match != last or not tags:
            tags.append(tag)
            last = match
        segment_of[node] = len(tags) - 1
    return segment_of, tags


def _match(node: Node, rules: Sequence[Rule]) -> tuple[Any, str]:
    if marked := (node.meta.get("custom") or {}).get(_MARK):
        return ("mark", marked), marked
    called = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    for rule in rules:
        if isinstance(rule, SplitModule):
            for path, (_, cls) in (node.meta.get("nn_module_stack") or {}).items():
                if issubclass(cls, rule.module_class):
                    return path, rule.tag
        elif isinstance(rule, SplitFunc) and re.fullmatch(rule.pattern, called):
            return node.name, rule.tag
    return None, ""
