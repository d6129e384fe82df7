"""YAML files that users write; each mistake is a sentence that names its line."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter

from nanocp.files.inputs import readable

File = TypeVar("File")


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


def validated(kind: type[File], tree: Any) -> File:
    """The tree as a value of this class. Raises pydantic.ValidationError."""
    # Strict JSON: an array may become a tuple, but true is no integer and "2" is none either.
    return TypeAdapter(kind).validate_json(json.dumps(tree, default=str), strict=True)


def sentence(detail: Mapping[str, Any], name: str, shown: str) -> str:
    """One of pydantic's error details. name: that of the key; shown: the value in its place."""
    if detail["type"] == "value_error":  # raised by a section, which names the key
        return f"{name}: {detail['ctx']['error']}" if name else str(detail["ctx"]["error"])
    if detail["type"] == "missing":
        return f"{name} is missing"
    wanted = detail["msg"].replace("Input should be", "it must be")
    if detail["type"] == "dataclass_type":
        wanted = "it must be a section of keys"
    return f"{name or 'the file'} is {shown}; {wanted}"


def given(value: object) -> str:
    """A value as JSON, cut where it is long."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
