"""Loads a Config: file < environment < flags.

Enters: a YAML file of sections and keys, variables NANOCP_SECTION__KEY, and flags. Leaves: a
validated Config, or one ValueError that says which key is wrong, where it came from, what was given
and what would be right. Does not know: any key by name; the dataclasses are the only list of them.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from nanocp.config.cost import CPU_COSTS
from nanocp.config.data_plane import default_dtype
from nanocp.config.whole import FOLLOWS, SECRETS, Config
from nanocp.files.inputs import readable

ENVIRONMENT_PREFIX = "NANOCP_"
"""NANOCP_CLUSTER__NUM_INSTANCES=2 sets cluster.num_instances. Values are JSON, anything else is
text."""

UNRELIABLE = "Unreliable: "
"""How a comment begins with which `nanocp profile` says that what it measured does not fit."""

_Tree = dict[str, Any]


@dataclass(frozen=True)
class _Source:
    """Values from one place, as a tree of sections, and the user's names for place and keys."""

    name: str
    tree: _Tree
    key_of: Mapping[tuple[str, ...], str]
    """The user's own spelling of a key, where it differs from section.key."""


def load_config(
    path: Path | None, overrides: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> Config:
    """The configuration from the file, over it the environment, over it the flags.

    overrides: dotted keys such as "cluster.num_instances"; None means that the flag was not given.
    Raises ValueError for an unknown key (naming its section and the nearest known key), a wrong
    type, a value out of range, a file that is missing and YAML that cannot be read (naming the
    line).
    """
    sources = _sources(path, overrides, environment)
    merged: _Tree = {}
    for source in sources:
        _check_keys(source, source.tree, Config, ())
        merged = _merge(merged, source.tree)
    device = merged["data_plane"]["device"] if _sets(merged, ("data_plane", "device")) else "cpu"
    if device == "cpu":
        merged = _merge({"scheduler": {"costs": asdict(CPU_COSTS)}}, merged)
    merged = _merge({"data_plane": {"dtype": default_dtype(device)}}, merged)
    for key, other in FOLLOWS.items():
        value = _at(merged, other)
        if isinstance(value, int) and not _sets(merged, key):
            least = _at(asdict(Config()), key)
            merged = _merge(merged, _nested(key, max(least, value + value // 2)))
    try:
        # Strict JSON: an array may become a tuple, but true is no integer and "2" is none either.
        return TypeAdapter(Config).validate_json(json.dumps(merged, default=str), strict=True)
    except ValidationError as error:
        raise ValueError(
            "\n".join(_sentence(dict(detail), sources) for detail in error.errors())
        ) from error


def origins(
    path: Path | None, overrides: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Where `load_config` takes each value from, by dotted key; keys of their default are absent.

    Raises ValueError as it does.
    """
    found = {}
    for source in _sources(path, overrides, environment):
        for keys in _all_keys(Config, ()):
            if _sets(source.tree, keys):
                spelled = source.key_of.get(keys)
                found[".".join(keys)] = spelled or source.name
    for key, other in FOLLOWS.items():
        if ".".join(other) in found:
            found.setdefault(".".join(key), f"follows {other[-1]}")
    return found


def doubts_in(path: Path | None) -> list[str]:
    """What `nanocp profile` has noted in a file that it wrote, which `load_config` has read."""
    lines = [] if path is None else readable(path).read_text(encoding="utf-8").splitlines()
    return [each.removeprefix("# ") for each in lines if each.startswith(f"# {UNRELIABLE}")]


# --- Sources


def _sources(
    path: Path | None, overrides: Mapping[str, Any], environment: Mapping[str, str]
) -> list[_Source]:
    """The sources in order: a later one goes before an earlier one."""
    sources = [_from_environment(environment), _from_flags(overrides)]
    if path is not None:
        sources.insert(0, _Source(str(path), _read_yaml(path), {}))
    return sources


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


def _read_yaml(path: Path) -> _Tree:
    try:
        text = readable(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"the configuration file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the configuration file {path} cannot be read: {error}") from error
    try:
        tree = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{path}{where}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ValueError(
            f"{path}: the file holds {_given(tree)}; it must hold sections such as `cluster:`"
        )
    return tree


def _from_environment(environment: Mapping[str, str]) -> _Source:
    tree: _Tree = {}
    key_of = {}
    for variable, text in sorted(environment.items()):
        keys = tuple(variable.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"))
        if not variable.startswith(ENVIRONMENT_PREFIX) or len(keys) < 2:
            continue
        key_of[keys] = variable
        try:
            # A key of digits only is no number.
            value = text if keys[-1] == "api_key" else json.loads(text)
        except json.JSONDecodeError:
            value = text
        tree = _merge(tree, _nested(keys, value))
    return _Source("the environment", tree, key_of)


def _from_flags(overrides: Mapping[str, Any]) -> _Source:
    tree: _Tree = {}
    for key, value in overrides.items():
        if value is not None:
            tree = _merge(tree, _nested(tuple(key.split(".")), value))
    return _Source("the command line", tree, {})


def _nested(keys: tuple[str, ...], value: Any) -> _Tree:
    for key in reversed(keys):
        value = {key: value}
    return value  # type: ignore[no-any-return]


def _merge(below: _Tree, above: _Tree) -> _Tree:
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged


# --- Errors


def _check_keys(source: _Source, tree: _Tree, section: type, path: tuple[str, ...]) -> None:
    types = get_type_hints(section)
    known = [field.name for field in fields(section)]
    for key in list(tree):
        if key not in known:
            raise ValueError(_unknown_key(source, path, key, known))
        if not is_dataclass(types[key]):
            continue
        if tree[key] is None:  # A section whose every line is commented out.
            tree[key] = {}
        if isinstance(tree[key], dict):
            _check_keys(source, tree[key], types[key], (*path, key))


def _unknown_key(source: _Source, path: tuple[str, ...], key: object, known: list[str]) -> str:
    kind, where = ("key", f"section {'.'.join(path)}") if path else ("section", "the configuration")
    spelled = source.key_of.get((*path, str(key)))
    sentence = f"{source.name}: unknown {kind} {str(key)!r} in {where}" + (
        f" ({spelled})" if spelled else ""
    )
    if near := difflib.get_close_matches(str(key), known, n=1):
        return f"{sentence}; did you mean {near[0]!r}?"
    elsewhere = {keys[-1]: ".".join(keys) for keys in _all_keys(Config, ())}
    if near := difflib.get_close_matches(str(key), elsewhere, n=1):
        return f"{sentence}; did you mean {elsewhere[near[0]]!r}?"
    return f"{sentence}; it knows {', '.join(known)}"


def _all_keys(section: type, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, kind in get_type_hints(section).items():
        if is_dataclass(kind):
            yield from _all_keys(kind, (*path, name))  # type: ignore[arg-type]
        elif not name.startswith("__"):
            yield (*path, name)


def _sentence(detail: dict[str, Any], sources: list[_Source]) -> str:
    path = tuple(part for part in detail["loc"] if isinstance(part, str))
    setters = [source for source in sources if _sets(source.tree, path)] or sources[-1:]
    if (
        detail["type"] == "value_error"
    ):  # Raised by the section itself: it names the key and what would be right.
        names = " and ".join(source.name for source in setters)
        return f"{names}: in section {'.'.join(path)}: {detail['ctx']['error']}"
    spelled = setters[-1].key_of.get(path, ".".join(path))
    wanted = detail["msg"].replace("Input should be", "it must be")
    if detail["type"] == "dataclass_type":
        wanted = "it must be a section of keys"
    given = "not as it must be" if path[-1] in SECRETS else _given(detail["input"])
    return f"{setters[-1].name}: {spelled} is {given}; {wanted}"


def _sets(tree: Any, path: tuple[str, ...]) -> bool:
    for key in path:
        if not isinstance(tree, dict) or key not in tree:
            return False
        tree = tree[key]
    return True


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    """What is set there; None if nothing is."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _given(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
