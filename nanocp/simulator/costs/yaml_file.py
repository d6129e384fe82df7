"""YAML files of simulated clusters and pipelines, by path or by shipped name."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import ValidationError

from nanocp.config.choices import none_of
from nanocp.files.yaml_file import given, read_yaml, sentence, validated

File = TypeVar("File")


def names_in(folder: Path) -> list[str]:
    """Names of the files that ship in the folder, ascending."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def load_file(path: Path, kind: type[File]) -> tuple[dict[str, Any], File]:
    """The file's tree, and it as a value of this class. Raises ValueError with each mistake."""
    tree = read_yaml(path, "cluster file")
    try:
        return tree, validated(kind, tree)
    except ValidationError as error:
        details = map(dict, error.errors())
        raise ValueError(
            "\n".join(f"{path}: {_sentence(each, kind)}" for each in details)
        ) from error


def _sentence(detail: dict[str, Any], kind: type) -> str:
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] not in ("unexpected_keyword_argument", "extra_forbidden"):
        return sentence(detail, where, given(detail["input"]))
    nearest = none_of(str(detail["loc"][-1]), _known_keys(kind, detail["loc"][:-1]))
    return f"{where} is no key of a cluster file; {nearest}"


def _known_keys(kind: Any, loc: tuple[Any, ...]) -> list[str]:
    for part in loc:
        kind = get_type_hints(kind)[part] if is_dataclass(kind) else get_args(kind)[1]
        if type(None) in get_args(kind):
            kind = get_args(kind)[0]
    return [item.name for item in fields(kind)]
