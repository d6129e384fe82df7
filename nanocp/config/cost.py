"""Costs and time targets for the scheduler, which imports this: standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanocp.config.choices import Natural, check_fields, require


@dataclass(frozen=True, slots=True)
class CostConfig:
    """Costs for policy cost_aware, in KV tokens that attention reads in the same time.

    The defaults are measured ones of DeepSeek-V3 on 32 H200; a configuration for CPUs has
    CPU_COSTS.
    """

    __pydantic_config__ = {"extra": "forbid"}

    exchange_tokens: Natural = 96_704
    """First link of an instance: both routes and the merge."""
    exchange_tokens_between_nodes: Natural = 23_181
    """Additional cost of the first link to another node."""
    link_tokens: Natural = 352
    """Cost of each link within a node."""
    link_tokens_between_nodes: Natural = 1624
    """Cost of each link to another node."""
    dispatch_tokens_per_row: Natural = 5999
    """Cost of a row's dispatch and combine."""
    ingest_ns_per_token: Natural = 1405
    """Nanoseconds for an instance to receive a token's KV from prefill; scheduler.ttft_targets need
    it."""

    def __post_init__(self) -> None:
        check_fields(self)


CPU_COSTS = CostConfig(
    exchange_tokens=4500,
    link_tokens=1000,
    dispatch_tokens_per_row=1200,
    ingest_ns_per_token=6000,
)
"""Costs of two instances on a 2-core VM with 162M parameters
(docs/decisions/0053-costs-of-the-device.md)."""

GPU_DEGREES: dict[str, Any] = {"cp_degree_buckets": ((113_664, 1),), "cp_degree_max": 8}
"""CP degrees of DeepSeek-V3 on 32 H200, by the constants that the defaults of CostConfig are of."""


def check_ttft_targets(targets: tuple[tuple[int, int], ...]) -> None:
    """Raises ValueError unless these are (priority, ms) pairs of different classes, ms from 1."""
    priorities = [priority for priority, _ in targets]
    require(
        len(set(priorities)) == len(priorities) and all(ms >= 1 for _, ms in targets),
        f"ttft_targets is {targets}; it must be (priority, ms) pairs, one for a priority, with ms "
        "from 1",
    )
