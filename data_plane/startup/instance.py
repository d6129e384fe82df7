"""Start-up of an instance: from a checkpoint folder and a configuration to a DecodeInstance."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from data_plane.instance.decode import DecodeInstance
from data_plane.instance.grammar import GrammarMasks
from data_plane.model.weights import ModelWeights, Progress, say_nothing
from data_plane.startup.cpu import build_cpu_instance, load_shared_weights
from data_plane.startup.shared_parts import grammar_masks
from data_plane.transport.segments import Segments
from nanocp.config.whole import Config


class Prepared(NamedTuple):
    """The loaded parts that belong to no instance."""

    weights: ModelWeights
    """All but experts."""
    masks: GrammarMasks | None


def prepare_instance(config: Config, checkpoint: Path) -> Callable[..., DecodeInstance]:
    """Load all that no instance owns, on the CPU; return `build_instance` for the rest.

    Raises ValueError naming the checkpoint's fault.
    """
    torch.set_num_threads(config.data_plane.threads_per_instance)
    prepared = Prepared(load_shared_weights(config, checkpoint), grammar_masks(config, checkpoint))
    return partial(build_instance, prepared=prepared)


def build_instance(
    config: Config,
    instance: int,
    segments: Segments,
    checkpoint: Path,
    progress: Progress = say_nothing,
    prepared: Prepared | None = None,
) -> DecodeInstance:
    """Load this instance's share of the model and allocate its frames, pool and shared memory.

    Raises ValueError naming the checkpoint's fault, the misfit, or this machine's lack.
    """
    torch.set_num_threads(config.data_plane.threads_per_instance)
    if config.data_plane.device == "cuda":
        # Without Triton there is nothing to import.
        from data_plane.startup.gpu import build_gpu_instance

        built = build_gpu_instance(config, instance, segments, checkpoint, progress)
    else:
        shared = prepared.weights if prepared is not None else None
        built = build_cpu_instance(config, instance, segments, checkpoint, progress, shared)
    masks = prepared.masks if prepared is not None else grammar_masks(config, checkpoint)
    built.grammar_masks = masks
    return built
