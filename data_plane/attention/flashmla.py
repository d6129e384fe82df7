"""FlashMLA's dense decode kernel behind the attention interface.

Enters: absorbed queries, a layer's frames, a page table and lengths on the device. Leaves:
(partial_o, lse) by our conventions. Does not know: how it computes.

Its public signature is kept in tests/harness/published_packages.py with its source. What differs
from ours: a row without KV gives lse +inf, the lse is [A, H, 1], and its schedule is made on the
device inside the first call with an empty FlashMLASchedMeta. So a plan holds a fresh one: if the
plan is made inside a graph's capture, the schedule is made again from the new lengths at every
replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class FlashMlaPlan:
    """One step's page table and FlashMLA's schedule of it."""

    frame_AP: Tensor
    length_A: Tensor
    schedule: Any


class FlashMla:
    """The attention backend `flashmla`; see backend.Attention."""

    def __init__(self, rank: int, package: Any = None) -> None:
        """package: flash_mla, or what stands for it."""
        self._package, self._rank = package or import_module("flash_mla"), rank

    def plan(self, frame_AP: Tensor, length_A: Tensor) -> FlashMlaPlan:
        """See backend.Attention.plan."""
        schedule, _ = self._package.get_mla_metadata()
        return FlashMlaPlan(frame_AP, length_A, schedule)

    def run(
        self, q_AHD: Tensor, pool_FSD: Tensor, plan: FlashMlaPlan, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See backend.Attention.run."""
        out, lse = self._package.flash_mla_with_kvcache(
            q_AHD[:, None],
            pool_FSD[:, :, None],
            plan.frame_AP,
            plan.length_A,
            self._rank,
            plan.schedule,
            softmax_scale=scale,
            causal=False,
        )
        # What is read as empty is the length, not the lse: an overflow must not pass for an empty
        # row.
        return out[:, 0], lse[..., 0].masked_fill(plan.length_A[:, None] == 0, float("-inf"))
