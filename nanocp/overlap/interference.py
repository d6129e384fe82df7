"""Speed P of an operation with a share R of the GPU (NanoFlow, 4.1.1).

R is defined by GEMM: with share R a GEMM has speed R; concurrent shares add up to 1.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

Points = tuple[tuple[float, float], ...]
GRID = 20
"""Parts of a GPU."""

COMPUTE, MEMORY, NETWORK = RESOURCES = ("compute", "memory", "network")


@dataclass(frozen=True)
class Interference:
    """Speeds by the part of the GPU."""

    __pydantic_config__ = {"extra": "forbid"}

    memory: Points
    network: Points
    source: str = "measured"

    def __post_init__(self) -> None:
        for name, points in ((MEMORY, self.memory), (NETWORK, self.network)):
            is_sorted = all(a < b and p <= q for (a, p), (b, q) in pairwise(points))
            if len(points) < 2 or not is_sorted or points[0] != (0, 0) or points[-1][0] != 1:
                raise ValueError(
                    f"the interference of {name} is {points}; it must be pairs (R, P) that grow, "
                    "from (0, 0) to R = 1"
                )

    def speed(self, resource: str, share: float) -> float:
        """P: the speed of an operation bound by `resource` that has `share` of the GPU, 0 to 1."""
        if resource == COMPUTE:
            return share
        points = self.memory if resource == MEMORY else self.network
        index = min(bisect_right(points, (share, 2.0)), len(points) - 1)
        (low, p_low), (high, p_high) = points[index - 1], points[index]
        return p_low + (p_high - p_low) * (share - low) / (high - low)

    def two_lanes_us(self, compute_us: float, network_us: float, both_us: float) -> float:
        """Shortest time of two lanes that compute and send so long each.

        both_us: both lanes' network, with one share of the GPU while a lane computes.
        """
        beside = [(2 * compute_us / (1 - part / GRID), part / GRID) for part in range(GRID)]
        together_us = min(
            us + max(0.0, both_us - us * self.speed(NETWORK, share)) for us, share in beside
        )
        return max(together_us, compute_us + network_us)
