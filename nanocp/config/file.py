"""Loads a Config: file < environment < flags.

The dataclasses are the only list of keys; errors name key, source, value and remedy.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ValidationError

from nanocp.config.choices import INTERNAL, PROFILED, is_hidden, marks_of, require
from nanocp.config.cost import CPU_COSTS, GPU_DEGREES
from nanocp.config.data_plane import default_dtype
from nanocp.config.whole import FOLLOWS, SECRETS, Config
from nanocp.files.inputs import readable
from nanocp.files.yaml_file import given, read_yaml, sentence, validated

ENVIRONMENT_PREFIX = "NANOCP_"
"""NANOCP_CLUSTER__NUM_INSTANCES=2 sets cluster.num_instances; values are JSON or else text."""

UNRELIABLE = "Unreliable: "
"""Begins a comment of `nanocp profile` on a doubtful measurement."""

_Tree = dict[str, Any]


@dataclass(frozen=True)
class _Source:
    """Values from one place as a tree of sections, with the user's names for place and keys."""

    name: str
    tree: _Tree
    key_of: Mapping[tuple[str, ...], str]
    """The user's spelling of a key other than section.key."""


def load_config(
    path: Path | None, overrides: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> Config:
    """The configuration from file, environment and flags, each over the one before.

    overrides: dotted keys such as "cluster.num_instances"; None: not given. Raises ValueError for
    an unknown key (with section and nearest key), a wrong type, a value out of range, a missing
    file and unreadable YAML (with the line).
    """
    sources = _sources(path, overrides, environment)
    merged: _Tree = {}
    for source in sources:
        _check_keys(source, source.tree, Config, ())
        merged = _merge(merged, source.tree)
    if isinstance(profile := _at(merged, ("scheduler", "profile")), str) and profile:
        measured = _Source(profile, _read_yaml(Path(profile), "profile"), {})
        measured.tree.pop("measured_on", None)
        _check_keys(measured, measured.tree, Config, (), is_profile=True)
        merged = _merge(measured.tree, merged)
        sources.insert(0, measured)
    device = merged["data_plane"]["device"] if _sets(merged, ("data_plane", "device")) else "cpu"
    of_device = {"costs": asdict(CPU_COSTS)} if device == "cpu" else GPU_DEGREES
    merged = _merge({"scheduler": of_device}, merged)
    merged = _merge({"data_plane": {"dtype": default_dtype(device)}}, merged)
    for key, other in FOLLOWS.items():
        value = _at(merged, other)
        if isinstance(value, int) and not _sets(merged, key):
            least = _at(asdict(Config()), key)
            merged = _merge(merged, _nested(key, max(least, value + value // 2)))
    try:
        config = validated(Config, merged)
    except ValidationError as error:
        raise ValueError(
            "\n".join(_sentence(dict(detail), sources) for detail in error.errors())
        ) from error
    found = measured_on(config.scheduler.profile).get("device", device)
    require(
        found == device,
        f"{profile}: it was measured on {found}, and data_plane.device is {device}; profile again, "
        "or leave scheduler.profile out",
    )
    return config


def origins(
    path: Path | None, overrides: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The source of each value of `load_config` by dotted key, defaults left out.

    Raises ValueError as it does.
    """
    found = {}
    for source in _sources(path, overrides, environment):
        for keys in known_keys():
            if _sets(source.tree, keys):
                spelled = source.key_of.get(keys)
                found[".".join(keys)] = spelled or source.name
    for key, other in FOLLOWS.items():
        if ".".join(other) in found:
            found.setdefault(".".join(key), f"follows {other[-1]}")
    return found


def doubts_in(profile: str) -> list[str]:
    """Doubts that `nanocp profile` noted in its file, which `load_config` has read."""
    lines = readable(Path(profile)).read_text(encoding="utf-8").splitlines() if profile else []
    return [each.removeprefix("# ") for each in lines if each.startswith(f"# {UNRELIABLE}")]


def measured_on(profile: str) -> dict[str, str]:
    """The device and the model that `nanocp profile` notes in its file; empty without a file."""
    found = _read_yaml(Path(profile), "profile").get("measured_on", {}) if profile else {}
    require(
        isinstance(found, dict)
        and found.keys() <= {"device", "model"}
        and all(isinstance(each, str) for each in found.values()),
        f"{profile}: measured_on is {given(found)}; it must be the device and the model, as "
        "`nanocp profile` writes them",
    )
    return dict(found)


def settings(given: Sequence[str]) -> dict[str, Any]:
    """Keys of SECTION.KEY=VALUE, for `load_config`; values are JSON or else text.

    Raises ValueError for any other form.
    """
    found = {}
    for each in given:
        key, sign, text = each.partition("=")
        if not sign or "." not in key:
            raise ValueError(
                f"--set is {each!r}; it must be SECTION.KEY=VALUE, as in cluster.num_frames=512"
            )
        found[key] = _value(key, text)
    return found


# --- Sources


def _sources(
    path: Path | None, overrides: Mapping[str, Any], environment: Mapping[str, str]
) -> list[_Source]:
    sources = [_from_environment(environment), _from_flags(overrides)]
    if path is not None:
        sources.insert(0, _Source(str(path), _read_yaml(path, "configuration file"), {}))
    return sources


def _read_yaml(path: Path, what: str) -> _Tree:
    require(path.exists(), f"the {what} {path} does not exist")
    tree = read_yaml(path, what)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ValueError(
            f"{path}: the file holds {given(tree)}; it must hold sections such as `cluster:`"
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
        tree = _merge(tree, _nested(keys, _value(keys[-1], text)))
    return _Source("the environment", tree, key_of)


def _value(key: str, text: str) -> Any:
    try:
        # A key of digits only is no number.
        return text if key.endswith("api_key") else json.loads(text)
    except json.JSONDecodeError:
        return text


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


REMOVED = {
    "cluster.carry_pages": "the checkpoint says it",
    "cluster.bounds.max_hand_offs": "it is 4",
    "scheduler.offload_host_pages": "set kv_offload.host_gib instead",
    "scheduler.offload_file_pages": "set kv_offload.file_gib instead",
    "scheduler.held_timeout_us": "it is 10 s",
    "scheduler.chaos_seed": "only tests draw",
    "scheduler.chaos_period_windows": "only tests draw",
    "pipeline.chaos_seed": "only tests draw",
    "pipeline.layout_window": "it is 25 passes",
    "pipeline.copy_ahead": "pages always travel before the layout changes",
    "limits.tick_ms": "it is 100",
    "limits.retry_ms": "it is 2000",
}
"""Removed keys, with the reason or the replacement."""
_MEASURED = "it is measured: set scheduler.profile to a file that `nanocp profile` writes"


def _check_keys(
    source: _Source, tree: _Tree, section: type, path: tuple[str, ...], is_profile: bool = False
) -> None:
    types, marks = get_type_hints(section), marks_of(section)
    known = [name for name in types if not name.startswith("__")]
    for key in list(tree):
        if key not in known:
            raise ValueError(_unknown_key(source, path, key, known))
        keys, is_section = (*path, key), is_dataclass(types[key])
        name = source.key_of.get(keys, ".".join(keys))
        if INTERNAL in marks[key]:
            raise ValueError(f"{source.name}: {name} is no key any more: {REMOVED['.'.join(keys)]}")
        if PROFILED in marks[key]:
            if not is_profile:
                raise ValueError(f"{source.name}: {name} is no key any more: {_MEASURED}")
        elif is_profile and not is_section:
            raise ValueError(f"{source.name}: {name} is not measured: set it beside the profile")
        if not is_section:
            continue
        if tree[key] is None:  # A section whose every line is commented out.
            tree[key] = {}
        if isinstance(tree[key], dict):
            # Below a measured section every key is measured.
            inside = is_profile and PROFILED not in marks[key]
            _check_keys(source, tree[key], types[key], keys, inside)


def _unknown_key(source: _Source, path: tuple[str, ...], key: object, known: list[str]) -> str:
    kind, where = ("key", f"section {'.'.join(path)}") if path else ("section", "the configuration")
    spelled = source.key_of.get((*path, str(key)))
    sentence = f"{source.name}: unknown {kind} {str(key)!r} in {where}" + (
        f" ({spelled})" if spelled else ""
    )
    if near := difflib.get_close_matches(str(key), known, n=1):
        return f"{sentence}; did you mean {near[0]!r}?"
    elsewhere = {keys[-1]: ".".join(keys) for keys in known_keys()}
    if near := difflib.get_close_matches(str(key), elsewhere, n=1):
        return f"{sentence}; did you mean {elsewhere[near[0]]!r}?"
    return f"{sentence}; it knows {', '.join(known)}"


def known_keys(section: type = Config, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key that a user may set, as names of sections and its own."""
    marks = marks_of(section)
    for name, kind in get_type_hints(section).items():
        if name.startswith("__") or is_hidden(marks[name]):
            continue
        if is_dataclass(kind):
            yield from known_keys(kind, (*path, name))  # type: ignore[arg-type]
        else:
            yield (*path, name)


def _sentence(detail: dict[str, Any], sources: list[_Source]) -> str:
    path = tuple(part for part in detail["loc"] if isinstance(part, str))
    setters = [each for each in sources if each.tree and _sets(each.tree, path)] or sources[-1:]
    key = ".".join(path)
    if detail["type"] == "value_error":
        names = " and ".join(source.name for source in setters)
        return f"{names}: {sentence(detail, f'in section {key}' if key else '', '')}"
    spelled = setters[-1].key_of.get(path, key)
    shown = "not as it must be" if path[-1] in SECRETS else given(detail["input"])
    return f"{setters[-1].name}: {sentence(detail, spelled, shown)}"


def _sets(tree: Any, path: tuple[str, ...]) -> bool:
    for key in path:
        if not isinstance(tree, dict) or key not in tree:
            return False
        tree = tree[key]
    return True


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree
