"""The CP degree of a length: the number of instances that share a request's KV (4.2.2)."""

from __future__ import annotations

from collections.abc import Sequence


def cp_degree(length: int, buckets: Sequence[tuple[int, int]], degree_max: int) -> int:
    """Return the degree for a request of `length` tokens.

    buckets: (length, degree), ascending, for shorter requests than that; degree_max: for the
    others.
    """
    for below, degree in buckets:  # few, and most requests are in the first
        if length < below:
            return degree
    return degree_max
