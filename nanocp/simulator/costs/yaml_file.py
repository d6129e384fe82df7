"""YAML files of simulated clusters and pipelines, by path or by shipped name."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import TypeAdapter

from nanocp.config.choices import none_of

File = TypeVar("File")


def names_in(folder: Path) -> list[str]:
    """Names of the files that ship in the folder, ascending."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def validated(kind: type[File], tree: Any) -> File:
    """The tree as a value of this class. Raises pydantic.ValidationError."""
    return TypeAdapter(kind).validate_json(json.dumps(tree, default=str), strict=True)


def sentence(detail: dict[str, Any], kind: type) -> str:
    """One of pydantic's error details as a sentence."""
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        nearest = none_of(str(detail["loc"][-1]), _known_keys(kind, detail["loc"][:-1]))
        return f"{where} is no key of a cluster file; {nearest}"
    if detail["type"] == "value_error":
        message = str(detail["ctx"]["error"])
        return f"{where}: {message}" if where else message
    if detail["type"] == "missing":
        return f"{where} is missing"
    wanted = (
        "a mapping of keys"
        if detail["type"] == "dataclass_type"
        else detail["msg"].removeprefix("Input should be ")
    )
    return f"{where or 'the file'} is {json.dumps(detail['input'])[:80]}; it must be {wanted}"


def _known_keys(kind: Any, loc: tuple[Any, ...]) -> list[str]:
    for part in loc:
        kind = get_type_hints(kind)[part] if is_dataclass(kind) else get_args(kind)[1]
        if type(None) in get_args(kind):
            kind = get_args(kind)[0]
    return [item.name for item in fields(kind)]
