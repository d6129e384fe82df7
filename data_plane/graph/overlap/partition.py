"""Cut a traced model into operators, and find what each value has to do with the batch.

Enters: a graph of TorchDynamo, rules. Leaves: a `Program`. Does not know: orders, when anything
runs.

The batch is a symbol in the shapes of the graph. A value that has it in one dimension is cut along
that dimension; a size that has it is computed anew; everything else is shared. What cannot be cut
safely raises `CannotSplit`, which names the node and why.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.fx.passes.split_module import split_module
from torch.fx.traceback import annotate

from nanocp.overlap.ops import Rule, SplitFunc, SplitModule

_MARK = "nanocp_overlap"
_AUGMENTED = re.compile(r"i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift|matmul)")
"""Functions of `operator` for `+=` and the like."""
_RANDOM = re.compile(r"dropout|alpha_dropout|bernoulli_?|multinomial|rand(n|int|perm)?(_like)?")


class CannotSplit(Exception):
    """The model runs in program order on the whole batch; the sentence says why."""


def mark(tag: str) -> AbstractContextManager[Any]:
    """Make what runs inside, in the model's own code, an operator with this tag."""
    return annotate({_MARK: tag})


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
"""What a value has to do with the batch; None: nothing, it is the same for every micro-batch."""


@dataclass(frozen=True)
class Operator:
    """A part of the model that runs as a whole."""

    tag: str
    module: nn.Module
    """A GraphModule, or what was compiled of one."""
    inputs: tuple[int, ...]
    """Values that it reads, by number."""
    outputs: tuple[int, ...]
    """Values that it makes."""
    is_tuple: bool
    """It returns a tuple, of one or several outputs."""


@dataclass(frozen=True)
class Program:
    """A model in operators; values are numbered, first those that enter."""

    operators: tuple[Operator, ...]
    kinds: tuple[Kind, ...]
    """By value."""
    num_inputs: int
    outputs: Any
    """What the model returns: `Value`s, constants, tuples and lists of them."""
    written: frozenset[int]
    """Inputs that the model writes to in place."""
    mutated: frozenset[int]
    """Those of them that are shared: each micro-batch gets a copy."""
    memory: Mapping[int, int]
    """Values in memory that an operator writes to in place, with the first value in the same."""
    batch: tuple[int, Cut]
    """An input, and how the batch size is read from it."""


@dataclass(frozen=True)
class Value:
    """A place in what the model returns."""

    number: int


def partition(graph: GraphModule, rules: Sequence[Rule]) -> Program:
    """Cut the graph at the rules' matches. Raises CannotSplit."""
    _refuse_randomness(graph)
    symbol = _batch_symbol(graph)
    segment_of, tags = _segments(graph, rules)
    written_names, written_memory = _written(graph)
    whole = split_module(graph, graph, segment_of.__getitem__, keep_original_order=True)
    numbers: dict[str, int] = {}
    kinds: list[Kind] = []
    memory: dict[int, int] = {}
    first_in: dict[int, int] = {}

    def number(node: Node, made_by: Node | None = None) -> int:
        """The value's number; a new one is of the kind of the node that makes it."""
        if node.name not in numbers:
            numbers[node.name] = len(kinds)
            where = _storage(made_by or node)
            if where is not None and where in written_memory:
                memory[len(kinds)] = first_in.setdefault(where, len(kinds))
            kinds.append(_kind(made_by or node, symbol))
        return numbers[node.name]

    inputs = [node for node in whole.graph.nodes if node.op == "placeholder"]
    for node in inputs:
        number(node)
    operators = []
    for node in whole.graph.nodes:
        if node.op == "call_module":
            module = getattr(whole, node.target)
            tag = tags[int(str(node.target).rpartition("_")[2])]
            read = tuple(number(each) for each in node.args)
            (returned,) = (each.args[0] for each in module.graph.find_nodes(op="output"))
            is_tuple = isinstance(returned, tuple)
            made_by = returned if is_tuple else (returned,)
            users = {user.args[1]: user for user in node.users if user.target is operator.getitem}
            made = tuple(
                number(users[place] if is_tuple else node, inner)
                for place, inner in enumerate(made_by)
            )
            operators.append(Operator(tag, module, read, made, is_tuple))
    (output,) = (node for node in whole.graph.nodes if node.op == "output")
    as_value: Any = lambda each: Value(number(each)) if isinstance(each, Node) else each  # noqa: E731
    outputs = map_aggregate(output.args[0], as_value)
    written = frozenset(numbers[name] for name in written_names)
    return Program(
        tuple(operators),
        tuple(kinds),
        len(inputs),
        outputs,
        written,
        frozenset(number for number in written if kinds[number] is None),
        memory,
        _batch(kinds[: len(inputs)]),
    )


def _segments(graph: GraphModule, rules: Sequence[Rule]) -> tuple[dict[Node, int], list[str]]:
    """The operator of every node, and their tags: a new one begins where the match changes."""
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
    """What cuts the node out, and its tag."""
    if marked := (node.meta.get("custom") or {}).get(_MARK):
        return ("mark", marked), marked
    for rule in rules:
        if isinstance(rule, SplitModule):
            for path, (_, cls) in (node.meta.get("nn_module_stack") or {}).items():
                if getattr(cls, "__name__", cls) == rule.class_name:
                    return path, rule.tag
        elif isinstance(rule, SplitFunc) and re.fullmatch(rule.pattern, _name(node)):
            return node.name, rule.tag
    return None, ""


def _name(node: Node) -> str:
    """The function or method that the node calls, such as `linear`."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


# --- the batch


def _batch_symbol(graph: GraphModule) -> sympy.Symbol:
    """The symbol of the batch: the first dimension of the inputs that have a symbolic one."""
    found: dict[sympy.Symbol, str] = {}
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        if node.op == "placeholder" and isinstance(value, torch.Tensor) and value.dim():
            size = value.shape[0]
            if isinstance(size, torch.SymInt) and size.node.expr.free_symbols:
                for symbol in size.node.expr.free_symbols:
                    found.setdefault(symbol, node.name)
    if len(found) == 1:
        return next(iter(found))
    if not found:
        raise CannotSplit("no input has a dynamic first dimension; mark the batch as dynamic")
    raise CannotSplit(
        "inputs have several dynamic first dimensions: "
        + ", ".join(f"{symbol} of {name}" for symbol, name in found.items())
    )


def _kind(node: Node, symbol: sympy.Symbol) -> Kind:
    value = node.meta.get("example_value", node.meta.get("val"))
    if isinstance(value, torch.SymInt):
        expression = value.node.expr
        return Size(expression, symbol) if symbol in expression.free_symbols else None
    if not isinstance(value, torch.Tensor):
        return None
    found: list[Cut] = []
    for dim, size in enumerate(value.shape):
        if isinstance(size, torch.SymInt) and symbol in size.node.expr.free_symbols:
            rows_each = sympy.simplify(size.node.expr / symbol)
            if not rows_each.is_Integer:
                raise CannotSplit(f"{node.name} has {size.node.expr} rows for a batch of {symbol}")
            found.append(Cut(dim, int(rows_each)))
    if len(found) > 1:
        raise CannotSplit(f"{node.name} has the batch in {len(found)} dimensions")
    return found[0] if found else None


def _batch(kinds: Sequence[Kind]) -> tuple[int, Cut]:
    for number, kind in enumerate(kinds):
        if isinstance(kind, Cut):
            return number, kind
    raise CannotSplit("no input has the batch in a dimension")


# --- what is not safe


def _refuse_randomness(graph: GraphModule) -> None:
    for node in graph.graph.nodes:
        if _RANDOM.fullmatch(_name(node)) and _draws(node):
            raise CannotSplit(f"{node.name} draws random numbers: their order would change")


def _draws(node: Node) -> bool:
    """Whether the call is random: dropout is only in training, with a probability."""
    if "dropout" not in _name(node):
        return True
    names = ("input", "p", "training")
    values = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return bool(values.get("training", True)) and bool(values.get("p", 0.5))


def _written(graph: GraphModule) -> tuple[set[str], set[int | None]]:
    """Names of inputs that an in-place operator writes to, and all storages that one writes to.

    Raises CannotSplit if one writes to a tensor of the model's own.
    """
    owners: dict[int | None, Node] = {}
    for node in graph.graph.nodes:
        owners.setdefault(_storage(node), node)
    inputs, storages = set(), set()
    for node, written in _writes(graph):
        storage = _storage(written)
        owner = written if storage is None else owners[storage]
        if owner.op == "get_attr":
            raise CannotSplit(f"{node.name} writes to {owner.target}, which every forward shares")
        if owner.op == "placeholder":
            inputs.add(owner.name)
        storages.add(storage)
    return inputs, storages - {None}


def _writes(graph: GraphModule) -> Iterator[tuple[Node, Node]]:
    """Every in-place operator, and what it writes to."""
    for node in graph.graph.nodes:
        name = _name(node)
        is_in_place = (
            (name.endswith("_") and not name.endswith("__"))
            or name == "setitem"
            or (_AUGMENTED.fullmatch(name) and _storage(node.args[0]) is not None)
            or node.kwargs.get("inplace") is True
        )
        if node.op in ("call_method", "call_function") and is_in_place and node.args:
            yield node, node.args[0]
        if isinstance(out := node.kwargs.get("out"), Node):
            yield node, out


def _storage(node: Any) -> int | None:
    """The memory of a tensor, or None: views of one tensor have the same."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    return int(value.untyped_storage()._cdata)
