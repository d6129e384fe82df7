"""The CP degree of a length: how many instances should share a request's KV (4.2.2).

Enters: a length in tokens and the buckets of an offline profile. Leaves: a degree. Does not know:
the cluster's load.
"""

from __future__ import annotations

from collections.abc import Sequence


def cp_degree(length: int, buckets: Sequence[tuple[int, int]], degree_max: int) -> int:
    """Degree for a request of `length` tokens.

    buckets: (length, degree), ascending, for requests shorter than that length; degree_max: for the
    others.
    """
    for below, degree in buckets:  # few, and most requests are in the first
        if length < below:
            return degree
    return degree_max
