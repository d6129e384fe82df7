"""When a process that ended is started again, and when it ended too often."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf


@dataclass(slots=True)
class Restarts:
    """The ends of one process and its successors."""

    pauses_s: tuple[float, ...]
    """Pause before each further process; the last one repeats."""
    max_ends: int | None = None
    """So many ends within `within_s` are the last."""
    within_s: float = inf
    _ends_s: deque[float] = field(default_factory=deque)

    def pause_s(self, now_s: float = 0.0) -> float | None:
        """Record an end; return the pause before the next start, None if there is none."""
        ends_s = self._ends_s
        ends_s.append(now_s)
        if len(ends_s) > max(self.max_ends or 0, len(self.pauses_s)):
            ends_s.popleft()
        while now_s - ends_s[0] >= self.within_s:
            ends_s.popleft()
        if len(ends_s) == self.max_ends:
            return None
        return self.pauses_s[min(len(ends_s), len(self.pauses_s)) - 1]

    def clear(self) -> None:
        """Forget all ends."""
        self._ends_s.clear()
