"""`torch.compile(model, backend=overlap_backend(policy))`: a model in the order of a policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from nanocp.overlap.engine.batch import CannotSplit
from nanocp.overlap.engine.engine import OverlapEngine
from nanocp.overlap.engine.inductor import compiled, compiled_module
from nanocp.overlap.engine.partition import partition
from nanocp.overlap.ops import OverlapPolicy

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)


def overlap_backend(
    policy: OverlapPolicy,
    built: Callable[[OverlapEngine], None] = lambda engine: None,
    inductor: bool = False,
) -> Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]:
    """Make a backend of torch.compile that runs operators in the order of a policy.

    The batch is the first dynamic dimension (`torch._dynamo.mark_dynamic`). An unsafe graph runs in
    program order, with a warning; `built` gets any other's engine. inductor: compile operators and
    whole graphs; merging then copies.
    """

    def whole_of(graph: GraphModule) -> Callable[..., Any]:
        return compiled_module(graph) if inductor else graph.forward

    def compile_graph(graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            program = partition(graph, policy.rules, example_inputs)
        except CannotSplit as reason:
            logger.warning("the graph runs in program order: %s", reason)
            return whole_of(graph)
        engine = OverlapEngine(compiled(program) if inductor else program, policy, whole_of(graph))
        built(engine)
        return engine

    return compile_graph


def overlap(
    model: nn.Module,
    policy: OverlapPolicy,
    built: Callable[[OverlapEngine], None] = lambda engine: None,
    inductor: bool = False,
) -> Callable[..., Any]:
    """Compile a model so that its operators run in the order of a policy.

    The batch is the first dimension of the first tensor, and of every other of that length, also
    inside containers and plain objects. inductor: see overlap_backend.
    """
    made = torch.compile(model, backend=overlap_backend(policy, built, inductor))

    def call(*args: Any, **kwargs: Any) -> Any:
        batch_size = 0
        for tensor in _tensors((args, kwargs), set()):
            batch_size = batch_size or tensor.shape[0]
            if tensor.shape[0] == batch_size:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return made(*args, **kwargs)

    return call


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            if leaf.dim():
                yield leaf
        elif (
            id(leaf) not in seen
            and hasattr(leaf, "__dict__")
            and not isinstance(leaf, nn.Module | type)
        ):
            seen.add(id(leaf))
            yield from _tensors(vars(leaf), seen)
