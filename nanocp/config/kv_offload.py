"""Offload of pages without a frame. Standard library only: the scheduler imports it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from nanocp.config.choices import require


@dataclass(frozen=True, slots=True)
class KvOffloadConfig:
    """Offload of full pages beside the frames, so that conversations find their history."""

    __pydantic_config__ = {"extra": "forbid"}

    host_gib: float = 0.0
    """GiB of memory of each instance for pages outside its frames. 0: pages are in frames only."""
    file_gib: float = 0.0
    """GiB of a file of each instance for pages that leave its memory. 0: they are dropped instead.
    """
    file_dir: str = ""
    """Directory of these files, which have no name: nothing is left when a process ends."""

    def __post_init__(self) -> None:
        for name in ("host_gib", "file_gib"):
            value = getattr(self, name)
            right = "a number of GiB, at least 0"
            require(0 <= value < inf, f"{name} is {value}; it must be {right}")
        require(
            self.host_gib > 0 or self.file_gib == 0,
            f"file_gib is {self.file_gib} and host_gib 0; pages reach the file through memory: "
            "set host_gib too",
        )
        require(
            (self.file_gib > 0) == bool(self.file_dir),
            f"file_gib is {self.file_gib} and file_dir {self.file_dir!r}; set both or neither",
        )

    def num_pages(self, page_bytes: int) -> tuple[int, int]:
        """(pages in an instance's memory, pages in its file)."""
        gib = 1 << 30
        return int(self.host_gib * gib // page_bytes), int(self.file_gib * gib // page_bytes)
