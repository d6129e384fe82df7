"""FlashMLA's dense decode kernel as an attention backend.

Public signatures: tests/harness/gpu_stand_ins/published_packages.py (two packages have the module
flash_mla). Unlike ours: a row without KV gives lse +inf; the lse is [A, H, 1]; the first call with
an empty FlashMLASchedMeta makes the schedule on the device, so replays make it from new lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

from torch import Tensor

from data_plane.attention.paged import Attention


@dataclass(frozen=True, slots=True)
class FlashMlaPlan:
    """The page table of one step, and FlashMLA's schedule for it."""

    frame_AP: Tensor
    length_A: Tensor
    is_empty_A1: Tensor
    """Lengths decide which rows are empty: an overflow of the lse must not pass for one."""
    schedule: Any


class FlashMla(Attention):
    """The attention backend `flashmla`."""

    def __init__(self, rank: int, package: Any = None) -> None:
        """rank: kv_lora_rank. package: flash_mla; a test passes a stand-in."""
        self._package, self._rank = package or import_module("flash_mla"), rank
        decode = self._package.flash_mla_with_kvcache
        # The wheel's own kernels are not for Hopper; it has FlashMLA's by this word.
        is_wheel = "use_legacy" in signature(decode).parameters
        self._decode = partial(decode, use_legacy=True) if is_wheel else decode

    def plan(self, frame_AP: Tensor, length_A: Tensor, num_queries: int = 1) -> FlashMlaPlan:
        schedule, _ = self._package.get_mla_metadata()
        return FlashMlaPlan(frame_AP, length_A, length_A[:, None] == 0, schedule)

    def run(
        self, q_AHD: Tensor, pool_FSD: Tensor, plan: FlashMlaPlan, scale: float,
        needs_lse: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse = self._decode(
            q_AHD[:, None],
            pool_FSD[:, :, None],
            plan.frame_AP,
            plan.length_A,
            self._rank,
            plan.schedule,
            softmax_scale=scale,
            causal=False,
        )
        if needs_lse:
            lse[..., 0].masked_fill_(plan.is_empty_A1, float("-inf"))
        return out[:, 0], lse[..., 0]
