"""The YAML file of a simulated pipeline: model, devices, costs; a ValueError names the key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from nanocp.config.choices import (
    AboveZero,
    Natural,
    NotNegative,
    Positive,
    Share,
    check_fields,
    check_one_of,
    require,
)
from nanocp.simulator.costs.yaml_file import load_file, names_in
from nanocp.values.passes import Span, even_split
from nanocp.values.plan import PAGE_SIZE

SHIPPED = Path(__file__).parent / "clusters"


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Rates of a stage's device and of the links between stages; the constants of sampling."""

    __pydantic_config__ = {"extra": "forbid"}

    weights_gb_per_s: AboveZero
    """Read bandwidth for weights and KV."""
    gemm_tflops: AboveZero
    """Throughput of GEMMs and of attention of chunks."""
    sampled_us: NotNegative
    """Sampling, for each token (alpha)."""
    sampling_us: NotNegative
    """Sampling, for each pass that samples (beta)."""
    link_gb_per_s: AboveZero
    """Hidden rows and KV, each direction of a stage."""
    hop_us: NotNegative
    """Latency of a message from stage to stage."""

    def __post_init__(self) -> None:
        check_fields(self)

    def sample_us(self, num_sampled: int) -> float:
        """Microseconds of a pass that samples so many tokens; 0 for none."""
        return self.sampled_us * num_sampled + self.sampling_us if num_sampled else 0.0


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of the model that the costs multiply; layers are alike."""

    __pydantic_config__ = {"extra": "forbid"}

    num_layers: Positive
    layer_mb: AboveZero
    """Weights of a layer."""
    layer_mflop: AboveZero
    """One token through a layer, without attention."""
    attention_mflop: AboveZero
    """One token, for each token that it attends to, in a layer."""
    kv_bytes: Positive
    """KV of one token in a layer."""
    hidden_bytes: Positive
    """A hidden row."""
    head_mb: AboveZero
    """Weights of lm_head, and as many of the embedding."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a stage's device, in GB of 10^9 bytes; KV gets the rest."""

    __pydantic_config__ = {"extra": "forbid"}

    hbm_gb: AboveZero
    usable_share: Share
    reserve_gb: NotNegative
    """Activations and all else but weights and KV."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class PipelineFile:
    """A simulated pipeline."""

    __pydantic_config__ = {"extra": "forbid"}

    model: LayerShape
    num_stages: Positive
    max_model_len: Positive
    max_rows: Positive
    """Most requests that are placed at a time."""
    spare_layers: Natural
    """Room for layers beyond an even share, where layers move."""
    memory: DeviceMemory
    costs: dict[str, StageCosts]
    """By the name of the set, such as peak and fitted."""

    def __post_init__(self) -> None:
        check_fields(self)
        require(bool(self.costs), "costs is empty; it must hold one set of constants or more")
        require(
            self.model.num_layers >= self.num_stages,
            f"the model has {self.model.num_layers} layers and num_stages is {self.num_stages}; "
            "each stage needs a layer",
        )

    @property
    def max_layers(self) -> int:
        """Most layers of a stage, where layers move."""
        even = even_split(self.model.num_layers, self.num_stages)
        return min(even[0] + self.spare_layers, self.model.num_layers)

    def costs_of(self, constants: str) -> StageCosts:
        """The named set. Raises ValueError naming those that there are."""
        check_one_of(tuple(self.costs), constants=constants)
        return self.costs[constants]

    def num_frames(self, places: Sequence[int], *, replicates_head: bool) -> int:
        """Frames that every stage has KV for.

        places: layers that each stage has room for. replicates_head: every stage has lm_head.
        Raises ValueError if the model does not fit.
        """
        model, memory = self.model, self.memory
        least = inf
        for stage, count in enumerate(places):
            num_heads = (stage == 0) + (stage == len(places) - 1 or replicates_head)
            weights_gb = (count * model.layer_mb + num_heads * model.head_mb) / 1e3
            left_gb = memory.usable_share * memory.hbm_gb - memory.reserve_gb - weights_gb
            require(
                left_gb > 0,
                f"stage {stage} does not fit: {count} layers and what it samples with take "
                f"{weights_gb:.1f} GB of weights, {-left_gb:.1f} GB too many",
            )
            least = min(least, left_gb * 1e9 / (count * PAGE_SIZE * model.kv_bytes))
        return int(least)

    def layer_us(self, costs: StageCosts, spans: Sequence[Span]) -> float:
        """Microseconds of one layer of a pass: weights or FLOPs, whichever is more, and KV."""
        model = self.model
        num_tokens = kv_tokens = attended = 0
        for span in spans:
            num_tokens += span.num_tokens
            kv_tokens += span.first + span.num_tokens
            if span.num_tokens > 1:
                attended += span.num_tokens * (span.first + span.num_tokens // 2)
        return (
            max(
                1e3 * model.layer_mb / costs.weights_gb_per_s,
                num_tokens * model.layer_mflop / costs.gemm_tflops,
            )
            + 1e-3 * kv_tokens * model.kv_bytes / costs.weights_gb_per_s
            + attended * model.attention_mflop / costs.gemm_tflops
        )


def shipped_pipelines() -> list[str]:
    """Names of the pipelines that ship."""
    return names_in(SHIPPED)


def load_pipeline_file(name_or_path: str) -> PipelineFile:
    """The pipeline of that name, or that of a .yaml file.

    Raises ValueError for an unknown name, an unreadable file, an unknown key and a wrong type.
    """
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        check_one_of((*shipped_pipelines(), "a .yaml file"), cluster=name_or_path)
        path = SHIPPED / f"{name_or_path}.yaml"
    return load_file(path, PipelineFile)[1]
