"""Removed options of commands, with sentences on replacements, from removed.toml."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path


@cache
def removed(command: str) -> dict[str, str]:
    """Replacements of removed flags of `nanocp COMMAND`."""
    table = tomllib.loads((Path(__file__).parent / "removed.toml").read_text(encoding="utf-8"))
    return {
        flag: row["write"].replace("NAME", flag.removeprefix("--").replace("-", "_"))
        for row in table["removed"]
        for flag in row["flags"]
        if command in row["commands"]
    }


def refusal(command: str, flag: str) -> str:
    """The refusal of a removed flag; empty for any other."""
    write = removed(command).get(flag)
    return f"{flag} is no option any more: write {write}" if write else ""
