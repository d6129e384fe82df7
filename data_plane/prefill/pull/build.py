"""Start-up of a reader of prompts' KV: from a configuration and a checkpoint folder."""

from __future__ import annotations

import os
import socket
from importlib.util import find_spec
from pathlib import Path

import torch

from data_plane.model.weights import Progress, say_nothing
from data_plane.prefill.pull.first_layer import FirstLayer
from data_plane.prefill.pull.kv_shape import KvShape
from data_plane.prefill.pull.reader import EngineReader
from data_plane.startup.shared_parts import model_of, torch_dtype
from data_plane.transport.nixl.pages import nixl_package
from nanocp.config.whole import Config


def build_reader(
    config: Config, checkpoint: Path, progress: Progress = say_nothing
) -> EngineReader:
    """Make the reader of the puller, with the weights that check what it reads.

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
