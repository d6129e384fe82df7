"""The files of simulated clusters and pipelines: YAML, by name if they ship.

Enters: a folder of files, a path. Leaves: names, validated values. Does not know: what a file says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter

File = TypeVar("File")


def names_in(folder: Path) -> list[str]:
    """Names of the files that ship in the folder, ascending."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def read_tree(path: Path) -> Any:
    """What the file says. Raises ValueError if it cannot be read."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"the cluster file {path} cannot be read: {error}") from error


def validated(kind: type[File], tree: Any) -> File:
    """The tree as a value of this class. Raises pydantic.ValidationError."""
    return TypeAdapter(kind).validate_json(json.dumps(tree, default=str), strict=True)
