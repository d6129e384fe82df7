"""Every knob, once: frozen dataclasses with units in the names, validated on construction.

Enters: values from nanocp.config_file (file < environment < flag) or from tests. Leaves: a Config.
Does not know: files, the environment, the command line. Standard library only: the scheduler
imports it. The docstring below a field is also its help on the command line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from nanocp.choices import check_at_least, check_one_of, require
from nanocp.cost_config import CPU_COSTS as CPU_COSTS
from nanocp.cost_config import CostConfig as CostConfig
from nanocp.cost_config import check_ttft_targets as check_ttft_targets
from nanocp.offload import KvOffloadConfig as KvOffloadConfig
from nanocp.offload import offload_obstacle
from nanocp.passes import PassesConfig as PassesConfig
from nanocp.passes import pipeline_obstacle
from nanocp.plan import PAGE_SIZE
from nanocp.prefill_config import PrefillConfig as PrefillConfig
from nanocp.service_config import LimitsConfig as LimitsConfig
from nanocp.service_config import ServiceConfig as ServiceConfig

DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16")
KV_DTYPES = ("auto", "fp8")
WIRE_FORMS = ("latent", "absorbed")
CPU_KERNELS = ("auto", "torch", "native", "avx2")
ATTENTION_BACKENDS = ("auto", "torch", "triton", "flashmla", "flash_attention")
EXPERT_BACKENDS = ("auto", "loop", "grouped_mm", "triton", "deep_gemm")
DISPATCH_BACKENDS = ("auto", "exchange", "deep_ep", "fused")
MOE_SCHEDULES = ("auto", "barrier", "arrival")
EXCHANGE_BACKENDS = ("auto", "shm", "tcp", "cuda_ipc", "nvshmem")
PAGE_BACKENDS = ("auto", "nixl")
SECRETS = ("api_key", "api_keys", "tenant_keys")
"""Keys whose values are never shown, in whatever section."""
LAYOUTS = ("instances", "pipeline")
LANES = ("off", "measured", "always", "random")


@dataclass(frozen=True, slots=True)
class BoundsConfig:
    """Ahead-of-time bounds of one instance (arXiv 2605.21100, 5.2).

    They size its pools, and no plan exceeds them.
    """

    __pydantic_config__ = {"extra": "forbid"}

    max_rows: int = 64
    """Most requests whose MoE binding is one instance at a time."""
    max_links: int = 16
    """Most rows that one instance sends to one other instance: slots of an exchange region."""
    max_attention_rows: int = 96
    """Most rows that an instance runs attention for: its own and those received."""
    max_partials: int = 48
    """Most remote partials that return to one MoE binding in a step."""
    max_hand_offs: int = 4
    """Most rows that one instance hands to one other instance at one edge of a window."""
    max_grammar_bytes: int = 32_768
    """Longest grammar of structured output; a hand-off has room for it. 0: structured output is
    refused."""

    def __post_init__(self) -> None:
        check_at_least(
            1,
            max_rows=self.max_rows,
            max_links=self.max_links,
            max_attention_rows=self.max_attention_rows,
        )
        check_at_least(1, max_partials=self.max_partials, max_hand_offs=self.max_hand_offs)
        check_at_least(0, max_grammar_bytes=self.max_grammar_bytes)
        require(
            self.max_attention_rows >= self.max_rows,
            f"max_attention_rows is {self.max_attention_rows}; it must be at least max_rows "
            f"({self.max_rows})",
        )


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """How many instances, on which nodes, and what each holds."""

    __pydantic_config__ = {"extra": "forbid"}

    num_instances: int = 4
    """Instances of the cluster; stages of a pipeline."""
    instances_per_node: int = 4
    """Instances of one machine: instance i is on node i // instances_per_node."""
    num_frames: int = 256
    """Frames of 64 tokens in each instance's pool, without the scratch frame."""
    max_model_len: int = 8192
    """Most tokens of prompt and output of one request."""
    bounds: BoundsConfig = field(default_factory=BoundsConfig)
    redundant_experts: int = 0
    """Slots for experts that each instance has in every layer beyond its share of them. The cluster
    goes on without an instance if the others have slots for all experts. On CPUs only."""
    spares: int = 0
    """Processes that stand by with all weights but experts, and take the seats of lost instances:
    these then load experts only. On the machine of `nanocp serve`, on CPUs."""
    layout: str = "instances"
    """instances: each has some experts of every layer, and a request's KV may be on several.
    pipeline: each has some layers, with all their experts and KV, and prompts are computed there
    too (docs/pipeline.md)."""

    def __post_init__(self) -> None:
        check_one_of(LAYOUTS, layout=self.layout)
        check_at_least(
            1, num_instances=self.num_instances, instances_per_node=self.instances_per_node
        )
        check_at_least(1, num_frames=self.num_frames, max_model_len=self.max_model_len)
        check_at_least(0, redundant_experts=self.redundant_experts, spares=self.spares)

    def node_of(self, instance: int) -> int:
        """The node that the instance is on."""
        return instance // self.instances_per_node

    def num_holders(self, num_open: int = 0) -> int:
        """Most instances that hold pages of one request, of so many that serve; 0: of all.

        They are its MoE binding and as many others as partials may return. Stages of a pipeline
        hold the same pages.
        """
        if self.layout == "pipeline":
            return 1
        return min(num_open or self.num_instances, 1 + self.bounds.max_partials)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How the scheduler admits, places and moves requests (arXiv 2605.21100, 4.2)."""

    __pydantic_config__ = {"extra": "forbid"}

    policy: str = "cost_aware"
    """How requests are placed: a name of control_plane.scheduler.policies, such as cost_aware,
    dual_balanced (the paper's rule) or fixed_degree:2."""
    steps_per_window: int = 1
    """Steps k that one plan covers (arXiv 2605.21100, 6.1)."""
    cp_degree_buckets: tuple[tuple[int, int], ...] = ((1024, 1), (2048, 2))
    """(length, degree) pairs, ascending: a request of fewer than `length` tokens gets `degree`.
    cost_aware takes from it and from cp_degree_max only which requests get degree 1, and chooses
    the degree of others by `costs`."""
    cp_degree_max: int = 4
    """CP degree of requests at or above the last bucket's length."""
    ttft_targets: tuple[tuple[int, int], ...] = ()
    """(priority, ms) pairs: KV of that class's prompts should be there within this time of their
    placement; cost_aware then spreads prompts that would be late over NICs of a node. Empty: no
    class has a target."""
    tpot_target_ms: int = 0
    """While steps take longer than this, one in 110 requests may wait up to 20 s to be placed, and
    at most 8 at once: long prompts, so that the others keep their time per token. 0: nobody waits
    for that."""
    growth_promise: str = "max_tokens"
    """Output tokens whose frames are promised at admission. `max_tokens`: all, so that no row
    ever parks. `percentile:90`: as many as 90% of the latest finished requests had, at most
    max_tokens. `tokens:64`: 64."""
    prefix_sharing: bool = True
    """Requests whose prompts begin alike share their full pages, as long as frames hold them."""
    offload_host_pages: int = 0
    """Pages that each instance's memory holds outside frames. 0: what kv_offload.host_gib says."""
    offload_file_pages: int = 0
    """Pages that each instance's file holds. 0: what kv_offload.file_gib says."""
    max_moving_pages: int = 1024
    """Most pages on their way between instances at a time (policies cost_aware and chaos)."""
    max_unfilled_tokens: int = 0
    """Most prompt tokens of placed requests whose pages have not all arrived; one request may be
    placed in any case. 0: as many as the engines may have in flight (prefill.engines), or any
    number without engines."""
    max_overtake_us: int = 10_000_000
    """How long other requests may pass one that cannot be placed, after its deferral if any."""
    held_timeout_us: int = 10_000_000
    """How long front ends may take to submit their requests again after a loss."""
    max_queued_requests: int = 1024
    """Most requests in the waiting queue."""
    max_queued_tokens: int = 4_000_000
    """Most prompt tokens in the waiting queue."""
    chaos_seed: int = 0
    """Seed of the chaos policy's draws."""
    chaos_period_windows: int = 2
    """The chaos policy moves or extends a request in one of this many windows on average."""
    lanes: str = "off"
    """Whether rows run in two lanes, one of which computes while the other awaits its peers
    (docs/overlap.md). off: one lane. measured: as `lane_table` says for each window. always, or
    drawn for each window and row (random): for tests."""
    lane_table: tuple[tuple[int, int, int], ...] = ()
    """(rows, links, percent): what two lanes take of the time of one, for an instance of so many
    rows and links, as `nanocp profile --overlap` measured it."""
    lane_gain_percent: int = 3
    """Two lanes run only where they save at least this much."""
    costs: CostConfig = field(default_factory=CostConfig)

    def __post_init__(self) -> None:
        check_one_of(LANES, lanes=self.lanes)
        check_at_least(0, lane_gain_percent=self.lane_gain_percent)
        require(
            all(
                rows >= 1 and links >= 0 and percent >= 1
                for rows, links, percent in self.lane_table
            ),
            f"lane_table is {self.lane_table}; it must be (rows, links, percent) with rows and "
            "percent from 1 and links from 0",
        )
        require(
            self.lanes != "measured" or bool(self.lane_table),
            "lanes is measured and lane_table is empty; nanocp profile --overlap writes it",
        )
        check_at_least(1, steps_per_window=self.steps_per_window, cp_degree_max=self.cp_degree_max)
        check_at_least(
            1,
            max_queued_requests=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
        )
        check_at_least(1, chaos_period_windows=self.chaos_period_windows)
        check_at_least(0, max_moving_pages=self.max_moving_pages)
        check_at_least(
            0, max_unfilled_tokens=self.max_unfilled_tokens, tpot_target_ms=self.tpot_target_ms
        )
        host, file = self.offload_host_pages, self.offload_file_pages
        check_at_least(0, offload_host_pages=host, offload_file_pages=file)
        check_at_least(
            0,
            max_overtake_us=self.max_overtake_us,
            held_timeout_us=self.held_timeout_us,
            chaos_seed=self.chaos_seed,
        )
        require(
            re.fullmatch(
                r"max_tokens|tokens:\d{1,9}|percentile:([1-9]\d?|100)", self.growth_promise
            )
            is not None,
            f"growth_promise is {self.growth_promise!r}; it must be max_tokens, percentile:N with "
            "N from 1 to 100, or tokens:N",
        )
        check_ttft_targets(self.ttft_targets)
        require(
            not self.ttft_targets or self.policy == "cost_aware",
            f"ttft_targets is {self.ttft_targets} and policy {self.policy}; only cost_aware goes "
            "by targets: take it, or no targets",
        )
        lengths = [length for length, _ in self.cp_degree_buckets]
        require(
            lengths == sorted(set(lengths))
            and all(length >= 1 and degree >= 1 for length, degree in self.cp_degree_buckets),
            f"cp_degree_buckets is {self.cp_degree_buckets}; it must be (length, degree) pairs of "
            "positive integers with ascending lengths",
        )

    @property
    def has_lanes(self) -> bool:
        """Whether a window may run in two lanes, so that every instance has regions for both."""
        return self.lanes != "off"

    def lane_point(self, num_rows: int, num_links: int) -> tuple[int, int, int] | None:
        """The entry of `lane_table` that speaks for a window of this size; None in an empty table.

        It is the smallest that holds the size, else the largest.
        """
        holds = [p for p in self.lane_table if p[0] >= num_rows and p[1] >= num_links]
        return min(holds) if holds else max(self.lane_table, default=None)

    def lanes_pay(self, num_rows: int, num_links: int) -> bool:
        """Whether two lanes save enough for a window of this size, as measured."""
        point = self.lane_point(num_rows, num_links)
        return point is not None and point[2] <= 100 - self.lane_gain_percent


@dataclass(frozen=True, slots=True)
class DataPlaneConfig:
    """How an instance computes and exchanges."""

    __pydantic_config__ = {"extra": "forbid"}

    device: str = "cpu"
    """cpu or cuda: where an instance computes. cuda: on GPU i of its node, i its number among the
    node's instances."""
    dtype: str = "float32"
    """Weights (native kernels keep stored bfloat16), activations and KV: float32 or bfloat16."""
    kv_dtype: str = "auto"
    """auto: KV is kept in `dtype`. fp8: in e4m3 with four scales a token, on a GPU (656 bytes at
    DeepSeek-V3's widths)."""
    wire_form: str = "latent"
    """What Q-route carries: `latent` (the normed q latent; the receiver projects) or `absorbed`
    (the paper's form)."""
    cpu_kernels: str = "auto"
    """What computes a layer on a CPU. torch: PyTorch. native: kernels that this machine's C++
    compiler builds on first use (10 s), for the fastest instructions that the CPU has: AMX
    (bfloat16), AVX-512, or AVX2. avx2: native, with no more than AVX2. auto: native where it is
    available, else torch."""
    attention_backend: str = "auto"
    """What computes attention: one of ATTENTION_BACKENDS. auto on a CPU: as cpu_kernels, else
    torch."""
    expert_backend: str = "auto"
    """What multiplies the experts' weights: one of EXPERT_BACKENDS."""
    dispatch_backend: str = "auto"
    """What carries rows to their experts and back: one of DISPATCH_BACKENDS. fused: a layer's
    mixture of experts is one call, with native kernels on a CPU (docs/mixture.md). auto: fused
    where it can run, else deep_ep where it can, else exchange."""
    moe_schedule: str = "auto"
    """What a fused mixture runs when, on a CPU (docs/mixture.md). barrier: the shared expert, then,
    once all rows are here, the experts. arrival: first what other instances wait for; while rows
    are awaited, the shared expert, and experts that will have ended by then, unless another lane
    computes. auto: arrival where the mixture is fused. Tokens are the same."""
    exchange_backend: str = "auto"
    """What carries the exchange. auto on a CPU: shared memory within a node, TCP between nodes.
    shm: one node. tcp: TCP even within a node, for tests. auto on a GPU is cuda_ipc: the peers'
    memory, on one node. nvshmem is refused (docs/gpu.md)."""
    page_backend: str = "auto"
    """What carries pages of prefill and page moves. auto: the exchange's backend. nixl: NIXL (RDMA
    where available, TCP, or memory to memory within a node)."""
    threads_per_instance: int = 1
    """Threads of an instance. Native kernels share their tasks out among them and refuse more than
    there are cores; with torch they are intra-op threads. More than one per core is slower
    (docs/log.md)."""
    eager: bool = False
    """On a GPU: launch every kernel of every step instead of replaying captured graphs. For
    debugging."""
    row_buckets: tuple[int, ...] = ()
    """Rows of the captured steps, ascending; the last must be max_rows. Empty: powers of two up to
    max_rows."""

    def __post_init__(self) -> None:
        check_one_of(DEVICES, device=self.device)
        check_one_of(DTYPES, dtype=self.dtype)
        check_one_of(KV_DTYPES, kv_dtype=self.kv_dtype)
        check_one_of(WIRE_FORMS, wire_form=self.wire_form)
        check_one_of(CPU_KERNELS, cpu_kernels=self.cpu_kernels)
        check_one_of(ATTENTION_BACKENDS, attention_backend=self.attention_backend)
        check_one_of(EXPERT_BACKENDS, expert_backend=self.expert_backend)
        check_one_of(DISPATCH_BACKENDS, dispatch_backend=self.dispatch_backend)
        check_one_of(MOE_SCHEDULES, moe_schedule=self.moe_schedule)
        check_one_of(EXCHANGE_BACKENDS, exchange_backend=self.exchange_backend)
        check_one_of(PAGE_BACKENDS, page_backend=self.page_backend)
        require(
            self.kv_dtype != "fp8" or self.device == "cuda",
            "kv_dtype is fp8, which needs a GPU: device must be cuda",
        )
        require(
            self.exchange_backend == "auto"
            or (self.exchange_backend in ("cuda_ipc", "nvshmem")) == (self.device == "cuda"),
            f"exchange_backend is {self.exchange_backend} and device {self.device}; shm and tcp "
            "are for cpu, cuda_ipc and nvshmem for cuda",
        )
        require(
            self.page_backend != "nixl" or self.exchange_backend != "shm",
            "page_backend is nixl and exchange_backend shm; NIXL's agents meet over TCP, which shm "
            "does without: take auto",
        )
        check_at_least(1, threads_per_instance=self.threads_per_instance)
        require(
            list(self.row_buckets) == sorted(set(self.row_buckets))
            and all(rows >= 1 for rows in self.row_buckets),
            f"row_buckets is {self.row_buckets}; it must be ascending positive integers",
        )


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration of a cluster."""

    __pydantic_config__ = {"extra": "forbid"}

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    data_plane: DataPlaneConfig = field(default_factory=DataPlaneConfig)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    pipeline: PassesConfig = field(default_factory=PassesConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    service: ServiceConfig = field(default_factory=ServiceConfig)
    kv_offload: KvOffloadConfig = field(default_factory=KvOffloadConfig)

    def __post_init__(self) -> None:
        on_cpu, dispatch = self.data_plane.device == "cpu", self.data_plane.dispatch_backend
        require(
            not self.scheduler.has_lanes or on_cpu or dispatch == "exchange",
            f"scheduler.lanes is {self.scheduler.lanes} and dispatch_backend {dispatch}; on a GPU "
            "it must be exchange, the only one that both lanes can use at once",
        )
        num, per_node = self.cluster.num_instances, self.cluster.instances_per_node
        require(
            on_cpu or num <= per_node,
            f"device is cuda, and {num} instances are on more than one node of {per_node} "
            "(cluster.instances_per_node); GPUs exchange only within one node so far (docs/gpu.md)",
        )
        require(
            not self.cluster.spares or (self.recovers and on_cpu),
            f"cluster.spares is {self.cluster.spares}, for a service that ends at its first loss; "
            "spares need device cpu, page_backend auto and recovery_timeout_ms above 0",
        )
        require(
            self.prefill.stages == 1 or self.data_plane.page_backend == "auto",
            f"prefill.stages is {self.prefill.stages} and data_plane.page_backend "
            f"{self.data_plane.page_backend}; pages of stages go as auto says: take it, or 1 stage",
        )
        obstacle = pipeline_obstacle(self) if self.cluster.layout == "pipeline" else ""
        require(not obstacle, f"cluster.layout is pipeline, and {obstacle}")
        obstacle = offload_obstacle(self)
        require(not obstacle, f"kv_offload is on, and {obstacle}")

    @property
    def recovers(self) -> bool:
        """Whether the cluster goes on after it has lost a member."""
        own, timeout_ms = self.data_plane, self.limits.recovery_timeout_ms
        can_regroup = own.device == "cpu" or own.dispatch_backend in ("exchange", "fused")
        return can_regroup and own.page_backend != "nixl" and timeout_ms > 0

    @property
    def has_prefill_member(self) -> bool:
        """Whether prompts are computed by a member of their own, or by engines behind it."""
        return self.cluster.layout != "pipeline" and not self.prefill.synthetic_kv

    @property
    def of_prefill_stages(self) -> Config:
        """What the stages of the prefill are configured with: a pipeline that serves nobody.

        A stage has frames for two prompts of the greatest length. Its kernels are torch's: of their
        weights long chunks can make the keys and values of all heads.
        """
        num_frames = 2 * -(-self.cluster.max_model_len // PAGE_SIZE)
        mine = self.data_plane
        return Config(
            cluster=ClusterConfig(
                num_instances=self.prefill.stages,
                num_frames=num_frames,
                max_model_len=self.cluster.max_model_len,
                bounds=BoundsConfig(max_grammar_bytes=0),
                layout="pipeline",
            ),
            # Nothing but its stages limits what waits for them, and a page is written once.
            scheduler=SchedulerConfig(
                prefix_sharing=False, max_queued_requests=10**6, max_queued_tokens=10**12
            ),
            data_plane=DataPlaneConfig(
                dtype=mine.dtype,
                cpu_kernels="torch",
                threads_per_instance=mine.threads_per_instance,
            ),
            pipeline=PassesConfig(max_pass_tokens=self.prefill.chunk_tokens),
            limits=self.limits,
        )
