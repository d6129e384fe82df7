"""The choice of the number of drafts for each window."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b

from control_plane.scheduler.state.commitments import Commitments
from nanocp.config.cluster import BoundsConfig
from nanocp.config.scheduler import SchedulerConfig

_PAUSE = 16
"""Windows without drafts after a row was parked: frames for drafts must park no row."""
_LATEST = 64
"""Windows with drafts whose reports give the share that is accepted."""
_PRIOR, _PRIOR_WEIGHT = (0.8, 0.6, 0.5), 16
"""Assumed accepted shares by offset, and their weight in drafts."""
_GAIN = 1.03
"""Drafts must promise this many times the token rate of a step without drafts."""
_TRY_EVERY = 256
"""One window in this many tries drafts even if they do not pay, to see a change."""


class Drafts:
    """Chooses the drafts of each window."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.most = config.num_drafts
        self._mode, self._seed = config.drafting, config.chaos_seed
        self._paused_until = 0
        self._percents: dict[int, dict[int, dict[int, int]]] = {}
        """Rows -> drafts -> KV tokens, ascending -> percent; see SchedulerConfig.draft_table."""
        for rows, tokens, drafts, percent in sorted(config.draft_table):
            self._percents.setdefault(rows, {}).setdefault(drafts, {})[tokens] = percent
        self._latest: deque[dict[int, tuple[int, int]]] = deque([{}])
        """(checked, accepted) drafts by offset, of the latest windows with drafts, in order."""

    def reported(self, drafts: Sequence[tuple[int, int]]) -> None:
        """Record (checked, accepted) drafts of an instance's window, by offset from 1."""
        for offset, counts in enumerate(drafts):
            checked, accepted = self._latest[-1].get(offset, (0, 0))
            self._latest[-1][offset] = checked + counts[0], accepted + counts[1]

    def shares(self) -> list[float]:
        """Return the share of drafts accepted where those before are, by offset from 1."""
        shares = []
        for offset in range(self.most):
            pairs = [window.get(offset, (0, 0)) for window in self._latest]
            checked, accepted = map(sum, zip(*pairs, strict=True))
            prior = _PRIOR[min(offset, len(_PRIOR) - 1)]
            shares.append((accepted + prior * _PRIOR_WEIGHT) / (checked + _PRIOR_WEIGHT))
        return shares

    def of_window(self, window: int, is_parked: bool, num_rows: int, kv_tokens: int) -> int:
        """Return the drafts of a row in each step of the window, before its rows are known.

        num_rows, kv_tokens: of the fullest instance.
        """
        if not self.most:
            return 0
        if is_parked:
            self._paused_until = window + _PAUSE
        if window < self._paused_until:
            return 0
        if self._mode == "random":
            text = f"drafts {self._seed} {window}".encode()
            return blake2b(text, digest_size=1).digest()[0] % (self.most + 1)
        if self._mode == "always":
            return self.most
        if self._latest[-1]:
            self._latest.append({})
            if len(self._latest) > _LATEST:
                self._latest.popleft()
        return self._best(num_rows, kv_tokens) or int(window % _TRY_EVERY == 0)

    def _best(self, num_rows: int, kv_tokens: int) -> int:
        larger = (rows for rows in self._percents if rows >= num_rows)
        of_rows = self._percents[min(larger, default=max(self._percents))]
        most_tokens = max(map(max, of_rows.values()))
        best, best_speed, num_tokens, reached = 0, _GAIN, 1.0, 1.0
        for num_drafts, share in enumerate(self.shares(), start=1):
            reached *= share
            num_tokens += reached
            by_tokens = of_rows.get(num_drafts)
            if by_tokens is None or kv_tokens > max(by_tokens) < most_tokens:
                continue  # it was not measured with so many
            speed = 100 * num_tokens / _between(by_tokens, kv_tokens)
            if speed > best_speed:
                best, best_speed = num_drafts, speed
        return best

    def within(self, num_drafts: int, committed: Commitments, bounds: BoundsConfig) -> int:
        """Lower the number to the room that rows leave under the bounds of a step."""
        if not num_drafts:
            return 0
        widths = (
            bounds.max_rows // max(1, *committed.rows),
            bounds.max_attention_rows // max(1, *committed.attention_rows),
            bounds.max_partials // max(1, *committed.partials),
            bounds.max_links // max(1, *map(max, committed.links)),
        )
        return min(num_drafts, min(widths) - 1)


def _between(by_size: dict[int, int], size: int) -> float:
    sizes = [*by_size]
    index = bisect_left(sizes, size)
    if index in (0, len(sizes)):
        return by_size[sizes[max(index - 1, 0)]]
    low, high = sizes[index - 1 : index + 1]
    part = (size - low) / (high - low)
    return by_size[low] + part * (by_size[high] - by_size[low])
