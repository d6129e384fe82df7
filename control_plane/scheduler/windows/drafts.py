"""How many drafts each row of a window has.

Enters: windows, whether rows are parked, what bounds count. Leaves: a number for all instances.
Does not know: tokens, which rows advance.
"""

from __future__ import annotations

from hashlib import blake2b

from control_plane.scheduler.state.commitments import Commitments
from nanocp.config.cluster import BoundsConfig
from nanocp.config.scheduler import SchedulerConfig

_PAUSE = 16
"""Windows without drafts after a row was parked: frames for drafts must park no row."""


class Drafts:
    """Chooses the drafts of each window."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.most = config.num_drafts
        self._mode, self._seed = config.drafting, config.chaos_seed
        self._paused_until = 0

    def of_window(self, window: int, is_parked: bool) -> int:
        """Drafts of a row in each step of the window, before its rows are known."""
        if not self.most:
            return 0
        if is_parked:
            self._paused_until = window + _PAUSE
        if window < self._paused_until:
            return 0
        if self._mode == "random":
            text = f"drafts {self._seed} {window}".encode()
            return blake2b(text, digest_size=1).digest()[0] % (self.most + 1)
        return self.most

    def within(self, num_drafts: int, committed: Commitments, bounds: BoundsConfig) -> int:
        """Lower the number to what rows leave room for: bounds count what a step runs."""
        if not num_drafts:
            return 0
        widths = (
            bounds.max_rows // max(1, *committed.rows),
            bounds.max_attention_rows // max(1, *committed.attention_rows),
            bounds.max_partials // max(1, *committed.partials),
            bounds.max_links // max(1, *map(max, committed.links)),
        )
        return min(num_drafts, min(widths) - 1)
