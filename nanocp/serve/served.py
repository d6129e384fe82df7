"""A checkpoint that fits the configuration, and factories of its members, named without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from control_plane.frontend.text.default_sampling import default_sampling
from control_plane.frontend.text.tokenizer import Tokenizer, load_tokenizer
from control_plane.frontend.validation import ModelLimits
from control_plane.scheduler.pipeline.layer_policies import make_layer_policy
from control_plane.scheduler.policies.registry import make_policy
from data_plane.model.config import ModelConfig
from data_plane.model.safetensors_reader import SafetensorsReader, has_fp8
from data_plane.model.sizes import carry_pages, page_bytes, stored_shapes
from nanocp.config.choices import require
from nanocp.config.cost import CPU_COSTS, GPU_DEGREES, CostConfig
from nanocp.config.file import measured_on
from nanocp.config.passes import PassCosts
from nanocp.config.pipeline import PipelineConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config
from nanocp.files.tokenizer import special_tokens
from nanocp.values.plan import PAGE_SIZE

INSTANCE_FACTORY = "data_plane.startup.instance:build_instance"
STAGE_FACTORY = "data_plane.startup.stage:build_stage"
PREFILL_FACTORY = "data_plane.prefill.build:build_prefill_stage"
PREFILL_PLANNER = "nanocp.serve.prefill_scheduler:make_prefill_scheduler"


@dataclass(frozen=True, slots=True)
class Served:
    """The served model, and the factories of its members."""

    limits: ModelLimits
    tokenizer: Tokenizer | None
    checkpoint: Path
    instance_factory: str = INSTANCE_FACTORY
    prefill_factory: str = PREFILL_FACTORY
    probe_factory: str = "data_plane.prefill.build:build_probe"
    """Makes probes of engines, in the prefill's place."""
    spare_factory: str = "data_plane.startup.instance:prepare_instance"
    """Loads an instance's common parts into a spare."""
    num_experts: int | None = None
    """Experts of a layer, 0 if dense; None if every instance must serve."""
    num_layers: int = 0
    page_bytes: int = 0
    """Bytes of a page outside the frames; 0: unknown."""
    carry_pages: int = 0
    """Pages of a row's state; 0: no linear attention layers."""
    reader_factory: str = "data_plane.prefill.build:build_reader"
    """Makes the puller's reader of engines' memory."""


def check_model(config: Config, model: ModelConfig, checkpoint: Path) -> None:
    """Check that a configuration can serve a model, for `nanocp serve` and `plan`.

    Reads the types of the weights if all are there. Raises ValueError with what does not fit.
    """
    num_instances = config.cluster.num_instances
    is_pipeline = config.cluster.layout == "pipeline"
    make_policy(config.scheduler)
    if is_pipeline:
        make_layer_policy(PipelineConfig.of(config.pipeline, num_instances, model.num_layers))
    elif 0 < model.num_experts < num_instances:
        raise ValueError(
            f"the model has {model.num_experts} experts; there may be as many instances, and not "
            f"{num_instances}"
        )
    profile = config.scheduler.profile
    profiled = measured_on(profile).get("model", model.in_words)
    require(
        profiled == model.in_words,
        f"{profile}: it was measured with a model of {profiled}, and this one has "
        f"{model.in_words}; profile again, or leave scheduler.profile out",
    )
    config.with_carry(carry_pages(model, config.data_plane))
    rate, why = config.cluster.expert_load_mb_per_s, why_experts_stay(config, model.num_experts)
    require(not (rate and why), f"cluster.expert_load_mb_per_s is {rate}, and {why}")
    if config.data_plane.device == "cuda":
        model.check_no_limits()
    if has_fp8(checkpoint) is not None:
        names = stored_shapes(model, range(model.num_experts))
        SafetensorsReader(checkpoint, model.fp8_block).check_dtypes(names)
    require(
        not (config.prefill.pull.allowed and carry_pages(model, config.data_plane)),
        "prefill.pull.allowed is set, and the model has linear attention layers, whose states are "
        "not pulled: leave it out, or let prefill.engines compute prompts",
    )
    num_stages = config.prefill.stages
    require(
        num_stages <= model.num_layers,
        f"prefill.stages is {num_stages}, and the model has {model.num_layers} layers; each stage "
        "needs one",
    )


def why_experts_stay(config: Config, num_experts: int | None) -> str:
    """Say why no expert of a cluster can move, and no load of them is known; empty if they can.

    num_experts: see Served.
    """
    if config.cluster.layout == "pipeline":
        return "a stage of a pipeline has all experts of its layers"
    if num_experts == 0:
        return "the model is dense: it has no experts"
    if config.cluster.num_instances == 1:
        return "the only instance has all experts"
    if num_experts is None or not config.recovers:
        return "the service ends with the first loss (limits.recovery_timeout_ms says where)"
    return ""


def with_model_len(config: Config, checkpoint: Path) -> Config:
    """The configuration; cluster.max_model_len, if not given, is at most the model's."""
    model = ModelConfig.from_folder(checkpoint)
    most = min(config.cluster.max_model_len, model.max_len)
    return replace(config, cluster=replace(config.cluster, max_model_len=most))


def open_checkpoint(config: Config, checkpoint: Path) -> Served:
    """Check a checkpoint folder, but not the types of its weights.

    Raises ValueError with what does not fit.
    """
    model = ModelConfig.from_folder(checkpoint, config.scheduler.num_drafts > 0)
    check_model(config, model, checkpoint)
    max_model_len = config.cluster.max_model_len
    require(
        max_model_len <= model.longest,
        f"cluster.max_model_len is {max_model_len}; the model takes at most {model.longest} tokens "
        f"({model.longest_why})",
    )
    has_prefill = not config.prefill.synthetic_kv
    name = config.service.served_model_name or str(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    eos = special_tokens(checkpoint).get("eos_token", "")
    ids = tokenizer.encode(eos, add_special_tokens=False) if tokenizer else []
    # A text that is no token of its own, or beyond the model's logits, ends nothing.
    eos_id = ids[0] if len(ids) == 1 and ids[0] < model.vocab_size else None
    limits = ModelLimits(
        model.vocab_size,
        max_model_len,
        model.eos_token_ids,
        has_prefill,
        name,
        config.cluster.bounds.max_grammar_bytes,
        has_prompt_logprobs=config.prefill.computes and not config.prefill.engines,
        default_sampling=default_sampling(checkpoint),
        # The last generated token has no KV.
        max_held_tokens=config.cluster.num_holders() * config.cluster.num_frames * PAGE_SIZE + 1,
        pulls_kv=bool(config.prefill.pull.allowed),
        computes_prompts=config.prefill.computes,
        tokenizer_eos_id=eos_id,
    )
    return Served(
        limits,
        tokenizer,
        checkpoint,
        STAGE_FACTORY if config.cluster.layout == "pipeline" else INSTANCE_FACTORY,
        num_experts=model.num_experts,
        num_layers=model.num_layers,
        page_bytes=page_bytes(model, config.data_plane),
        carry_pages=carry_pages(model, config.data_plane),
    )


def settled(config: Config, served: Served, controller_number: int) -> Config:
    """The configuration for a served model and this controller."""
    prefill, scheduler = config.prefill, config.scheduler
    if prefill.engines and not scheduler.max_unfilled_tokens:
        # What engines may have in flight bounds empty frames.
        bound = len(prefill.engines) * prefill.max_tokens_in_flight
        config = replace(config, scheduler=replace(scheduler, max_unfilled_tokens=bound))
    config = config.with_carry(served.carry_pages)
    if served.page_bytes:
        config = config.with_slots(served.page_bytes)
    if controller_number > 1 and config.service.event_log:
        log = f"{config.service.event_log}.{controller_number}"
        config = replace(config, service=replace(config.service, event_log=log))
    return config


_DEFAULTS = SchedulerConfig()
_COSTS = {CostConfig(): "costs of 32 H200s", CPU_COSTS: "costs of a CPU"}
_DEGREES = {
    (GPU_DEGREES["cp_degree_buckets"], GPU_DEGREES["cp_degree_max"]): "CP degrees of 32 H200s",
    (_DEFAULTS.cp_degree_buckets, _DEFAULTS.cp_degree_max): "CP degrees that nobody measured",
}


def policy_in_words(config: Config) -> str:
    """The policy by name, and what it goes by that was not measured on this machine."""
    policy, scheduler, source = config.scheduler.policy, config.scheduler, None
    if config.cluster.layout == "pipeline":
        policy = config.pipeline.layer_policy
        if policy in ("delta", "level") and config.pipeline.costs == PassCosts():
            source = "costs that nobody measured"
    elif config.cluster.num_instances > 1 and policy == "cost_aware":
        source = _COSTS.get(scheduler.costs)
    elif config.cluster.num_instances > 1 and policy == "dual_balanced":
        source = _DEGREES.get((scheduler.cp_degree_buckets, scheduler.cp_degree_max))
    words = policy
    if source is not None:
        words += f" by {source} (nanocp profile measures yours)"
    drafts = scheduler.num_drafts > 0 and scheduler.drafting == "always"
    unmeasured = ["drafts"] * (drafts and not scheduler.draft_table)
    unmeasured += ["two lanes"] * (scheduler.lanes == "always" and not scheduler.lane_table)
    if unmeasured:
        words += f"; always {' and '.join(unmeasured)}, and nobody measured whether they pay"
    return words
