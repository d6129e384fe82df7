"""The cluster: its instances, nodes and room. Standard library only: the scheduler imports it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from nanocp.config.choices import INTERNAL, Among, Natural, Positive, check_fields, require

LAYOUTS = ("instances", "pipeline")


@dataclass(frozen=True, slots=True)
class BoundsConfig:
    """Ahead-of-time bounds of one instance (arXiv 2605.21100, 5.2).

    They size its pools, and no plan exceeds them.
    """

    __pydantic_config__ = {"extra": "forbid"}

    max_rows: Positive = 64
    """Most requests with one MoE binding at a time."""
    max_links: Positive = 16
    """Most rows that one instance sends to another: slots of an exchange region."""
    max_attention_rows: Positive = 96
    """Most rows that an instance runs attention for, received ones included. Unless it is set, half
    more than max_rows."""
    max_partials: Positive = 48
    """Most remote partials that return to one MoE binding in a step."""
    max_hand_offs: Annotated[Positive, INTERNAL] = 4
    """Most rows handed from one instance to another between windows."""
    max_grammar_bytes: Natural = 32_768
    """Longest grammar of structured output, in bytes. 0: structured output is refused."""

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            self.max_attention_rows >= self.max_rows,
            f"max_attention_rows is {self.max_attention_rows}; it must be at least max_rows "
            f"({self.max_rows})",
        )


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The instances, their nodes, and their room."""

    __pydantic_config__ = {"extra": "forbid"}

    num_instances: Positive = 4
    """Instances of the cluster; stages of a pipeline."""
    instances_per_node: Positive = 4
    """Instances of one machine: instance i is on node i // instances_per_node."""
    num_frames: Positive = 256
    """Frames of 64 tokens in each instance's pool."""
    max_model_len: Positive = 8192
    """Most tokens of prompt and output of one request; not given, at most what the model has."""
    carry_pages: Annotated[Natural, INTERNAL] = 0
    """Pages of a row's state in linear attention layers; the checkpoint sets it."""
    bounds: BoundsConfig = field(default_factory=BoundsConfig)
    redundant_experts: Natural = 0
    """Slots for experts that each instance has in every layer beyond its share. The cluster goes on
    without an instance if the others have slots for all experts."""
    expert_load_mb_per_s: Natural = 0
    """Rate at which experts load into redundant slots while instances serve, so that they follow
    the load. 0: experts stay where they are."""
    spares: Natural = 0
    """Processes that stand by with all weights but experts, and take the seats of lost instances.
    On the machine of `nanocp serve`, on CPUs."""
    layout: Annotated[str, Among(LAYOUTS)] = "instances"
    """instances: each has some experts of every layer, and a request's KV may be on several.
    pipeline: each has some layers, with all their experts and KV (docs/develop/pipeline.md)."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.expert_load_mb_per_s:
            require(
                self.redundant_experts > 0 and self.num_instances > 1,
                "expert_load_mb_per_s lets experts move, which takes redundant_experts of at least "
                "1 and two instances or more",
            )
            require(
                self.layout == "instances",
                "expert_load_mb_per_s: a stage of a pipeline has all experts of its layers",
            )

    def carry_place(self, frame: int) -> tuple[int, int]:
        """(state, page of it) of a frame behind those of KV."""
        return divmod(frame - self.num_frames, self.carry_pages)

    @property
    def num_nodes(self) -> int:
        """Nodes that the instances are on."""
        return -(-self.num_instances // self.instances_per_node)

    def node_of(self, instance: int) -> int:
        """The node that the instance is on."""
        return instance // self.instances_per_node

    def num_holders(self, num_open: int = 0) -> int:
        """Most instances with pages of one request, of `num_open`; 0: of all.

        They are its MoE binding and as many others as partials may return. Stages of a pipeline
        hold the same pages.
        """
        if self.layout == "pipeline":
            return 1
        return min(num_open or self.num_instances, 1 + self.bounds.max_partials)
