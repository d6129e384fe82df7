"""Sizes that vLLM finds by itself: the longest request, and a GPU's frames."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_plane.model.config import ModelConfig
from nanocp.cli.plan.memory import frames_that_fit
from nanocp.config.choices import require
from nanocp.config.file import load_config
from nanocp.config.whole import Config
from nanocp.values.plan import PAGE_SIZE

_SHARE = "--gpu-memory-utilization"


def with_sizes(
    path: Path | None, flags: Mapping[str, Any], checkpoint: Path
) -> tuple[Config, dict[str, Any]]:
    """Load the configuration, and find the sizes that flags leave open.

    flags: keys for nanocp.config.file. A max_model_len of -1 is the most that model and frames
    allow; gpu_memory_utilization sets a GPU's frames. Returns flags with numbers too. Raises
    ValueError as load_config does, for a bad share, and without room or a GPU.
    """
    share, longest = flags.get("gpu_memory_utilization"), flags.get("cluster.max_model_len") == -1
    left = {key: value for key, value in flags.items() if key != "gpu_memory_utilization"}
    if longest:
        del left["cluster.max_model_len"]
    config = load_config(path, left)
    if share is not None:
        valid = isinstance(share, float | int) and 0 < share <= 1
        require(valid, f"{_SHARE} is {share}; it must be above 0 and at most 1")
        cluster, own, num_frames = config.cluster, config.data_plane, config.cluster.num_frames
        if own.device == "cuda":
            memory = float(share) * _smallest_gpu()
            num_frames = frames_that_fit(checkpoint, cluster, own, config.scheduler, memory)
        left = {"cluster.num_frames": num_frames} | left
        config = load_config(path, left)
    if longest:
        model, cluster = ModelConfig.from_folder(checkpoint), config.cluster
        held = cluster.num_holders() * cluster.num_frames * PAGE_SIZE
        left["cluster.max_model_len"] = min(model.max_len, held)
        config = load_config(path, left)
    return config, left


def _smallest_gpu() -> int:
    """Bytes of the smallest GPU here. Raises ValueError without one."""
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        return min(int(line) for line in said.split("\n") if line.strip()) * (1 << 20)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise ValueError(
            f"{_SHARE} needs the GPU's memory, and nvidia-smi did not say it ({error}): give "
            "--num-frames"
        ) from error
