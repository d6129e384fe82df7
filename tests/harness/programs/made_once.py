"""What several workers of a test run need, and one of them makes."""

from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(
    factory: pytest.TempPathFactory, worker_id: str, name: str, make: Callable[[Path], object]
) -> Path:
    """The file or folder of this name, which `make` makes for the whole run.

    factory, worker_id: the fixtures tmp_path_factory and worker_id.
    """
    base = factory.getbasetemp()
    path = (base if worker_id == "master" else base.parent) / name
    with FileLock(f"{path}.lock"):
        if not path.exists():
            make(path)
    return path
