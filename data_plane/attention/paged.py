"""The interface of paged attention on an instance, for every backend.

Legend: A attention rows, H heads, D width of a query, O width of a partial, W width of KV, F
frames, S = 64, P pages.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Attention(Protocol):
    """Paged attention over the frames of one instance: plan once a step, run in every layer."""

    def plan(self, frame_AP: Tensor, length_A: Tensor, num_queries: int = 1) -> Any:
        """Prepare a step's page table for `run`; it holds until frames or lengths change.

        frame_AP: [A, P] int32, by page. length_A: [A] int32, local tokens. num_queries: adjacent
        rows with the same frames, which a backend may read once.
        """

    def run(
        self, q_AHD: Tensor, pool_FSW: Tensor, plan: Any, scale: float, needs_lse: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Attend to a layer's frames: (partial_o [A, H, O] in q's dtype, lse [A, H] fp32).

        pool_FSW: uint8 [F, 64, bytes of a token] in FP8. lse is a natural log; a row of no tokens
        gives (0, -inf), or any lse without needs_lse.
        """
