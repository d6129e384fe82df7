"""The frames of one instance's recurrent states; they lie behind its frames of KV."""

from __future__ import annotations

from nanocp.config.cluster import ClusterConfig
from nanocp.values.plan import CARRY_PAGE, TargetRun


class CarryFrames:
    """One frame for each possible row, and one more for a state that leaves as another comes."""

    def __init__(self, cluster: ClusterConfig) -> None:
        """Make all frames free; there are none if the model has no recurrent states."""
        self._num_pages = cluster.carry_pages
        self.number = cluster.bounds.max_rows + 1 if cluster.carry_pages else 0
        self.num_taken = 0
        """States of requests that have not ended."""
        self._free = [
            cluster.num_frames + index * cluster.carry_pages for index in range(self.number)
        ][::-1]
        """First frame of each free state; the next to be taken is last."""

    @property
    def has_free(self) -> bool:
        """Return whether another state fits."""
        return bool(self._free)

    def take(self, instance: int, reserved: TargetRun | None = None) -> TargetRun:
        """Commit a free frame of the instance, or the reserved one."""
        self.num_taken += 1
        return reserved or TargetRun(CARRY_PAGE, self._num_pages, instance, self._free.pop())

    def reserve(self, run: TargetRun) -> None:
        """Withhold a free frame."""
        self._free.remove(run.frame)

    def quarantine(self) -> None:
        """Record that a frame's owner left; something may still write to it."""
        self.num_taken -= 1

    def free(self, frame: int) -> None:
        """Free a frame that nothing can write to any more."""
        self._free.append(frame)

    def free_frames(self) -> list[int]:
        """Return every free frame, for invariants and tests."""
        return [frame + page for frame in self._free for page in range(self._num_pages)]
