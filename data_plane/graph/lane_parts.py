"""The parts of lanes' steps in one captured graph, in an order that a policy gave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nanocp.overlap.engine.streams import CudaStreams, launched
from nanocp.overlap.ops import OrderedStep, OverlapPolicy, order_of
from nanocp.overlap.policies.orders import NETWORK


class LanePart:
    """What a lane's step launches next, up to its next part."""

    __slots__ = ("reads", "tag")

    def __init__(self, tag: str, reads: Sequence[Any] = ()) -> None:
        """reads: tensors that a part before has made on what may be another stream."""
        self.tag, self.reads = tag, reads

    def run_with(self, others: Sequence[Any]) -> None:
        """Launch what this part and the same of other lanes can do as one; here nothing."""


WAIT, EXCHANGE, EXPERTS, COMBINE, OTHER = map(
    LanePart, (NETWORK, "exchange", "experts", "combine", "other")
)
_END, _OTHER_STEP = LanePart("the end"), "the tags are of another step"


def order_of_lanes(tags: Sequence[str], num_lanes: int, policy: OverlapPolicy) -> list[OrderedStep]:
    """The order of lanes' parts. Every instance has the same: each wait's put comes before it.

    tags: of the parts of one lane, in its order. Raises ValueError if the policy cuts lanes anew or
    replaces parts, and as order.order_of.
    """
    chain = [range(max(number - 1, 0), number) for number in range(len(tags))]
    sizes, steps = order_of(tags, chain, (1,) * num_lanes, policy)
    name = type(policy).__name__
    if len(sizes) != num_lanes:
        raise ValueError(f"{name} makes {len(sizes)} micro-batches of {num_lanes} lanes")
    if any(step.replace_func is not None for step in steps):
        raise ValueError(f"{name} replaces operators; a captured step has no fused ones")
    return steps


def in_order(
    lanes: Sequence[Iterator[LanePart]], steps: Sequence[OrderedStep], streams: CudaStreams
) -> Iterator[None]:
    """Launch the lanes' parts; yield before each step, so instances in one thread can take turns.

    lanes: each yields a part, and launches it when it is resumed; what it launches before the first
    has no stream of its own.
    """
    parts = [next(lane, None) for lane in lanes]

    def run(step: OrderedStep) -> None:
        first, *others = now = [parts[op.micro_batch] or _END for op in step.ops]
        assert [part.tag for part in now] == [op.tag for op in step.ops], _OTHER_STEP
        streams.use(tensor for part in now for tensor in part.reads)
        if step.is_merged:
            first.run_with(others)
        for op in step.ops:
            parts[op.micro_batch] = next(lanes[op.micro_batch], None)

    yield from launched(steps, streams, run)
    assert not any(parts), _OTHER_STEP
