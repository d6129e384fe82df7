"""The values of a pipeline that cross rooms: passes, and what stages report.

Enters: nothing. Leaves: frozen values that the pipeline's scheduler, its stages and the simulator
share. Does not know: sockets, clocks, tensors, tokens.

A stage is a member with a contiguous range of the model's layers. A pass goes through all stages.
All stages have one page table: frame f of a stage holds its layers of the page in frame f.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple

from nanocp.values.plan import Ended, Event, Finished, InstancePlan, Plan, Preempted


class SamplerWork(IntFlag):
    """What a token's sampling takes besides its logits and the highest of them. 0: it is greedy."""

    DRAWN = 1
    """It is drawn by chance."""
    NUCLEUS = 2
    """Top-p, top-k or min-p leave out unlikely tokens."""
    CONTROLS = 4
    """Penalties, biases, bad words or a grammar change logits."""
    LOGPROBS = 8
    """Log probabilities are reported."""


def even_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """The layers of each stage, as equal as whole layers allow.

    The first stages take the remainder: the last one also samples.
    """
    fewest, num_more = divmod(num_layers, num_stages)
    return tuple(fewest + (stage < num_more) for stage in range(num_stages))


def layers_of(split: Sequence[int], stage: int) -> range:
    """The layers of a stage."""
    first = sum(split[:stage])
    return range(first, first + split[stage])


def prompt_passes(num_stages: int) -> int:
    """Passes in flight where nothing is sampled: two for each stage.

    The first chunk of a prompt takes less time than the last. With a pass more a stage need not
    wait for a long one that is before it.
    """
    return 2 * num_stages if num_stages > 1 else 1


WAIT_CAUSES = ("fill", "tail", "kv", "work")
"""Why a stage idles while a pass is in flight: the stage before still computes; the first stage has
no tokens to go on with, which the last one samples; KV or weights of a layer that it got are still
to come; no pass was planned."""


class Span(NamedTuple):
    """Tokens of one request in one pass."""

    request_id: int
    first: int
    """Position of the first token."""
    num_tokens: int
    """One for a row that decodes; a chunk of a prompt may have more."""
    samples: bool
    """Whether the token after the span is sampled: its last token is the last that is known."""


class PassPlan(NamedTuple):
    """One pass. Every stage gets the same plan, and runs its passes in their order."""

    number: int
    """Counts from 0 without gaps."""
    layout: int
    """The last layout (LayerMoves.number) before the pass; 0: that of the start."""
    after: int
    """The first stage begins once it has the tokens of this pass and of all before; -1: at once.

    It bounds the passes in flight, and a row's pass waits for the token that it begins with.
    """
    table: InstancePlan
    """Changes of the page table with its digests, requests that start and requests that end.

    All stages have one table, that of instance 0. The RowStart of a request is in its first pass.
    """
    spans: tuple[Span, ...]


class LayerMove(NamedTuple):
    """KV of one layer that goes from a stage to another."""

    layer: int
    source: int
    target: int
    place: int
    """The place of the layer in the target's KV; what another layer has there is forgotten."""
    frames: tuple[tuple[int, int], ...]
    """(first frame, frames) of the pages to send, ascending."""


class LayerMoves(NamedTuple):
    """Layers that change their stage, in one order with the passes; every stage gets all of it.

    A stage that has come to it has run every earlier pass: full pages are final, and with a split
    the open ones are too.
    """

    number: int
    """Counts from 1. The next one is sent when every stage has reported this one."""
    split: tuple[int, ...] | None
    """The layers of each stage from the next pass on, which is the mark; None: pages go ahead."""
    moves: tuple[LayerMove, ...]


@dataclass(frozen=True, slots=True)
class PassDone:
    """The last stage has run a pass, and so has every other. It reports them in their order."""

    number: int
    finished: tuple[Finished, ...] = ()
    """Rows that stopped in this pass."""


@dataclass(frozen=True, slots=True)
class StageWorked:
    """A stage has run its layers of a pass. Each reports its passes in their order."""

    stage: int
    number: int
    us: float
    """Time in which it did not wait."""


@dataclass(frozen=True, slots=True)
class LayersMoved:
    """A stage has sent and received its part of LayerMoves. Every stage reports each of them."""

    stage: int
    number: int


@dataclass(frozen=True, slots=True)
class LayoutWanted:
    """An operator wants a layout, to which there is no obstacle (LayoutChanges.obstacle)."""

    split: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """The answer to one `plan_pass` call, which the controller carries out."""

    pass_plan: PassPlan | None
    """None: no pass now."""
    layer_moves: LayerMoves | None = None
    """To be sent before the pass."""
    ended: tuple[Ended, ...] = ()
    preempted: tuple[Preempted, ...] = ()


@dataclass(frozen=True, slots=True)
class PassesPlan(Plan):
    """A plan of a pipeline for the controller: its window is a pass, of one table."""

    pass_plan: PassPlan | None = None
    layer_moves: LayerMoves | None = None
    """To be sent before the pass."""


ServiceEvent = Event | LayersMoved | LayoutWanted
"""What happens in a cluster of instances, or in a pipeline."""
