"""Start-up of an instance: from a checkpoint folder and a configuration to a DecodeInstance.

Enters: Config, checkpoint folder, which instance of which cluster. Leaves: a DecodeInstance, not
yet connected, with a sentence for every choice made. Does not know: what starts it, gRPC, Ray.
"""

from __future__ import annotations

from pathlib import Path

import torch

from data_plane.instance.decode import DecodeInstance
from data_plane.instance.grammar import load_grammar_masks
from data_plane.model.config import ModelConfig
from data_plane.model.weights import Progress, say_nothing
from data_plane.startup.cpu import build_cpu_instance
from data_plane.transport.segments import Segments
from nanocp.config import Config


def build_instance(
    config: Config,
    instance: int,
    segments: Segments,
    checkpoint: Path,
    progress: Progress = say_nothing,
) -> DecodeInstance:
    """Load this instance's share of the model and allocate its frames, pool and shared memory.

    progress: see model.weights.Progress. Raises ValueError naming what is wrong with the
    checkpoint, what does not fit it, or what this machine does not have.
    """
    torch.set_num_threads(config.data_plane.threads_per_instance)
    if config.data_plane.device == "cuda":
        # Without Triton there is nothing to import.
        from data_plane.startup.gpu import build_gpu_instance

        built = build_gpu_instance(config, instance, segments, checkpoint, progress)
    else:
        built = build_cpu_instance(config, instance, segments, checkpoint, progress)
    if config.cluster.bounds.max_grammar_bytes:
        model = ModelConfig.from_folder(checkpoint)
        built.grammar_masks = load_grammar_masks(checkpoint, model.vocab_size, model.eos_token_ids)
    return built
