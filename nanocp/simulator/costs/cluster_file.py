"""The YAML file of a simulated cluster: memory, links, layer costs; a ValueError names the key."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Annotated

from control_plane.scheduler.queue.waiting_queue import invalidity
from nanocp.config.choices import (
    ABOVE_ZERO,
    AboveZero,
    Natural,
    NotNegative,
    Positive,
    Share,
    at_least,
    between,
    check_fields,
    none_of,
    require,
)
from nanocp.config.cluster import ClusterConfig
from nanocp.config.cost import check_ttft_targets
from nanocp.overlap.interference import Interference
from nanocp.overlap.paper import TABLE_3
from nanocp.simulator.costs.yaml_file import load_file, names_in
from nanocp.values.plan import PAGE_SIZE, Arrival

SHIPPED = Path(__file__).parents[1] / "clusters"
_DEFAULTS = ("operators", "fitted")


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one layer on one instance: one set of constants."""

    __pydantic_config__ = {"extra": "forbid"}

    attention_us: NotNegative
    """Attention of one row over no tokens."""
    attention_ps_per_token: NotNegative
    """Picoseconds per KV token that the instance reads."""
    attention_ns_per_row: NotNegative
    """Nanoseconds per attention row, own or received: query read, partial written."""
    exchange_us: NotNegative
    """Both routes and the merge, on an instance that has a link."""
    exchange_gb_per_s_within_node: AboveZero
    """Bandwidth within a node, each direction."""
    exchange_gb_per_s_between_nodes: AboveZero
    exchange_us_between_nodes: NotNegative
    """In addition, on an instance with a link to another node."""
    dispatch_combine_us: NotNegative
    """Dispatch and combine of no rows."""
    dispatch_combine_us_at_128_rows: tuple[tuple[int, float], ...]
    """(EP size, microseconds of both at 128 rows an instance), ascending; linear between."""
    weights_gb_per_s: AboveZero
    """Read bandwidth for weights of experts and of a holder's projections."""
    gemm_tflops: AboveZero
    """Throughput of the GEMMs of experts and of a holder's projections."""
    other_us: NotNegative
    """Norms, projections, gate, shared expert, launches."""
    other_ns_per_row: NotNegative
    step_us: NotNegative
    """Once a step: embedding, lm_head, sampling."""
    attention_ps_per_query: NotNegative = 0.0
    """Compute time per KV token and query of a row. Drafts are queries."""
    hides_queries: bool = False
    """Whether own attention hides Q's transfer, and received rows attend in their own launch, as in
    the engine. Fitted constants may include that."""

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.dispatch_combine_us_at_128_rows]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError(
                f"dispatch_combine_us_at_128_rows has EP sizes {sizes}; they must be ascending, "
                "one or more"
            )
        for size, us in self.dispatch_combine_us_at_128_rows:
            require(
                0 <= us < inf,
                f"dispatch_combine_us_at_128_rows of EP size {size} is {us}; it must be a finite "
                "number and not negative",
            )
        check_fields(self)

    def ps_per_token(self, num_queries: int) -> float:
        """Picoseconds of attention over a token by so many queries of one row.

        The longer of reading it once and of computing all queries.
        """
        return max(self.attention_ps_per_token, num_queries * self.attention_ps_per_query)

    def layer_attention_us(self, kv_tokens: float, rows: float, num_queries: int = 1) -> float:
        """Microseconds of a layer's attention over kv_tokens by `rows` attention rows, padded."""
        return (
            self.attention_us
            + self.ps_per_token(num_queries) * kv_tokens / 1e6
            + self.attention_ns_per_row * rows / 1e3
        )

    def gemm_us(self, weights_mb: float, mflop: float) -> float:
        """Microseconds of a GEMM: its weights are read, then its FLOPs are done."""
        return 1e3 * weights_mb / self.weights_gb_per_s + mflop / self.gemm_tflops


@dataclass(frozen=True, slots=True)
class WireForm:
    """Bytes and projections of a link between a row and one of its holders, in one layer.

    Received rows are projected by separate GEMMs, an upper bound.
    """

    __pydantic_config__ = {"extra": "forbid"}

    bytes_per_link: int
    """Query and returned partial."""
    query_bytes: Natural = 0
    """Query only."""
    projection_mb: NotNegative = 0.0
    """Weights that a holder reads to project queries and partials."""
    projection_mflop: NotNegative = 0.0
    """For each row received."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.query_bytes > self.bytes_per_link:
            raise ValueError(f"{self} has more bytes of Q than bytes in all")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of the model that the costs multiply."""

    __pydantic_config__ = {"extra": "forbid"}

    num_layers: Positive
    num_moe_layers: Natural
    kv_bytes_per_token: Positive
    """KV of all layers."""
    num_experts: int
    """Experts of a layer; shares of instances differ by at most one. 0: a dense model."""
    experts_per_token: int
    expert_mb: NotNegative
    """Weights of one expert of one layer."""
    expert_mflop: NotNegative
    """One row through one expert."""
    wire_forms: dict[str, WireForm]
    """By name: latent and absorbed."""
    num_linear_layers: Natural = 0
    """Linear attention layers, in which a row has a state, and no KV."""
    linear_us_per_row: NotNegative = 0.0
    """Read and write of a row's state in a linear layer; projections are in `other_us`."""
    state_mb: NotNegative = 0.0
    """A row's state in all linear layers together."""

    def __post_init__(self) -> None:
        check_fields(self)
        most = self.num_layers
        for name, high in (("num_moe_layers", most), ("num_linear_layers", most - 1)):
            between(0, high).check(name, getattr(self, name))
        experts = (self.num_experts, self.experts_per_token)
        if (min(experts) < 1) if self.num_moe_layers else any(experts):
            raise ValueError(
                f"num_moe_layers is {self.num_moe_layers}, num_experts {self.num_experts} and "
                f"experts_per_token {self.experts_per_token}; all must be 0, for a dense model, or "
                "1 or more"
            )
        if not self.wire_forms:
            raise ValueError("there are 0 wire_forms; there must be 1 or more")

    @property
    def num_full_layers(self) -> int:
        """Layers that attend to KV."""
        return self.num_layers - self.num_linear_layers

    def most_experts(self, num_instances: int) -> int:
        """Experts of a layer on the instance that has most of them."""
        return -(-self.num_experts // num_instances)

    def wire_form(self, name: str) -> WireForm:
        """The form of that name; the first if the name is empty. Raises ValueError."""
        if name and name not in self.wire_forms:
            raise ValueError(f"wire form is {name!r}; {none_of(name, list(self.wire_forms))}")
        return self.wire_forms[name or next(iter(self.wire_forms))]


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a GPU, in GB of 10^9 bytes; frames get the rest."""

    __pydantic_config__ = {"extra": "forbid"}

    gpu: str
    hbm_gb: AboveZero
    usable_share: Share
    """Share of it that an instance fills."""
    rest_gb: NotNegative
    """Weights that every instance has: all but the routed experts."""
    reserve_gb: NotNegative
    """Captured graphs and libraries."""
    exchange_mb_per_peer: NotNegative = 0.0
    """Receive buffers for each other instance, in MB of 10^6 bytes."""

    def __post_init__(self) -> None:
        check_fields(self)

    def num_frames(self, model: ModelShape, num_instances: int, max_rows: int) -> int:
        """Frames of each of num_instances; raises ValueError, with the sum, if none is left."""
        if 0 < model.num_experts < num_instances:
            raise ValueError(
                f"the model has {model.num_experts} experts; there may be as many instances, and "
                f"not {num_instances}"
            )
        num_local = model.most_experts(num_instances)
        experts_gb = num_local * model.num_moe_layers * model.expert_mb / 1e3
        usable_gb = self.usable_share * self.hbm_gb
        reserve_gb = self.reserve_gb + self.exchange_mb_per_peer * (num_instances - 1) / 1e3
        states_gb = (max_rows + 2) * model.state_mb / 1e3
        left_gb = usable_gb - experts_gb - self.rest_gb - reserve_gb - states_gb
        num_frames = int(left_gb * 1e9 / (PAGE_SIZE * model.kv_bytes_per_token))
        if num_frames < 1:
            states = f", states of rows {states_gb:.1f}" if states_gb else ""
            raise ValueError(
                f"the model does not fit {num_instances} {self.gpu}: of {self.hbm_gb:g} GB each, "
                f"{usable_gb:.1f} are usable; {num_local} experts of {model.num_moe_layers} layers "
                f"take {experts_gb:.1f}, other weights {self.rest_gb:.1f}, graphs and buffers "
                f"{reserve_gb:.1f}{states}: {-left_gb:.1f} GB too many"
            )
        return num_frames


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """A simulated cluster."""

    __pydantic_config__ = {"extra": "forbid"}

    cluster: ClusterConfig
    model: ModelShape
    costs: dict[str, Costs]
    """By the name of the set, such as peak and fitted."""
    ingest_gb_per_s: AboveZero
    """GB of KV a second that an instance receives; its transfers take turns."""
    ingest_tail_share: Share = 1.0
    """Share of a prompt's KV that is still to come when the request arrives. 1: prefill sends all
    of it at the end; less: it sends while it computes."""
    prefill_gb_per_s: Annotated[float | None, ABOVE_ZERO] = None
    """GB of KV a second that all of prefill sends, shared equally. None: as much as the instances
    receive."""
    ttft_targets: tuple[tuple[int, int], ...] = ()
    """(priority, ms) pairs of policy cost_aware, as scheduler.ttft_targets of the service; requests
    of a workload have priority 0."""
    tpot_target_ms: Natural = 0
    """The service's scheduler.tpot_target_ms, whatever the policy. 0: nobody is deferred."""
    expert_imbalance: Annotated[float, at_least(1)] = 1.0
    """Pairs of rows and experts on the busiest instance over the mean, on average of MoE layers."""
    cp_degrees: tuple[int, ...] = (1, 2, 4, 8)
    """Degrees that the length profile chooses from."""
    row_buckets: tuple[int, ...] = field(default=(8, 16, 32, 48, 64, 96, 128, 192, 256))
    """Rows of the captured graphs, ascending; the last holds max_rows."""
    attention_row_buckets: tuple[int, ...] = ()
    """Attention rows of the captured graphs, ascending. Empty: as row_buckets."""
    memory: Memory | None = None
    """None: cluster.num_frames gives the frames of an instance."""
    interference: Interference = TABLE_3
    """The network's and memory's part of a GPU."""

    def __post_init__(self) -> None:
        check_ttft_targets(self.ttft_targets)
        check_fields(self)
        if not self.costs:
            raise ValueError("costs is empty; it must hold one set of constants or more")
        if (
            not self.cp_degrees
            or min(self.cp_degrees) < 1
            or max(self.cp_degrees) > self.cluster.num_instances
        ):
            raise ValueError(
                f"cp_degrees is {self.cp_degrees}; they must be from 1 to num_instances "
                f"({self.cluster.num_instances})"
            )
        for name in ("cp_degrees", "row_buckets", "attention_row_buckets"):
            buckets = getattr(self, name)
            if list(buckets) != sorted(set(buckets)) or (buckets and buckets[0] < 1):
                raise ValueError(f"{name} is {buckets}; they must be ascending positive integers")
        if not self.row_buckets or self.row_buckets[-1] < self.cluster.bounds.max_rows:
            raise ValueError(
                f"row_buckets is {self.row_buckets}; the last must hold max_rows "
                f"({self.cluster.bounds.max_rows})"
            )

    def of_size(self, num_instances: int) -> ClusterFile:
        """The cluster with another number of instances.

        Raises ValueError if the model does not fit, or if the file has no memory section.
        """
        sized = self
        if self.memory is not None:
            max_rows = self.cluster.bounds.max_rows
            num_frames = self.memory.num_frames(self.model, num_instances, max_rows)
            cluster = replace(self.cluster, num_instances=num_instances, num_frames=num_frames)
            degrees = tuple(degree for degree in self.cp_degrees if degree <= num_instances)
            sized = replace(self, cluster=cluster, cp_degrees=degrees)
        elif num_instances != self.cluster.num_instances:
            raise ValueError(
                f"the cluster file has {self.cluster.num_instances} instances and no memory "
                f"section; without one the frames of {num_instances} instances are not known"
            )
        max_len = sized.cluster.max_model_len
        if reason := invalidity(Arrival(1, max_len - 1, 1), sized.cluster):
            raise ValueError(f"a request of max_model_len ({max_len}) can never run: {reason}")
        return sized

    @property
    def ingest_ns_per_token(self) -> float:
        """Nanoseconds to receive the rest of a prompt's KV, per token."""
        return self.ingest_tail_share * self.model.kv_bytes_per_token / self.ingest_gb_per_s

    def layer_expert_us(self, costs: Costs, mean_rows: float) -> float:
        """Microseconds of a layer's expert GEMMs on the instance with most experts and pairs.

        mean_rows: of an instance.
        """
        model, num_instances = self.model, self.cluster.num_instances
        num_local = model.most_experts(num_instances)
        share = num_local * num_instances / max(1, model.num_experts)
        mflop = (
            max(share, self.expert_imbalance)
            * mean_rows
            * model.experts_per_token
            * model.expert_mflop
        )
        return costs.gemm_us(num_local * model.expert_mb, mflop)

    @property
    def default_constants(self) -> str:
        """Name of the default set: operators, where the file has it."""
        return next((name for name in _DEFAULTS if name in self.costs), next(iter(self.costs)))

    def costs_of(self, constants: str) -> Costs:
        """The named set, or the default one for an empty name. Raises ValueError for another."""
        constants = constants or self.default_constants
        if constants not in self.costs:
            raise ValueError(f"constants is {constants!r}; {none_of(constants, list(self.costs))}")
        return self.costs[constants]


def shipped_names() -> list[str]:
    """Names of the cluster files that ship."""
    return names_in(SHIPPED)


def cluster_path(name_or_path: str) -> Path:
    """Path of the shipped cluster file of that name, or the given path to a file.

    Raises ValueError for an unknown name, naming the nearest.
    """
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or (path.exists() and not path.is_dir()):
        return path
    if name_or_path not in shipped_names():
        raise ValueError(
            f"cluster is {name_or_path!r}; {none_of(name_or_path, shipped_names())}, or a .yaml "
            "file"
        )
    return SHIPPED / f"{name_or_path}.yaml"


def load_cluster_file(name_or_path: str, num_instances: int | None = None) -> ClusterFile:
    """The cluster file of `cluster_path`, with its own number of instances or another.

    Raises ValueError for an unknown name, an unreadable or an invalid file.
    """
    path = cluster_path(name_or_path)
    tree, file = load_file(path, ClusterFile)
    if file.memory is not None and "num_frames" in tree["cluster"]:
        raise ValueError(
            f"{path}: cluster.num_frames is given beside memory, from which frames are derived; "
            "only one may be"
        )
    try:
        return file.of_size(num_instances or file.cluster.num_instances)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
