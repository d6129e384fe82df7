"""The values of a pipeline that cross rooms: passes, what stages report, and its configuration.

Enters: nothing. Leaves: frozen values that the pipeline's scheduler, its stages and the simulator
share. Does not know: sockets, clocks, tensors, tokens.

A stage is a member with a contiguous range of the model's layers. A pass goes through all stages.
All stages have one page table: frame f of a stage holds its layers of the page in frame f.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import IntFlag
from typing import TYPE_CHECKING, NamedTuple

from nanocp.choices import check_at_least, require
from nanocp.plan import Ended, Event, Finished, InstancePlan, Plan, Preempted

if TYPE_CHECKING:
    from nanocp.config import Config


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


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Constants of the time that a pass takes, in microseconds.

    DynaPipe's paper has a term for tokens, one for what they attend to and one for requests; with
    the other constants at 0 this is its form.
    """

    __pydantic_config__ = {"extra": "forbid"}

    token_us: float = 1.0
    """For each token, in each layer (phi 1)."""
    token_length_us: float = 0.001
    """For each token and each token that it attends to, in each layer (phi 2)."""
    request_us: float = 0.0
    """For each request, in each layer (epsilon)."""
    sampled_us: float = 3.0
    """For each token that is sampled (alpha)."""
    sampling_us: float = 0.0
    """For each pass that samples (beta)."""
    sampled_together: int = 0
    """Sampled tokens for which the weights of the logits are read in the time of computing."""
    more_sampled_us: float = 0.0
    """For each token that is sampled beyond these, besides sampled_us."""
    layer_us: float = 0.0
    """For each layer."""
    decode_length_us: float = 0.0
    """For each token that a decoding row attends to, in each layer, besides token_length_us."""
    chunk_us: float = 0.0
    """For a pass with a chunk of a prompt, in each layer."""
    cached_us: float = 0.0
    """For each earlier token of a chunk's prompt, in each layer."""
    expert_us: float = 0.0
    """For each expert that a pass is expected to visit, in each layer."""
    num_experts: int = 0
    """Routed experts of a layer; 0: a dense model."""
    experts_per_token: int = 0
    """Experts that a token visits."""
    drawn_us: float = 0.0
    """For each token that is drawn by chance, besides sampled_us."""
    nucleus_us: float = 0.0
    """For each token with top-p, top-k or min-p, besides that."""
    controls_us: float = 0.0
    """For each token with penalties, biases, bad words or a grammar, besides that."""
    logprobs_us: float = 0.0
    """For each token with log probabilities, besides that."""
    dense_layers: int = 0
    """First layers that are dense, where the others have experts."""
    dense_layer_us: float = 0.0
    """For each of them."""
    dense_layer_token_us: float = 0.0
    """For each token in each of them."""
    dense_layer_token_length_us: float = 0.0
    """For each token and each token that it attends to, in each of them."""
    dense_layer_together: int = 0
    """Tokens for which a dense layer's weights are read in the time of computing."""
    dense_layer_more_us: float = 0.0
    """For each token beyond these, besides dense_layer_token_us."""
    stage_us: float = 0.0
    """For each stage, besides its layers and sampling."""

    def __post_init__(self) -> None:
        check_at_least(
            0,
            sampled_together=self.sampled_together,
            dense_layers=self.dense_layers,
            dense_layer_together=self.dense_layer_together,
        )
        of_a_dense_layer = (
            self.dense_layer_us,
            self.dense_layer_token_us,
            self.dense_layer_token_length_us,
        )
        require(
            not self.dense_layers or max(of_a_dense_layer) > 0,
            f"dense_layers is {self.dense_layers}, but no constant says what such a layer takes "
            "(dense_layer_us); run nanocp profile again",
        )


@dataclass(frozen=True, slots=True)
class PassesConfig:
    """How passes of a pipeline are formed, and when layers change their stage."""

    __pydantic_config__ = {"extra": "forbid"}

    max_layers: int = 0
    """Layers whose KV and weights a stage has room for, its own included. 0: all."""
    max_pass_tokens: int = 2048
    """Most tokens of a pass: one for each row that decodes, the rest for chunks of prompts."""
    layer_policy: str = "even"
    """Which layers each stage gets: a name of control_plane.scheduler.pipeline.layer_policies, such
    as even, static:17,17,17,13, delta or level."""
    layout_window: int = 25
    """Passes in a row that must want the same layout before layers move (delta); passes after a
    change before layers move again (level)."""
    copy_ahead: bool = True
    """Full pages of moving layers travel before the layout changes."""
    frame_move_us: float = 50.0
    """Time to move one layer's KV of one frame, in us (policy level)."""
    chaos_seed: int = 0
    """Seed of policy chaos_layers."""
    costs: PassCosts = field(default_factory=PassCosts)

    def __post_init__(self) -> None:
        check_at_least(1, max_pass_tokens=self.max_pass_tokens)
        check_at_least(1, layout_window=self.layout_window)
        check_at_least(0, max_layers=self.max_layers, chaos_seed=self.chaos_seed)
        require(
            self.frame_move_us >= 0,
            f"frame_move_us is {self.frame_move_us}; it must be at least 0",
        )


@dataclass(frozen=True, slots=True)
class PipelineConfig(PassesConfig):
    """The whole configuration of a pipeline: with its stages and the model's layers."""

    num_stages: int = 2
    """Stages of the pipeline, in the order of the layers."""
    num_layers: int = 32
    """Layers of the model."""

    def __post_init__(self) -> None:
        # Without arguments, super would look for the class that slots have replaced.
        PassesConfig.__post_init__(self)
        check_at_least(1, num_stages=self.num_stages)
        require(
            self.num_layers >= self.num_stages,
            f"num_layers is {self.num_layers}; each of the {self.num_stages} stages needs a layer",
        )
        split, num_layers = self.first_split, self.num_layers
        require(
            len(split) == self.num_stages and sum(split) == num_layers and 0 not in split,
            f"layer_policy is {self.layer_policy!r}; static needs {self.num_stages} numbers of "
            f"layers, each at least 1, which sum to {num_layers}",
        )
        require(
            max(split) <= self.num_places <= num_layers,
            f"max_layers is {self.max_layers}; it must be 0, or from {max(split)}, the most layers "
            f"of a stage, to {num_layers}, all layers",
        )

    @classmethod
    def of(cls, config: Config, num_layers: int) -> PipelineConfig:
        """The pipeline of a service whose model has so many layers.

        Raises ValueError if the two do not fit.
        """
        passes = {each.name: getattr(config.pipeline, each.name) for each in fields(PassesConfig)}
        return cls(num_stages=config.cluster.num_instances, num_layers=num_layers, **passes)

    @property
    def num_places(self) -> int:
        """Layers that a stage has room for."""
        return self.max_layers or self.num_layers

    @property
    def first_split(self) -> tuple[int, ...]:
        """The layers of each stage at the start: those of a static policy, else even ones."""
        name, _, argument = self.layer_policy.partition(":")
        if name != "static":
            return even_split(self.num_layers, self.num_stages)
        numbers = argument.split(",")
        is_list = all(number.isascii() and number.isdigit() for number in numbers)
        return tuple(map(int, numbers)) if is_list else ()


def pipeline_obstacle(config: Config) -> str:
    """What of a configuration a pipeline cannot do; empty if nothing."""
    scheduler, prefill, data_plane = config.scheduler, config.prefill, config.data_plane
    not_here = (
        (data_plane.device != "cpu", f"data_plane.device {data_plane.device}: stages run on CPUs"),
        (
            data_plane.page_backend != "auto",
            f"data_plane.page_backend {data_plane.page_backend}: KV of layers goes as auto says",
        ),
        (
            scheduler.steps_per_window != 1,
            f"scheduler.steps_per_window {scheduler.steps_per_window}: a pass is one step",
        ),
        (scheduler.lanes != "off", f"scheduler.lanes {scheduler.lanes}: passes have no lanes"),
        (
            scheduler.policy not in (type(scheduler)().policy, "dual_balanced"),
            f"scheduler.policy {scheduler.policy}: a pipeline places no request on instances, so "
            "take the default, and see pipeline.layer_policy",
        ),
        (
            scheduler.tpot_target_ms != 0,
            f"scheduler.tpot_target_ms {scheduler.tpot_target_ms}: its prompts are not deferred",
        ),
        (bool(prefill.engines), "prefill.engines is set: its stages compute prompts"),
        (prefill.synthetic_kv, "prefill.synthetic_kv is set: its stages compute prompts"),
        (
            prefill.stages != 1,
            f"prefill.stages {prefill.stages}: its own stages (cluster.num_instances) compute "
            "prompts",
        ),
        (
            config.cluster.redundant_experts != 0,
            f"cluster.redundant_experts {config.cluster.redundant_experts}: a stage has all "
            "experts of its layers",
        ),
        (
            config.cluster.spares != 0,
            f"cluster.spares {config.cluster.spares}: a spare has loaded no layers of a stage",
        ),
    )
    return next((sentence for is_asked, sentence in not_here if is_asked), "")


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
