"""Prove, node by node, that the rows of a batch do not depend on each other."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from nanocp.overlap.engine.batch import BatchSymbol, CannotSplit, Cut, Size
from nanocp.overlap.engine.comparison import altered, difference

_ROWS = ((0, 5), (0, 2), (2, 3))
"""(begin, count) of the whole, and of its two parts."""
_SORTS = ("sort", "argsort")
_COUNTS = ("histc", "bincount")
_EMPTY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")


class _Kind(IntEnum):
    """Row dependence of a value; the largest of a node's inputs decides."""

    SHARED = 0
    SIZE = 1
    """Follows from the number of rows."""
    ROWS = 2
    """Each row follows from that row alone."""
    WOVEN = 3
    """Rows at several places of one dimension."""
    MOVED = 4
    ORDER = 5
    """Row numbers or counts."""


_OF_ROWS = (_Kind.ROWS, _Kind.WOVEN, _Kind.MOVED)


class _Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()
        self.saved: list[tuple[Tensor, Tensor]] = []
        """Shared tensors that were written, with their earlier content."""
        self.has_read_number = False
        self.shared: set[int] = set()
        """Memory that a node with rows may not write to."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments, kwargs = func._schema.arguments, kwargs or {}
        given = {each.name: each.default_value for each in arguments} | kwargs
        given |= zip((each.name for each in arguments), args, strict=False)
        if torch.Tag.nondeterministic_seeded in func.tags and not _is_quiet(given):
            raise CannotSplit("draws random numbers: their order would change")
        if torch.Tag.data_dependent_output in func.tags:
            self.has_read_number = True
        names = [each.name for each in arguments if each.alias_info and each.alias_info.is_write]
        if given.get("training"):  # torch's schema of batch norm does not say what it writes to
            names += [name for name in given if name.startswith("running_")]
        for tensor in _tensors([given[name] for name in names]):
            if _memory(tensor) in self.shared:
                raise CannotSplit("writes to what all rows share")
            self.written.add(_memory(tensor))
            self.saved.append((tensor, tensor.clone()))
        made = func(*args, **kwargs)
        # Memory that nothing was written to holds anything.
        return made.zero_() if func._schema.name.partition("::")[2] in _EMPTY else made


def _is_quiet(given: Mapping[str, Any]) -> bool:
    """Whether a random operator is deterministic: in evaluation, or with probability 0."""
    probabilities = [given[name] for name in ("p", "dropout", "dropout_p") if name in given]
    return False in (given.get("train"), given.get("training")) or 0.0 in probabilities


def prove(
    graph: GraphModule, batch: BatchSymbol, inputs: Sequence[Any], segment_of: Mapping[Node, int]
) -> dict[Node, list[Node]]:
    """Every node that writes in place, with its targets. Raises CannotSplit.

    The graph runs on five altered rows, and on two and three of them: parts of results must equal
    results of parts. A sort may move rows if they are moved back.
    """
    proof, depth = _Proof(graph, batch), torch._C._functorch.get_dynamic_layer_stack_depth()
    device = next((each.device.type for each in _tensors(inputs)), "cpu")
    dtype, is_on = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    with torch.no_grad(), torch.autocast(device, dtype, is_on), torch.random.fork_rng(devices=()):
        nesting = torch.autocast_increment_nesting()
        torch.manual_seed(0)
        try:
            proof.run(inputs, segment_of)
        finally:
            # A graph that was left half-way has not left its contexts.
            torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
            while torch.autocast_decrement_nesting() >= nesting:
                pass
            for tensor, before in reversed(proof.watched.saved):
                tensor.copy_(before)
    return proof.writes


class _Proof:
    def __init__(self, graph: GraphModule, batch: BatchSymbol) -> None:
        self.writes: dict[Node, list[Node]] = {}
        self.watched = _Watched()
        self._graph = graph.graph
        self._batch = batch
        self._interpreter = Interpreter(graph)
        self._values: dict[Node, list[Any]] = {}
        self._kinds: dict[Node, _Kind] = {}

    def run(self, inputs: Sequence[Any], segment_of: Mapping[Node, int]) -> None:
        given, before, segment = iter(inputs), _state(), 0
        last_use = {each: node for node in self._graph.nodes for each in node.all_input_nodes}
        for node in self._graph.nodes:
            try:
                if node.op == "placeholder":
                    self._enter(node, next(given))
                elif node.op == "output":
                    self._leave(node)
                else:
                    if segment_of[node] != segment and _state() != before:
                        raise CannotSplit("begins an operator inside a context of the model's")
                    segment = segment_of[node]
                    self._step(node)
            except Exception as error:
                is_ours = "" if isinstance(error, CannotSplit) else "fails on a part of the rows: "
                text = str(error).partition("\n")[0]
                raise CannotSplit(f"{node.name} {is_ours}{text}") from error
            for each in node.all_input_nodes:
                if last_use[each] is node:
                    self._values.pop(each, None)

    def _enter(self, node: Node, value: Any) -> None:
        kind, self._kinds[node] = self._batch.kind(node), _Kind.SHARED
        if isinstance(kind, Size):
            self._kinds[node] = _Kind.SIZE
            self._values[node] = [kind.of(count) for _, count in _ROWS]
        elif isinstance(kind, Cut):
            rows, num = altered(value, kind, _ROWS[0][1]), kind.rows_each
            self._kinds[node] = _Kind.ROWS
            self._values[node] = [
                rows.narrow(kind.dim, begin * num, count * num).clone() for begin, count in _ROWS
            ]
        else:
            is_float = isinstance(value, Tensor) and value.is_floating_point()
            if is_float and value.numel() > 1 and (value == value.flatten()[0]).all():
                # A table of zeros hides which row is read.
                value = value + torch.rand(value.shape).to(value)
            # `int` of a symbolic size would compile the graph for that size only.
            is_size = isinstance(value, torch.SymInt)
            self._values[node] = 3 * [value.node.hint if is_size else value]

    def _leave(self, output: Node) -> None:
        for node in output.all_input_nodes:
            if self._kinds[node] > _Kind.ROWS:
                raise CannotSplit(f"returns {node.name}, whose rows are not in their places")

    def _step(self, node: Node) -> None:
        read = {self._kinds[each] for each in node.all_input_nodes}
        is_shared = read <= {_Kind.SHARED}
        self.watched.written.clear()
        self.watched.shared, self.watched.has_read_number = set(), False
        for each in () if is_shared else node.all_input_nodes:
            if self._kinds[each] == _Kind.SHARED:
                self.watched.shared |= set(map(_memory, _tensors(self._values[each][0])))
        made = [self._call(node, index) for index in range(1 if is_shared else 3)]
        self._values[node], self._kinds[node] = (3 * made)[:3], _Kind.SHARED
        changed = [
            each
            for each in node.all_input_nodes
            if not self.watched.written.isdisjoint(map(_memory, _tensors(self._values[each])))
        ]
        if changed:
            self.writes[node] = changed
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, _tensors(made))):
            raise CannotSplit("runs under a transformation of torch.func")
        for each in () if is_shared else (node, *changed):
            self._kinds[each] = self._accepted(node, each, read)

    def _call(self, node: Node, index: int, fill: int | None = None) -> Any:
        """Run a node; fill: replaces every element of a row."""

        def value_of(read: Node) -> Any:
            value = self._values[read][index]
            if fill is None or self._kinds[read] < _Kind.ROWS:
                return value
            filled = lambda each: torch.full_like(each, fill) if isinstance(each, Tensor) else each  # noqa: E731
            return tree_map(filled, value)

        args, kwargs = map_arg((node.args, dict(node.kwargs)), value_of)
        with self.watched:
            made = getattr(self._interpreter, node.op)(node.target, args, kwargs)
        if getattr(node.target, "namespace", "") == "_c10d_functional":
            for each in _tensors([made]):  # a collective has only begun: its values come later
                torch.ops._c10d_functional.wait_tensor(each)
        return made

    def _accepted(self, node: Node, made: Node, read: Set[_Kind]) -> _Kind:
        name = node.target if isinstance(node.target, str) else node.target.__name__
        found, tensors = self._found(made), _tensors(self._values[made])
        has_rows, has_order = not read.isdisjoint(_OF_ROWS), _Kind.ORDER in read
        is_moved = _Kind.MOVED in read or name in _SORTS or (has_order and has_rows)
        are_integers = all(
            not (each.is_floating_point() or each.is_complex() or each.dtype == torch.bool)
            for each in tensors
        )
        if not tensors:
            if self.watched.has_read_number:
                raise CannotSplit("reads a number out of a tensor")
            return found
        if has_order and not has_rows:
            found = _Kind.ORDER
        elif found == _Kind.SHARED and has_rows:
            # Rows may agree by chance: any other ones must, too.
            is_constant = not difference(self._call(node, 0, fill=0), self._call(node, 0, fill=1))
            found = found if is_constant else _Kind.ORDER
        elif found in _OF_ROWS and _Kind.MOVED in read and not has_order:
            found = _Kind.MOVED
        if found == _Kind.ORDER and name == "sort":
            return _Kind.MOVED
        is_item = node.target is operator.getitem and isinstance(node.args[1], int)
        if (
            found <= _Kind.WOVEN
            or (found == _Kind.MOVED and is_moved)
            or (found == _Kind.ORDER and name in (*_SORTS, *_COUNTS))
            or (found == _Kind.ORDER and are_integers and (not has_rows or (is_item and is_moved)))
        ):
            return found
        raise CannotSplit("makes rows depend on each other, or on how many there are")

    def _found(self, node: Node) -> _Kind:
        found = [_Kind.SHARED]
        for whole, *parts in zip(*map(tree_leaves, self._values[node]), strict=True):
            if isinstance(whole, Tensor):
                found.append(_kind_of(whole, parts))
            elif any(part != whole for part in parts):
                found.append(_Kind.SIZE)
        return max(found)


def _kind_of(whole: Tensor, parts: Sequence[Tensor]) -> _Kind:
    """The kind of a tensor; rounding differences of parts are removed."""
    dims = [dim for dim, size in enumerate(whole.shape) if size != parts[0].shape[dim]]
    if not dims:
        return _Kind.ORDER if any(difference(each, whole) for each in parts) else _Kind.SHARED
    if len(dims) > 1:
        raise CannotSplit(f"has the batch in {len(dims)} dimensions")
    (dim,), num = dims, _ROWS[0][1]
    rows_each, left = divmod(whole.shape[dim], num)
    if left or parts[0].shape[dim] != _ROWS[1][1] * rows_each:
        raise CannotSplit("has a number of rows that is no multiple of the batch's")
    for outer in (each for each in range(1, rows_each + 1) if not rows_each % each):
        # A dimension may hold several: each row of the batch is then in `outer` places of it.
        apart = torch.unflatten(whole, dim, (outer, num, rows_each // outer))
        cuts = [apart.narrow(dim + 1, *rows).flatten(dim, dim + 2) for rows in _ROWS[1:]]
        if not any(map(difference, parts, cuts)):
            for part, cut in zip(parts, cuts, strict=True):
                if part.is_floating_point() and 0 not in part.stride():
                    part.copy_(cut)
            return _Kind.ROWS if outer == 1 else _Kind.WOVEN
    sums = [_sums_of_rows(each, dim) for each in (whole, torch.cat(list(parts), dim))]
    return _Kind.ORDER if difference(*sums) else _Kind.MOVED


def _sums_of_rows(tensor: Tensor, dim: int) -> Tensor:
    rows = tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1).double()
    weights = torch.linspace(1, 2, rows.shape[1]).to(rows)
    sums = (rows @ weights).sort().values
    return sums.to(tensor.dtype) if tensor.is_floating_point() else sums


def _state() -> tuple[Any, ...]:
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    return torch.is_grad_enabled(), torch._C._is_any_autocast_enabled(), depth


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def _memory(tensor: Tensor) -> int:
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return 0 if wrapped else int(tensor.untyped_storage()._cdata)
