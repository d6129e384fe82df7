"""The kernels of a step on a GPU, by part of the step.

Enters: what replays a step. Leaves: us and launches of each part, and of each kernel. Does not
know: what the step computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kit.bench import Result

PARTS = {
    "attention": ("decode_kernel", "decode_fp8", "flash", "mla", "splitkv", "combine", "merge_ker"),
    "experts": ("grouped_gemm", "m_grouped", "sm90_fp8_gemm", "deep_gemm"),
    "norms and latent rows": ("norm_kernel", "latent_kernel", "rotate_kernel", "append_kernel"),
    "gate": ("scores_kernel", "choose_kernel"),
    "rows of experts": ("pairs_kernel", "lay_out", "sum_", "return_kernel", "gated_kernel"),
    "rows in FP8": ("quantise_kernel",),
    "exchange": ("put_kernel", "wait_kernel", "take_kernel", "merge_returned", "target_kernel"),
    "dense products": ("nvjet", "splitK", "gemm", "cutlass", "gemv"),
}
"""Part of a step -> words in the names of its kernels; the first that fits has a kernel."""


def kernels_by_part(replay: Callable[[], Any], layers: int) -> Result:
    """Profile replays: us and launches of a layer by part, and us of a step by kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as run:
        for _ in range(2):
            replay()
        torch.cuda.synchronize()
    parts: dict[str, list[float]] = {}
    kernels: dict[str, list[float]] = {}
    for event in run.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        us, name = event.time_range.elapsed_us() / 2, event.name[:80]
        fitting = (part for part, words in PARTS.items() if any(word in name for word in words))
        for found, key in ((parts, next(fitting, "torch")), (kernels, name)):
            total = found.setdefault(key, [0.0, 0.0])
            total[0], total[1] = total[0] + us, total[1] + 0.5
    return {
        "us_a_layer": {part: round(us / layers, 2) for part, (us, _) in parts.items()},
        "launches_a_layer": {part: round(num / layers, 2) for part, (_, num) in parts.items()},
        "nodes": sum(num for _, num in parts.values()),
        "by_kernel": {name: [round(us, 1), num] for name, (us, num) in kernels.items()},
    }
