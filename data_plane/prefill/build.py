"""Start-up of the prefill: from a checkpoint folder to a stage, a probe or a reader."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import torch

from data_plane.instance.stage_edge import StageEdge
from data_plane.kv.carry_pool import CarryPool
from data_plane.model.attention_kinds.mla import MlaConfig
from data_plane.model.config import ModelConfig
from data_plane.model.sizes import page_bytes
from data_plane.model.weights import Progress, load_weights, say_nothing
from data_plane.prefill.connector.fingerprint import fingerprint
from data_plane.prefill.pages import begin_state, kv_before_experts, payload_of
from data_plane.prefill.probe import KvProbe, probe_token_ids
from data_plane.prefill.pull.first_layer import FirstLayer
from data_plane.prefill.pull.kv_shape import KvShape
from data_plane.prefill.pull.reader import EngineReader
from data_plane.startup.memory_need import prefill_bytes
from data_plane.startup.shared_parts import model_of, torch_dtype
from data_plane.startup.stage import build_stage
from data_plane.step.stage import CpuStageModel
from data_plane.transport.nixl.pages import nixl_package
from data_plane.transport.segments import Segments
from nanocp.config.whole import Config
from nanocp.values.passes import even_split, layers_of, prompt_passes
from nanocp.values.plan import CARRY_PAGE

_PROBED_LAYERS = 4
"""DeepSeek-V3's dense layers and one more: a model without experts would be loaded whole."""


class PrefillStage(NamedTuple):
    """A stage of the prefill."""

    stage: StageEdge[CpuStageModel]
    fp8_rank: int | None
    """kv_lora_rank if instances keep KV in FP8."""
    offset: int
    """Bytes of a page before the stage's layers."""

    def part(self, ticket: int, page: int) -> tuple[int, np.ndarray]:
        """Return the stage's part of a computed page: the bytes before it, and its bytes."""
        if page >= CARRY_PAGE:
            return self.stage.model.carry_part(ticket, page - CARRY_PAGE)
        return self.offset, payload_of(self.stage.model.page(ticket, page), self.fp8_rank)


def build_prefill_stage(
    config: Config,
    stage: int,
    segments: Segments,
    checkpoint: Path,
    progress: Progress = say_nothing,
) -> PrefillStage:
    """Load the layers of one of `prefill.stages`, every expert included; none of them samples.

    Raises ValueError naming the checkpoint's fault, or that the model exceeds the free memory.
    """
    model, own = model_of(config, checkpoint), config.of_prefill_stages
    if stage == 0:
        _refuse_too_large(own, model)
    split = even_split(model.num_stored_layers, config.prefill.stages)
    own = replace(own, pipeline=replace(own.pipeline, max_layers=split[0]))
    max_in_flight = prompt_passes(config.prefill.stages)
    # Layers of these stages do not move, so no KV goes between them.
    has_mtp = model.num_mtp_layers > 0
    built = build_stage(own, stage, segments, checkpoint, progress, max_in_flight, 1, has_mtp)
    fp8_rank = model.attention.fp8_rank() if config.data_plane.kv_dtype == "fp8" else None
    num_before, _ = model.places_before(layers_of(split, stage).start)
    layer_bytes = page_bytes(model, config.data_plane) // model.num_kept_layers
    return PrefillStage(built, fp8_rank, num_before * layer_bytes)


def build_probe(config: Config, checkpoint: Path, progress: Progress = say_nothing) -> KvProbe:
    """Compute the probe of engines: KV of the first layers, up to attention of the first MoE layer.

    Raises ValueError naming the checkpoint's fault.
    """
    torch.set_num_threads(config.data_plane.threads_per_instance)
    model, dtype = model_of(config, checkpoint), torch_dtype(config.data_plane)
    kind, delta = model.attention, model.delta
    if delta is not None and (delta.has_channel_decay or 0 not in model.linear_layers):
        raise ValueError(
            "prefill.engines is set, and the model has linear attention layers: engines send "
            "states of Gated DeltaNet (Qwen) only, in models whose first layer is one"
        )
    num_layers = min(model.num_layers, model.num_dense_layers + 1, _PROBED_LAYERS)
    first = replace(model, num_layers=num_layers, num_mtp_layers=0)
    weights = load_weights(checkpoint, first, dtype, range(0), progress)
    token_ids, size = probe_token_ids(model.vocab_size), page_bytes(model, config.data_plane)
    states, expected = None, torch.empty(0, len(token_ids), kind.kv_width, dtype=dtype)
    if delta is None:
        expected = kv_before_experts(weights, first, token_ids)
    else:
        states = CarryPool(delta, len(model.linear_layers), 1, dtype, size)
        begin_state(states, weights, model, token_ids)
    names, width = ("key", "value"), kind.kv_width // 2
    if isinstance(kind, MlaConfig):
        names, width = ("latent", "key"), kind.kv_lora_rank
    return KvProbe(
        fingerprint=fingerprint(checkpoint, config.data_plane.dtype),
        token_ids=token_ids,
        expected=expected,
        num_layers=model.num_kept_layers,
        parts=((names[0], slice(width)), (names[1], slice(width, None))),
        fp8_rank=kind.fp8_rank() if config.data_plane.kv_dtype == "fp8" else None,
        page_bytes=size,
        states=states,
    )


def build_reader(
    config: Config, checkpoint: Path, progress: Progress = say_nothing
) -> EngineReader:
    """Make the reader of prompts at other engines, with the weights that check what it reads.

    Raises ValueError for a model that it cannot read, a fault of the checkpoint, or missing
    packages.
    """
    if nixl_package() is None or find_spec("zmq") is None:
        raise ValueError(
            "prefill.pull.allowed is set, and NIXL or pyzmq is not installed: pip install '.[nixl]'"
        )
    model, dtype = model_of(config, checkpoint), torch_dtype(config.data_plane)
    if model.delta is not None:
        raise ValueError(
            "prefill.pull.allowed is set, and the model has linear attention layers, whose states "
            "are not read from other engines"
        )
    torch.set_num_threads(config.data_plane.threads_per_instance)
    fp8_rank = model.attention.fp8_rank() if config.data_plane.kv_dtype == "fp8" else None
    return EngineReader(
        f"nanocp puller {socket.gethostname()} {os.getpid()}",
        config.prefill.pull.allowed,
        KvShape(model, dtype, fp8_rank),
        FirstLayer(checkpoint, model, dtype, progress),
    )


def _refuse_too_large(config: Config, model: ModelConfig) -> None:
    """Raise ValueError if the model does not fit: the system would kill the process half-way.

    It is compared with the memory that is free now. Instances share the rest: each loads its own
    experts, and all of attention.
    """
    needed = prefill_bytes(model, config.data_plane, config.cluster.bounds.max_rows)
    available = psutil.virtual_memory().available
    if needed > available:
        raise ValueError(
            "the prefill holds the whole model on one machine: "
            f"{needed / 2**30:.1f} GiB in {config.data_plane.dtype}, but {available / 2**30:.1f} "
            "GiB of memory are free; set prefill.synthetic_kv, or a machine with more memory"
        )
