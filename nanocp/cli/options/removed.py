"""Options that commands had once: each is refused by a sentence that says what to write instead.

Enters: a command and a flag. Leaves: the sentence. Does not know: what options do. The table is
removed.toml beside this file.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path


@cache
def removed(command: str) -> dict[str, str]:
    """What to write in place of each flag that `nanocp COMMAND` had once."""
    table = tomllib.loads((Path(__file__).parent / "removed.toml").read_text(encoding="utf-8"))
    return {
        flag: row["write"].replace("NAME", flag.removeprefix("--").replace("-", "_"))
        for row in table["removed"]
        for flag in row["flags"]
        if command in row["commands"]
    }


def refusal(command: str, flag: str) -> str:
    """The sentence that refuses a flag which the command had once; empty for any other flag."""
    write = removed(command).get(flag)
    return f"{flag} is no option any more: write {write}" if write else ""
