"""YAML files that users write; each mistake is a sentence that names its line."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from nanocp.files.inputs import readable


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice, where YAML would silently drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, what: str) -> Any:
    """The file's content. Raises ValueError, naming `what` it is, for a file that is no YAML."""
    unread = f"the {what} {path} cannot be read: "
    try:
        return yaml.load(readable(path).read_text(encoding="utf-8"), _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{unread}{where}{error.problem}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{unread}{error}") from error
