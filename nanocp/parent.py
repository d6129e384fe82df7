"""The process that started this one, which may be gone before this one asks.

Enters: a variable that whoever starts processes sets. Leaves: whether that process lives. Does not
know: what either process does.
"""

from __future__ import annotations

import os

PARENT_VARIABLE = "NANOCP_PARENT"
"""The variable with the number of the process that starts another. By the time that the other one
asks for its parent, it may have the one that takes orphans."""
GONE = "the process that started this one is gone"


class Parent:
    """The process that started this one."""

    def __init__(self) -> None:
        """Without the variable it is the parent of now."""
        self._pid = int(os.environ.get(PARENT_VARIABLE, os.getppid()))

    @property
    def is_gone(self) -> bool:
        """Whether it has ended: nobody waits for this process or starts others beside it."""
        return os.getppid() != self._pid
