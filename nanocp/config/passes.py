"""Passes of a pipeline, and constants of their time. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from nanocp.config.choices import (
    INTERNAL,
    PROFILED,
    Natural,
    Positive,
    at_least,
    check_fields,
    require,
)


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Constants of a pass's time, in microseconds.

    DynaPipe's form has only terms for tokens, for tokens that they attend to, and for requests.
    """

    __pydantic_config__ = {"extra": "forbid"}

    token_us: float = 1.0
    """For each token, in each layer (phi 1)."""
    token_length_us: float = 0.001
    """For each token and token that it attends to, in each layer (phi 2)."""
    request_us: float = 0.0
    """For each request, in each layer (epsilon)."""
    sampled_us: float = 3.0
    """For each token that is sampled (alpha)."""
    sampling_us: float = 0.0
    """For each pass that samples (beta)."""
    sampled_together: Natural = 0
    """Sampled tokens whose computing takes the time of reading the logits' weights."""
    more_sampled_us: float = 0.0
    """For each sampled token beyond these, besides sampled_us."""
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
    """For each randomly drawn token, besides sampled_us."""
    nucleus_us: float = 0.0
    """For each token with top-p, top-k or min-p, besides that."""
    controls_us: float = 0.0
    """For each token with penalties, biases, bad words or a grammar, besides that."""
    logprobs_us: float = 0.0
    """For each token with log probabilities, besides that."""
    dense_layers: Natural = 0
    """First layers that are dense in a model with experts."""
    dense_layer_us: float = 0.0
    """For each of them."""
    dense_layer_token_us: float = 0.0
    """For each token in each of them."""
    dense_layer_token_length_us: float = 0.0
    """For each token and token that it attends to, in each of them."""
    dense_layer_together: Natural = 0
    """Tokens whose computing takes the time of reading a dense layer's weights."""
    dense_layer_more_us: float = 0.0
    """For each token beyond these, besides dense_layer_token_us."""
    stage_us: float = 0.0
    """For each stage, besides its layers and sampling."""

    def __post_init__(self) -> None:
        check_fields(self)
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
    """Passes of a pipeline, and changes of its layers."""

    __pydantic_config__ = {"extra": "forbid"}

    max_layers: Natural = 0
    """Layers whose KV and weights a stage has room for, its own included. 0: all."""
    max_pass_tokens: Positive = 2048
    """Most tokens of a pass: one for each row that decodes, the rest for chunks of prompts."""
    layer_policy: str = "even"
    """Layers of each stage: a name of control_plane.scheduler.pipeline.layer_policies, such as
    even, static:17,17,17,13, delta or level."""
    layout_window: Annotated[Positive, INTERNAL] = 25
    """Passes in a row that want a layout before layers move (delta); passes between two changes
    (level)."""
    copy_ahead: Annotated[bool, INTERNAL] = True
    """Full pages of moving layers travel before the layout changes."""
    frame_move_us: Annotated[float, at_least(0), PROFILED] = 50.0
    """Time to move one layer's KV of one frame, in us (policy level)."""
    chaos_seed: Annotated[Natural, INTERNAL] = 0
    """Seed of policy chaos_layers."""
    costs: Annotated[PassCosts, PROFILED] = field(default_factory=PassCosts)

    def __post_init__(self) -> None:
        check_fields(self)
