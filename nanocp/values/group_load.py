"""The load of one cluster, for routers in front of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanocp.values.plan import PAGE_SIZE, InstanceLoad


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """Load of instances that decode together, and their free room."""

    kv_tokens_used: int
    kv_tokens_free: int
    rows_used: int
    rows_free: int
    load_tokens: float
    """Mean KV tokens of an instance, with each row's dispatch cost in tokens; a router takes the
    least."""

    @classmethod
    def of(cls, loads: Sequence[InstanceLoad], max_rows: int, row_tokens: int) -> GroupLoad:
        """Sum the loads of serving instances. row_tokens: a row's cost, in KV tokens."""
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
        """Tokens of the longest prompt whose KV fits now, over any number of instances."""
        return min(max_model_len, self.kv_tokens_free) if self.rows_free else 0
