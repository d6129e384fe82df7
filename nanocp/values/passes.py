"""Values of a pipeline that planes share: passes, and reports of stages.

All stages have one page table: frame f of each holds its layers of the page in frame f.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple

from nanocp.values.plan import Ended, Event, Finished, InstancePlan, Plan, Preempted


class SamplerWork(IntFlag):
    """Work of sampling a token beside its highest logit; 0: greedy."""

    DRAWN = 1
    """It is drawn by chance."""
    NUCLEUS = 2
    """Top-p, top-k or min-p leave out unlikely tokens."""
    CONTROLS = 4
    """Penalties, biases, bad words or a grammar change logits."""
    LOGPROBS = 8
    """Log probabilities are reported."""


def even_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage, as equal as possible.

    First stages take the rest: the last one samples.
    """
    fewest, num_more = divmod(num_layers, num_stages)
    return tuple(fewest + (stage < num_more) for stage in range(num_stages))


def layers_of(split: Sequence[int], stage: int) -> range:
    """The layers of a stage."""
    first = sum(split[:stage])
    return range(first, first + split[stage])


def prompt_passes(num_stages: int) -> int:
    """Passes in flight without sampling: two for each stage, and one against long chunks."""
    return 2 * num_stages if num_stages > 1 else 1


WAIT_CAUSES = ("fill", "tail", "kv", "work")
"""Causes of a stage's idle time with a pass in flight: the stage before computes, tokens are not
sampled, KV or weights of a moved layer are to come, or no pass is planned."""


class Span(NamedTuple):
    """Tokens of one request in one pass."""

    request_id: int
    first: int
    """Position of the first token."""
    num_tokens: int
    """1 for a decoding row; more for a chunk of a prompt."""
    samples: bool
    """The token after the span is sampled: its last token is the last known one."""


class PassPlan(NamedTuple):
    """One pass; every stage runs the same plans in order."""

    number: int
    """Counts from 0 without gaps."""
    layout: int
    """Last layout (LayerMoves.number) before the pass; 0: the first one."""
    after: int
    """The first stage waits for the tokens of all passes up to this one; -1: it does not wait.

    So passes in flight are bounded.
    """
    table: InstancePlan
    """Changes of the page table with digests, and requests that start and end.

    A request's RowStart is in its first pass.
    """
    spans: tuple[Span, ...]


class LayerMove(NamedTuple):
    """KV of one layer that moves between stages."""

    layer: int
    source: int
    target: int
    place: int
    """The layer's place in the target's KV; earlier content is dropped."""
    frames: tuple[tuple[int, int], ...]
    """(first frame, number) of the pages to send, ascending."""


class LayerMoves(NamedTuple):
    """Layers that change their stage, in order with the passes; every stage gets all of it.

    Full pages are final then, and with a split open ones too.
    """

    number: int
    """From 1; the next is sent when every stage has reported this one."""
    split: tuple[int, ...] | None
    """Layers of each stage from the next pass on; None: pages go ahead."""
    moves: tuple[LayerMove, ...]


@dataclass(frozen=True, slots=True)
class PassDone:
    """Every stage has run a pass; reported by the last one, in order."""

    number: int
    finished: tuple[Finished, ...] = ()
    """Rows that stopped in this pass."""


@dataclass(frozen=True, slots=True)
class StageWorked:
    """A stage has run its layers of a pass; each reports in order."""

    stage: int
    number: int
    us: float
    """Time in which it did not wait."""


@dataclass(frozen=True, slots=True)
class LayersMoved:
    """A stage has sent and received its part of LayerMoves."""

    stage: int
    number: int


@dataclass(frozen=True, slots=True)
class LayoutWanted:
    """An operator wants a layout that LayoutChanges.obstacle allows."""

    split: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """The answer to `plan_pass`, which the controller carries out."""

    pass_plan: PassPlan | None
    """None: no pass now."""
    layer_moves: LayerMoves | None = None
    """To be sent before the pass."""
    ended: tuple[Ended, ...] = ()
    preempted: tuple[Preempted, ...] = ()


@dataclass(frozen=True, slots=True)
class PassesPlan(Plan):
    """A pipeline's plan for the controller: its window is a pass, with one table."""

    pass_plan: PassPlan | None = None
    layer_moves: LayerMoves | None = None
    """To be sent before the pass."""


ServiceEvent = Event | LayersMoved | LayoutWanted
"""Events of a cluster of instances, or of a pipeline."""
