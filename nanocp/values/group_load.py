"""The load of one cluster, as what stands in front of several reads it.

Enters: loads of instances. Leaves: a few numbers. Does not know: requests, who asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanocp.values.plan import PAGE_SIZE, InstanceLoad


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """What instances that decode together hold, and what they have room for."""

    kv_tokens_used: int
    kv_tokens_free: int
    rows_used: int
    rows_free: int
    load_tokens: float
    """Mean of an instance's KV tokens and rows, a row counted as so many tokens as its dispatch
    costs. The group where it is least is the one that a new request slows least."""

    @classmethod
    def of(cls, loads: Sequence[InstanceLoad], max_rows: int, row_tokens: int) -> GroupLoad:
        """Sum the loads of instances that serve. row_tokens: what a row costs, in KV tokens."""
        serving = [load for load in loads if load.num_frames]
        kv_tokens = sum(load.kv_tokens for load in serving)
        num_rows = sum(load.num_rows for load in serving)
        return cls(
            kv_tokens,
            PAGE_SIZE * sum(load.frames_free for load in serving),
            num_rows,
            max(0, len(serving) * max_rows - num_rows),
            (kv_tokens + row_tokens * num_rows) / max(1, len(serving)),
        )

    def longest_prompt(self, max_model_len: int) -> int:
        """Tokens of the longest prompt whose KV fits now, over as many instances as it needs."""
        return min(max_model_len, self.kv_tokens_free) if self.rows_free else 0
