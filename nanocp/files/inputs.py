"""Input files that may be pipes, which can be read only once."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

_copies: dict[tuple[Path, int, int], Any] = {}
"""Copies of pipes by path, device and inode, deleted at process exit."""


def readable(path: Path) -> Path:
    """The path; for a pipe or a device that of a copy, which is made at the first call.

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
