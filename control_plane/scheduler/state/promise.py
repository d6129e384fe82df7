"""The number of output tokens that frames are promised for."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from nanocp.config.scheduler import SchedulerConfig

_NUM_LATEST = 256
"""Latest ended requests that a percentile is taken of."""
_NUM_FIRST = 32
"""Ended requests before which all of max_tokens is promised."""


class Promise:
    """Applies `SchedulerConfig.growth_promise`."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._kind, _, argument = config.growth_promise.partition(":")
        self._argument = int(argument or 0)
        self._latest: deque[int] = deque()
        self._ascending: list[int] = []

    def ended(self, num_tokens: int) -> None:
        """Record that a request ended by itself, after num_tokens tokens."""
        if self._kind != "percentile":
            return
        if len(self._latest) == _NUM_LATEST:
            del self._ascending[bisect_left(self._ascending, self._latest.popleft())]
        self._latest.append(num_tokens)
        insort(self._ascending, num_tokens)

    def num_tokens(self, most: int) -> int:
        """Return the tokens to promise to a request that may generate `most` more."""
        if self._kind == "tokens":
            return min(self._argument, most)
        if self._kind == "percentile" and len(self._ascending) >= _NUM_FIRST:
            rank = -(-self._argument * len(self._ascending) // 100)  # the nearest rank
            return min(self._ascending[rank - 1], most)
        return most
