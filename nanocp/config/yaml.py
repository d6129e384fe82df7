"""The configuration as commented YAML, which `--config` reads again."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from nanocp.config.choices import is_hidden, marks_of
from nanocp.config.field_docs import field_docs
from nanocp.config.whole import SECRETS, Config

_COLUMNS = 100
_UNITS = {
    "ms": "milliseconds",
    "us": "microseconds",
    "gb": "GB",
    "gib": "GiB",
    "tokens": "tokens",
    "pages": "pages",
    "windows": "windows",
    "bytes": "bytes",
}


def config_yaml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """The text. `origins`: key -> source of its value, if not its default.

    Without origins each key has its sentence instead.
    """
    return "\n".join(_section(config, (), origins)).strip() + "\n"


def changed(section: Any) -> dict[str, Any]:
    """The tree of keys that users may set and that differ from the default."""
    tree: dict[str, Any] = {}
    default, marks = type(section)(), marks_of(type(section))
    for item in fields(section):
        if is_hidden(marks[item.name]):
            continue
        ours, theirs = getattr(section, item.name), getattr(default, item.name)
        if is_dataclass(ours):
            ours = changed(ours)
            theirs = {}
        if ours != theirs:
            tree[item.name] = ours
    return tree


def unit_of(key: str) -> str:
    """The unit at the end of the key's name; empty if none."""
    return _UNITS.get(key.rpartition("_")[2], "")


def _section(
    section: Any, path: tuple[str, ...], origins: Mapping[str, str] | None
) -> Iterator[str]:
    indent, docs = "  " * len(path), field_docs(type(section))
    default, marks = type(section)(), marks_of(type(section))
    for field in fields(section):
        if is_hidden(marks[field.name]):
            continue
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield ""
            if origins is None:
                yield from _comment((type(value).__doc__ or "").partition("\n")[0], indent)
            yield f"{indent}{field.name}:"
            yield from _section(value, (*path, field.name), origins)
            continue
        shown = f"{indent}{field.name}: {_shown(field.name, value)}"
        if origins is None:
            unit = unit_of(field.name)
            yield from _comment(docs.get(field.name, "") + f" ({unit})" * bool(unit), indent)
            yield shown
        else:
            is_default = value == getattr(default, field.name)
            given = "default" if is_default else "not the default"
            origin = origins.get(".".join((*path, field.name)), given)
            yield f"{shown}  # {origin}"


def _comment(text: str, indent: str) -> Iterator[str]:
    width = _COLUMNS - len(indent) - 2
    for line in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False):
        yield f"{indent}# {line}"


def _shown(name: str, value: Any) -> str:
    if name in SECRETS and value:
        hidden = "(not shown)"
        return json.dumps(hidden if isinstance(value, str) else [hidden] * len(value))
    return json.dumps(value)
