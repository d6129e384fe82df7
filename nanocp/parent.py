"""The process that started this one, which may be gone already."""

import os

PARENT_VARIABLE = "NANOCP_PARENT"
"""Names the number of the starting process."""
GONE = "the process that started this one is gone"


def starter() -> int:
    """Number of the process that started this one, by default the parent.

    os.getppid() changes once that process has ended.
    """
    return int(os.environ.get(PARENT_VARIABLE, os.getppid()))
