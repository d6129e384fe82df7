"""Public traces: Mooncake's JSONL and Azure's CSV.

Enters: a file. Leaves: its requests in order of arrival, or a ValueError with the line and the
field. Does not know: rates, scales.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nanocp.simulator.workload_request import HASH_ID_TOKENS, WorkloadRequest


def read_mooncake(path: Path) -> Iterator[WorkloadRequest]:
    """Read a trace of Mooncake (FAST'25), a JSON object a line.

    It has timestamp (milliseconds), input_length, output_length, and hash_ids where they were kept:
    equal ids are equal blocks after equal blocks. `tenant` may be there: whose request it is.
    """
    last_us = 0
    for number, line in enumerate(_lines(path), start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: this is no JSON: {error.msg}") from error
        if not isinstance(entry, dict):
            raise ValueError(f"{where}: this is {type(entry).__name__}; it must be an object")
        arrival_us = 1000 * _whole(where, "timestamp", entry, least=0)
        _in_order(where, "timestamp", last_us, arrival_us)
        last_us = arrival_us
        output_len = _whole(where, "output_length", entry, least=1)
        prompt_len = _whole(where, "input_length", entry, least=1)
        hash_ids = _hash_ids(where, entry, prompt_len)
        tenant = entry.get("tenant", "")
        if not isinstance(tenant, str):
            raise ValueError(f"{where}: tenant is {tenant!r}; it must be a text")
        yield WorkloadRequest(
            arrival_us, prompt_len, output_len, output_len, hash_ids, tenant=tenant
        )


def read_azure(path: Path) -> Iterator[WorkloadRequest]:
    """Azure LLM inference 2023 (ISCA'24): TIMESTAMP, ContextTokens, GeneratedTokens."""
    lines = csv.DictReader(_lines(path))
    missing = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} - set(lines.fieldnames or ())
    if missing:
        raise ValueError(f"{path}, line 1: the header lacks {', '.join(sorted(missing))}")
    first: datetime | None = None
    last_us = 0
    for entry in lines:
        where = f"{path}, line {lines.line_num}"
        try:
            # Seven decimals of a second; the library reads six.
            moment = datetime.fromisoformat(entry["TIMESTAMP"][:26]).replace(tzinfo=UTC)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{where}: TIMESTAMP is {entry['TIMESTAMP']!r}; it must be like "
                "2023-11-16 18:15:46.6805900"
            ) from error
        first = first or moment
        delta = moment - first
        arrival_us = (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds
        _in_order(where, "TIMESTAMP", last_us, arrival_us)
        last_us = arrival_us
        output_len = _whole(where, "GeneratedTokens", entry, least=1)
        yield WorkloadRequest(
            arrival_us, _whole(where, "ContextTokens", entry, least=1), output_len, output_len
        )


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the trace {path} cannot be read: {error}") from error


def _whole(where: str, name: str, entry: dict[str, Any], least: int) -> int:
    if name not in entry:
        raise ValueError(f"{where}: {name} is missing")
    given = entry[name]
    try:
        value = int(given) if isinstance(given, str) else given
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
    except ValueError:
        pass
    raise ValueError(f"{where}: {name} is {given!r}; it must be a whole number of at least {least}")


def _hash_ids(where: str, entry: dict[str, Any], prompt_len: int) -> tuple[int, ...]:
    given = entry.get("hash_ids", [])
    if not isinstance(given, list) or not all(
        type(number) is int and 0 <= number < 2**63 for number in given
    ):
        raise ValueError(
            f"{where}: hash_ids is {given!r:.100}; it must be a list of whole numbers of at least 0"
        )
    if len(given) > (most := -(-prompt_len // HASH_ID_TOKENS)):
        raise ValueError(
            f"{where}: there are {len(given)} hash_ids; input_length {prompt_len} has room for "
            f"{most}"
        )
    return tuple(given)


def _in_order(where: str, name: str, last_us: int, arrival_us: int) -> None:
    if arrival_us < last_us:
        raise ValueError(
            f"{where}: {name} goes back by {(last_us - arrival_us) / 1e6} s; lines must be in "
            "order of time"
        )
