"""The process that started this one, which may be gone before this one asks.

Enters: a variable that whoever starts processes sets. Leaves: that process's number. Does not know:
what either process does.
"""

import os

PARENT_VARIABLE = "NANOCP_PARENT"
"""The variable with the number of the process that starts another."""
GONE = "the process that started this one is gone"


def starter() -> int:
    """The number of the process that started this one; of the parent if nobody said.

    os.getppid() is another number once that process has ended.
    """
    return int(os.environ.get(PARENT_VARIABLE, os.getppid()))
