"""Common parts of instances on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from data_plane.graph.buckets import BucketTable
from data_plane.instance.grammar import GrammarMasks, load_grammar_masks
from data_plane.instance.interface import TermEnds
from data_plane.kv.carry_pool import CarryPool
from data_plane.kv.frame_pool import FramePool
from data_plane.kv.page_ring import PageRing, prefill_rings
from data_plane.kv.peer_rings import PeerRings
from data_plane.model.config import ModelConfig
from data_plane.model.sizes import carry_bytes, carry_pages, page_bytes
from data_plane.moe.backend import BackendChoice, dispatch_backend, expert_backend, moe_schedule
from data_plane.moe.gpu.grouped import GroupedGemm
from data_plane.moe.mixture import MoeSchedule
from data_plane.transport.exchange import RegionLayout
from data_plane.transport.nixl.pages import nixl_package
from data_plane.transport.segments import Segments
from data_plane.transport.shm import ShmExchange
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.whole import Config


def bucket_table(config: Config) -> BucketTable:
    """Make captured batch shapes. Raises ValueError if row_buckets does not end at max_rows."""
    bounds, data_plane = config.cluster.bounds, config.data_plane
    widths, num_instances = range(1, 2), 0
    if data_plane.device == "cuda":
        widths = range(1, 2 + config.scheduler.num_drafts)
        num_instances = config.cluster.num_instances
    return BucketTable(
        bounds.max_rows,
        bounds.max_attention_rows,
        data_plane.row_buckets,
        widths,
        num_instances,
    )


def page_ways(
    config: Config, instance: int, segments: Segments, frames: FramePool
) -> tuple[tuple[PageRing, ...], PeerRings]:
    """Make the rings of pages: one for each writer of the prefill, and those of peers."""
    # A stage's bytes of a state are no equal share of its pages.
    num_layers = len(frames.layers) if frames.carry is None else 1
    rings = prefill_rings(config.prefill, segments, instance, frames.page_bytes, num_layers)
    return rings, PeerRings(
        segments, instance, config.cluster.num_instances, frames.page_bytes, config.limits
    )


def term_ends(
    config: Config,
    instance: int,
    segments: Segments,
    layout: RegionLayout,
    frames: FramePool,
    kind: type[ShmExchange] = ShmExchange,
) -> TermEnds:
    """Make an instance's connections in a term. layout, kind: of the exchange."""
    num_instances = config.cluster.num_instances
    exchange = kind.create(segments, instance, num_instances, layout, config.limits)
    return TermEnds(exchange, *page_ways(config, instance, segments, frames))


def page_choice(config: Config) -> str:
    """Describe for an operator the transport of pages between members."""
    if config.data_plane.page_backend == "nixl":
        return f"pages: NIXL ({nixl_package()}), as configured"
    return "pages: as the exchange (auto)"


class MoeBackends(NamedTuple):
    """The kernels of an instance's experts, and the transport of their rows."""

    gemm: GroupedGemm | None
    """None: the loop of moe/experts.py."""
    dispatch: str
    """One of DISPATCH_BACKENDS, and not auto."""
    schedule: MoeSchedule | None
    sentences: list[str]


def moe_backends(
    config: Config,
    model: ModelConfig,
    experts: range,
    device: torch.device,
    fused_obstacle: str,
    obstacles: Mapping[str, Callable[[], str]] = {},
) -> MoeBackends:
    """Choose the experts' GEMM and the dispatch. experts: of this instance.

    fused_obstacle, obstacles: as of dispatch_backend. Raises ValueError naming the configured
    choice that cannot run.
    """
    data_plane, dtype = config.data_plane, torch_dtype(config.data_plane)
    if device.type == "cuda":
        model.check_no_limits()
    if not model.num_experts:
        # It multiplies rows with dense layers too.
        name = "deep_gemm" if data_plane.expert_backend == "deep_gemm" else "auto"
        gemm, _ = expert_backend(name, device, dtype, expected_rows=1, max_rows=1)
        return MoeBackends(gemm, "exchange", None, ["experts: every layer is dense"])
    num_instances, max_rows = config.cluster.num_instances, config.cluster.bounds.max_rows
    expected_rows = max_rows * num_instances * model.num_experts_per_token // model.num_experts
    gemm, why_gemm = expert_backend(
        data_plane.expert_backend, device, dtype, max(1, expected_rows), max_rows
    )
    name = data_plane.dispatch_backend
    if data_plane.has_nvshmem and name == "auto":
        # DeepEP and NIXL-EP leave the node too, by name.
        dispatch = BackendChoice("exchange", "because exchange_backend is nvshmem")
    else:
        dispatch = dispatch_backend(name, model, fused_obstacle, obstacles)
    is_fused, has_lanes = dispatch.name == "fused", config.scheduler.has_lanes
    schedule = moe_schedule(data_plane.moe_schedule, is_fused, has_lanes)
    return MoeBackends(
        gemm,
        dispatch=dispatch.name,
        schedule=schedule,
        sentences=[
            f"experts: {experts.start} to {experts.stop - 1} of {model.num_experts}"
            f"{_redundant(config)}",
            f"expert GEMMs: {why_gemm}",
            f"dispatch: {dispatch}",
            *_start(schedule, device),
        ],
    )


def _start(schedule: MoeSchedule | None, device: torch.device) -> list[str]:
    if schedule is None or device.type == "cuda":  # there they start when rows arrive
        return []
    return [f"experts start: {schedule.name.lower()}"]


def _redundant(config: Config) -> str:
    number = config.cluster.redundant_experts
    return f", and {number} more slots in each layer" if number else ""


def model_of(config: Config, checkpoint: Path) -> ModelConfig:
    """Return the configured model. Raises ValueError as ModelConfig.from_folder does."""
    return ModelConfig.from_folder(checkpoint, config.scheduler.num_drafts > 0)


def with_carry(config: Config, checkpoint: Path) -> Config:
    """The configuration, with the pages that a row's state takes of the model it is for."""
    return config.with_carry(carry_pages(model_of(config, checkpoint), config.data_plane))


def new_carry(
    config: Config, model: ModelConfig, num_frames: int, device: torch.device | str = "cpu"
) -> CarryPool | None:
    """Make room for recurrent states; None for a model without linear attention layers.

    Raises ValueError if the configuration is not for this model, or the device has too little
    memory.
    """
    if (num_pages := carry_pages(model, config.data_plane)) != config.cluster.carry_pages:
        raise ValueError(
            f"cluster.carry_pages is {config.cluster.carry_pages}; a row of this model has a state "
            f"of {num_pages} pages"
        )
    if model.delta is None:
        return None
    size, num_layers = page_bytes(model, config.data_plane), len(model.linear_layers)
    dtype = torch_dtype(config.data_plane)
    return CarryPool(model.delta, num_layers, num_frames, dtype, size, device=device)


def carry_choice(model: ModelConfig, dtype: torch.dtype) -> list[str]:
    """Describe for an operator the recurrent states of linear attention layers, if any."""
    if model.delta is None:
        return []
    return [
        f"states of rows: {len(model.linear_layers)} of {model.num_layers} layers attend "
        f"linearly; {carry_bytes(model, dtype.itemsize) / 1e6:.1f} MB a row"
    ]


def torch_dtype(data_plane: DataPlaneConfig) -> torch.dtype:
    """Return the dtype of weights, activations and, unless it is FP8, KV."""
    return torch.bfloat16 if data_plane.dtype == "bfloat16" else torch.float32


def grammar_masks(config: Config, checkpoint: Path) -> GrammarMasks | None:
    """Load the masks of structured output; None if no row may have a grammar."""
    if not config.cluster.bounds.max_grammar_bytes:
        return None
    model = model_of(config, checkpoint)
    return load_grammar_masks(checkpoint, model.vocab_size, model.eos_token_ids)
