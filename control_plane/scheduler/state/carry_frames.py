"""The frames of one instance's states, behind its frames of KV: which are free, which are taken.

Enters: states that come and go. Leaves: the pages of a state's frame. Does not know: which request
has a state, KV.
"""

from __future__ import annotations

from nanocp.config.cluster import ClusterConfig
from nanocp.values.plan import CARRY_PAGE, TargetRun


class CarryFrames:
    """One for each row that there may be, and one more: a state may leave while another comes."""

    def __init__(self, cluster: ClusterConfig) -> None:
        """All frames are free; there are none if rows have no states."""
        self._num_pages = cluster.carry_pages
        self.number = cluster.bounds.max_rows + 1 if cluster.carry_pages else 0
        self.num_taken = 0
        """States of requests that have not ended."""
        self._free = [
            cluster.num_frames + index * cluster.carry_pages for index in range(self.number)
        ][::-1]
        """The first frame of each free state, the next one last."""

    @property
    def has_free(self) -> bool:
        """Whether there is one for another state."""
        return bool(self._free)

    def take(self, instance: int, reserved: TargetRun | None = None) -> TargetRun:
        """Commit a frame, a free one or one that was reserved. instance: whose frames they are."""
        self.num_taken += 1
        return reserved or TargetRun(CARRY_PAGE, self._num_pages, instance, self._free.pop())

    def reserve(self, run: TargetRun) -> None:
        """Withhold a free frame."""
        self._free.remove(run.frame)

    def quarantine(self) -> None:
        """The owner of a frame has left; something may still write to it."""
        self.num_taken -= 1

    def free(self, frame: int) -> None:
        """Nothing can write to the frame any more."""
        self._free.append(frame)

    def free_frames(self) -> list[int]:
        """Every page's frame of those that are free. For invariants and tests."""
        return [frame + page for frame in self._free for page in range(self._num_pages)]
