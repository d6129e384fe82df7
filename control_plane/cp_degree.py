"""The CP degree of a length: how many instances should share a request's KV (4.2.2).

Enters: a length in tokens and the buckets of an offline profile. Leaves: a degree. Does not know: the cluster's load.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def cp_degree(length: int, buckets: Sequence[tuple[int, int]], degree_max: int) -> int:
    """Degree for a request of `length` tokens; buckets are (length, degree), ascending, for lengths below `length`."""
    index = bisect_right(buckets, length, key=lambda bucket: bucket[0])
    return buckets[index][1] if index < len(buckets) else degree_max
