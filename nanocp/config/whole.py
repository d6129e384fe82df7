"""The whole configuration: every section, and refusals of settings that do not go together.

Standard library only: the scheduler imports it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from nanocp.config.choices import require
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.kv_offload import KvOffloadConfig
from nanocp.config.limits import LimitsConfig
from nanocp.config.passes import PassesConfig
from nanocp.config.prefill import PrefillConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.service import ServiceConfig
from nanocp.values.members import PREFILL, PULLER, Member
from nanocp.values.plan import PAGE_SIZE

_REGROUPING = ("exchange", "nixl_ep", "fused")
"""Dispatch backends that can join a further term on GPUs."""

FOLLOWS = {
    ("cluster", "bounds", "max_attention_rows"): ("cluster", "bounds", "max_rows"),
    ("limits", "exchange_timeout_ms"): ("limits", "plan_timeout_ms"),
}
"""Keys that follow another one, half more if only that is set; their defaults are the least."""

SECRETS = ("api_key", "api_keys")
"""Keys whose values are never shown, in any section."""


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
        if sentence := next(_refusals(self), ""):
            raise ValueError(sentence)

    @property
    def has_slots(self) -> bool:
        """True if pages are kept outside the frames."""
        return self.kv_offload.host_gib > 0 or self.scheduler.offload_host_pages > 0

    def with_slots(self, page_bytes: int) -> Config:
        """This configuration, with as many slots as kv_offload has room for.

        page_bytes: of the served model. Raises ValueError if there is no room for one page.
        """
        num_host, num_file = self.kv_offload.num_pages(page_bytes)
        for name, number in (("host_gib", num_host), ("file_gib", num_file)):
            require(
                number > 0 or not getattr(self.kv_offload, name),
                f"kv_offload.{name} is {getattr(self.kv_offload, name)}; a page of this model has "
                f"{page_bytes:,} bytes, and one at least must fit",
            )
        sized = replace(
            self.scheduler,
            offload_host_pages=self.scheduler.offload_host_pages or num_host,
            offload_file_pages=self.scheduler.offload_file_pages or num_file,
        )
        return replace(self, scheduler=sized)

    def with_carry(self, carry_pages: int) -> Config:
        """This configuration, for rows with states of so many pages.

        Raises ValueError for settings that do not go with such states.
        """
        return replace(self, cluster=replace(self.cluster, carry_pages=carry_pages))

    @property
    def recovers(self) -> bool:
        """True if the cluster goes on after a lost member."""
        own, timeout_ms = self.data_plane, self.limits.recovery_timeout_ms
        can_regroup = own.device == "cpu" or own.dispatch_backend in _REGROUPING
        can_regroup &= not own.has_nvshmem
        return can_regroup and own.page_backend != "nixl" and timeout_ms > 0

    @property
    def leave_timeout_ms(self) -> int:
        """Longest time to leave a term; the host cannot end waits of NIXL-EP."""
        has_nixl_ep = self.data_plane.dispatch_backend == "nixl_ep"
        return self.limits.plan_timeout_ms + has_nixl_ep * self.limits.exchange_timeout_ms

    @property
    def prompt_members(self) -> tuple[Member, ...]:
        """Members that bring the KV of prompts: the prefill, by itself or by engines, the puller.

        None with synthetic KV or as a pipeline.
        """
        prefill = self.prefill
        if self.cluster.layout == "pipeline" or prefill.synthetic_kv:
            return ()
        return (PREFILL,) * prefill.computes + (PULLER,) * bool(prefill.pull.allowed)

    @property
    def of_prefill_stages(self) -> Config:
        """The configuration of the prefill's stages: a pipeline without clients.

        A stage has frames for two of the longest prompts, and keeps pages, not states, for prompts
        that begin alike. Kernels are torch's, which can expand keys and values.
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
            # Nothing but its stages limits what waits for them.
            scheduler=SchedulerConfig(
                prefix_sharing=self.scheduler.prefix_sharing and not self.cluster.carry_pages,
                max_queued_requests=10**6,
                max_queued_tokens=10**12,
            ),
            data_plane=DataPlaneConfig(
                dtype=mine.dtype,
                cpu_kernels="torch",
                threads_per_instance=mine.threads_per_instance,
            ),
            pipeline=PassesConfig(max_pass_tokens=self.prefill.chunk_tokens),
            limits=self.limits,
        )


def _refusals(config: Config) -> Iterator[str]:
    cluster, scheduler, data_plane = config.cluster, config.scheduler, config.data_plane
    on_cpu, dispatch = data_plane.device == "cpu", data_plane.dispatch_backend
    if scheduler.has_lanes and not on_cpu and dispatch != "exchange":
        yield (
            f"scheduler.lanes is {scheduler.lanes} and dispatch_backend {dispatch}; on a GPU "
            "it must be exchange, the only one that both lanes can use at once"
        )
    if scheduler.num_drafts and scheduler.has_lanes and not on_cpu:
        yield (
            f"scheduler.num_drafts is {scheduler.num_drafts} and scheduler.lanes "
            f"{scheduler.lanes}; on a GPU one of them must be off: drafts win with few rows, lanes "
            "with many"
        )
    if not on_cpu and cluster.num_nodes > 1 and not data_plane.has_nvshmem:
        yield (
            f"device is cuda, and {cluster.num_instances} instances are on more than one node of "
            f"{cluster.instances_per_node} (cluster.instances_per_node); exchange_backend must be "
            "nvshmem, which is experimental (docs/use/gpu.md)"
        )
    if config.prefill.stages != 1 and data_plane.page_backend != "auto":
        yield (
            f"prefill.stages is {config.prefill.stages} and data_plane.page_backend "
            f"{data_plane.page_backend}; pages of stages go as auto says: take it, or 1 stage"
        )
    if scheduler.offload_file_pages and not config.kv_offload.file_dir:
        yield (
            "kv_offload is on, and scheduler.offload_file_pages is set without kv_offload.file_dir"
        )
    if config.service.kv_events and not scheduler.prefix_sharing:
        yield "service.kv_events is set, and scheduler.prefix_sharing is off: no page is shared"
    for what, is_on, refusals in (
        ("cluster.layout is pipeline", cluster.layout == "pipeline", _of_pipeline),
        ("service.controller_process is true", config.service.controller_process, _of_controller),
        (f"cluster.spares is {cluster.spares}", cluster.spares > 0, _of_losses),
        ("kv_offload is on", config.has_slots, _of_slots),
        ("the model has linear attention layers", cluster.carry_pages > 0, _of_carries),
    ):
        for is_asked, sentence in refusals(config):
            if is_on and is_asked:
                yield f"{what}, and {sentence}"


_Refusals = tuple[tuple[bool, str], ...]
"""Conflicts of a feature: (it is asked for, a sentence)."""


def _of_pipeline(config: Config) -> _Refusals:
    scheduler, prefill, data_plane = config.scheduler, config.prefill, config.data_plane
    has_prefill = (
        prefill.engines or prefill.synthetic_kv or prefill.stages != 1 or prefill.pull.allowed
    )
    return (
        _of_cpus(config),
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
            scheduler.num_drafts != 0,
            f"scheduler.num_drafts {scheduler.num_drafts}: its last stage does not draft",
        ),
        (
            data_plane.sampling != "inverse",
            f"data_plane.sampling {data_plane.sampling}: its last stage draws by inverse",
        ),
        (
            scheduler.policy not in (SchedulerConfig().policy, "dual_balanced"),
            f"scheduler.policy {scheduler.policy}: a pipeline places no request on instances, so "
            "take the default, and see pipeline.layer_policy",
        ),
        (
            scheduler.tpot_target_ms != 0,
            f"scheduler.tpot_target_ms {scheduler.tpot_target_ms}: its prompts are not deferred",
        ),
        (
            bool(has_prefill),
            "prefill.engines, pull, synthetic_kv or stages is set: its own stages "
            "(cluster.num_instances) compute prompts",
        ),
        (
            config.cluster.redundant_experts != 0,
            f"cluster.redundant_experts {config.cluster.redundant_experts}: a stage has all "
            "experts of its layers",
        ),
    )


def _of_cpus(config: Config) -> tuple[bool, str]:
    device = config.data_plane.device
    return device != "cpu", f"data_plane.device is {device}: it must be cpu"


def _of_instances(config: Config) -> tuple[bool, str]:
    layout = config.cluster.layout
    return layout == "pipeline", "cluster.layout is pipeline: it must be instances"


def _of_losses(config: Config) -> _Refusals:
    return (
        _of_cpus(config),
        _of_instances(config),
        (
            not config.recovers,
            "members that are lost are not replaced (limits.recovery_timeout_ms: 0, or "
            "data_plane.page_backend: nixl)",
        ),
    )


def _of_controller(config: Config) -> _Refusals:
    carries = config.service.node_streams
    sentence = "service.node_streams is true: it must be false, as that process ends with it"
    return *_of_losses(config), (carries, sentence)


def _of_carries(config: Config) -> _Refusals:
    scheduler = config.scheduler
    return (
        _of_instances(config),
        (scheduler.num_drafts != 0, f"scheduler.num_drafts {scheduler.num_drafts}: it must be 0"),
    )


def _of_slots(config: Config) -> _Refusals:
    return (
        _of_instances(config),
        (config.prefill.synthetic_kv, "prefill.synthetic_kv is set: no page has content to keep"),
        (
            not config.scheduler.prefix_sharing,
            "scheduler.prefix_sharing is off: no page has a hash",
        ),
    )
