"""Input files that may be pipes, which can be read only once.

Enters: a path that a user gave. Leaves: a path that can be opened as often as needed. Does not
know: what is read.
"""

from __future__ import annotations

import shutil
import stat
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

_copies: dict[tuple[Path, int, int], Any] = {}
"""Copies of pipes by path, device and inode; each goes when the process ends."""


def readable(path: Path) -> Path:
    """The path; for a pipe or a device that of a copy, which is made when it is first asked for.

    Raises OSError if the copy cannot be written.
    """
    try:
        found = path.stat()
    except OSError:
        return path  # whoever opens it says why it cannot be read
    if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode):
        return path
    key = path, found.st_dev, found.st_ino
    if key not in _copies:
        copy = NamedTemporaryFile(prefix="nanocp-input-")  # noqa: SIM115 (it is kept open)
        with path.open("rb") as file:
            shutil.copyfileobj(file, copy)
        copy.flush()
        _copies[key] = copy
    return Path(_copies[key].name)
