"""Logs of requests: who came when, with how many tokens in and out.

Enters: a file of Mooncake's or Azure's trace, of vLLM's benchmark, of Dynamo, of NanoCP, or other
JSON lines or CSV. Leaves: its requests in order of arrival and what was read of them, or a
ValueError with the line and the field. Does not know: rates, scales.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nanocp.simulator.workload_request import HASH_ID_TOKENS, WorkloadRequest

ARRIVAL, PROMPT, OUTPUT = "arrival", "prompt", "output"
KNOWN: Mapping[str, tuple[str, ...]] = {
    ARRIVAL: (
        *("request.request_received_ms", "request_received_ms", "timestamp_ms", "arrival_ms"),
        *("start_time_ns", "start_time", "arrival_time", "arrived_at", "arrival", "timestamp"),
        *("TIMESTAMP", "time", "ts"),
    ),
    PROMPT: (
        *("request.replay.input_length", "request.input_tokens", "input_length", "prompt_tokens"),
        *("usage.prompt_tokens", "usage.input_tokens", "ContextTokens", "input_tokens"),
        *("tokens_in", "num_prompt_tokens", "prompt_len", "input_len", "isl"),
    ),
    OUTPUT: (
        *("request.output_tokens", "output_length", "completion_tokens"),
        *("usage.completion_tokens", "usage.output_tokens", "GeneratedTokens", "output_tokens"),
        *("tokens_out", "num_generation_tokens", "output_len", "osl"),
    ),
}
"""What a log calls them; a dot goes into an object. The first that a line has counts."""
STRICT = {
    "mooncake": {ARRIVAL: "timestamp", PROMPT: "input_length", OUTPUT: "output_length"},
    "azure": {ARRIVAL: "TIMESTAMP", PROMPT: "ContextTokens", OUTPUT: "GeneratedTokens"},
}
"""Traces whose every line is a request."""
_TOTAL = "total_s"
"""A line with it is written when its request ends, if it has a time of its own only."""
_TIMES_OF_A_LINE = ("time", "ts")
_UNITS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
_SINCE_1970 = ((1e17, "ns"), (1e14, "us"), (1e11, "ms"), (1e8, "s"))

_Entry = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RequestLog:
    """What a file says."""

    requests: tuple[WorkloadRequest, ...]
    """In order of arrival; the first arrives at 0."""
    fields: tuple[str, str, str]
    """Where arrival, prompt and output were found, the arrival with its unit."""
    num_skipped: int
    """Lines that are no request with a token each way: failures, refusals, other messages."""

    @property
    def rate_per_s(self) -> float:
        """Requests a second. Raises ValueError if no two arrive at different times."""
        span_us = self.requests[-1].arrival_us
        if not span_us:
            raise ValueError("the log holds no two requests at different times; give --rate")
        return len(self.requests) / (span_us / 1e6)


def read_log(path: Path, names: Mapping[str, str] | None = None) -> RequestLog:
    """Read any log. names: what it calls arrival, prompt or output, if not as known here."""
    given = {what.strip(): name.strip() for what, name in (names or {}).items()}
    if unknown := sorted(set(given) - set(KNOWN)):
        raise ValueError(f"a log has no {', '.join(unknown)}; it has {', '.join(KNOWN)}")
    known = {what: (given[what],) if given.get(what) else KNOWN[what] for what in KNOWN}
    reader = _Reader(known, is_strict=False)
    for where, entry in _entries(path, known[PROMPT]):
        reader.read(where, dict(_flat(entry)))
    if not reader.requests:
        raise ValueError(
            f"{path}: no line has an arrival and the numbers of tokens of a prompt and an output. "
            "An access log has none. Take `vllm bench serve --save-detailed`, Dynamo's "
            "DYN_REQUEST_TRACE or NanoCP's own log with --log-format json, or name the fields: "
            "--fields arrival=T,prompt=P,output=O"
        )
    return reader.log()


def read_trace(kind: str, path: Path) -> RequestLog:
    """Read a trace of STRICT, in which no line may be wrong or go back in time.

    Mooncake (FAST'25) has a JSON object a line: timestamp (milliseconds), input_length,
    output_length, and hash_ids where they were kept: equal ids are equal blocks after equal
    blocks. `tenant` may be there: whose request it is. Azure (ISCA'24) has a CSV.
    """
    names = STRICT[kind]
    reader = _Reader({what: (name,) for what, name in names.items()}, is_strict=True)
    entries = _csv(path) if kind == "azure" else _json_lines(path, is_strict=True)
    if kind == "azure" and (missing := set(names.values()) - set(_header(path))):
        raise ValueError(f"{path}, line 1: the header lacks {', '.join(sorted(missing))}")
    for where, entry in entries:
        reader.read(where, entry)
    return reader.log()


class _Reader:
    """Makes requests of entries."""

    def __init__(self, known: Mapping[str, tuple[str, ...]], is_strict: bool) -> None:
        self._known, self._is_strict = known, is_strict
        self._unit = "ms" if known[ARRIVAL] == (STRICT["mooncake"][ARRIVAL],) else ""
        self._fields: tuple[str, str, str] = ("", "", "")
        self._num_skipped = 0
        self.requests: list[WorkloadRequest] = []
        self._arrivals_us: list[float] = []

    def read(self, where: str, entry: Mapping[str, Any]) -> None:
        """Take a request, or count the line as skipped. Raises ValueError for a wrong value."""
        is_strict = self._is_strict
        found = {
            what: next((name for name in names if entry.get(name) not in (None, "")), "")
            for what, names in self._known.items()
        }
        if is_strict:
            found = {what: names[0] for what, names in self._known.items()}
            for name in found.values():
                if name not in entry:
                    raise ValueError(f"{where}: {name} is missing")
        elif not all(found.values()) or _is_zero(entry, found[PROMPT], found[OUTPUT]):
            self._num_skipped += 1
            return
        at_us = self._moment_us(where, found[ARRIVAL], entry[found[ARRIVAL]])
        if not is_strict and found[ARRIVAL] in _TIMES_OF_A_LINE:
            at_us -= 1e6 * _seconds(where, entry)
        back_us = self._arrivals_us[-1] - at_us if self._arrivals_us else 0.0
        if is_strict and back_us > 0:
            raise ValueError(
                f"{where}: {found[ARRIVAL]} goes back by {back_us / 1e6} s; lines must be in order "
                "of time"
            )
        output_len = _whole(where, found[OUTPUT], entry, is_strict)
        prompt_len = _whole(where, found[PROMPT], entry, is_strict)
        tenant = entry.get("tenant", "")
        hashes: tuple[int, ...] = ()
        if not isinstance(tenant, str):
            if is_strict:
                raise ValueError(f"{where}: tenant is {tenant!r}; it must be a text")
            tenant = ""
        try:
            hashes = _hash_ids(where, entry, prompt_len)
        except ValueError:
            if is_strict:
                raise
        self.requests.append(
            WorkloadRequest(0, prompt_len, output_len, output_len, hashes, tenant=tenant)
        )
        self._arrivals_us.append(at_us)
        if not self._fields[0]:
            arrival = f"{found[ARRIVAL]} ({self._unit})"
            self._fields = (arrival, found[PROMPT], found[OUTPUT])

    def log(self) -> RequestLog:
        """What was read."""
        order = sorted(range(len(self.requests)), key=self._arrivals_us.__getitem__)
        first_us = self._arrivals_us[order[0]] if order else 0.0
        requests = (
            replace(self.requests[at], arrival_us=round(self._arrivals_us[at] - first_us))
            for at in order
        )
        return RequestLog(tuple(requests), self._fields, self._num_skipped)

    def _moment_us(self, where: str, name: str, value: Any) -> float:
        """Microseconds of an arrival; the unit is the first one's, by its name or its size."""
        number = _number(value)
        if number is None:
            self._unit = self._unit or "a date"
            try:
                moment = datetime.fromisoformat(value)
                if moment.tzinfo is None:
                    moment = moment.replace(tzinfo=UTC)
                delta = moment - datetime(1970, 1, 1, tzinfo=UTC)
                return float((delta.days * 86_400 + delta.seconds) * 10**6 + delta.microseconds)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{where}: {name} is {value!r}; it must be a number, or a time like "
                    "2023-11-16 18:15:46.6805900"
                ) from error
        if number < 0 or (self._is_strict and name == "timestamp" and type(value) is not int):
            raise ValueError(
                f"{where}: {name} is {value!r}; it must be a whole number of at least 0"
            )
        if not self._unit:
            suffix = name.rpartition("_")[2]
            small = "ms" if name == "timestamp" and float(number).is_integer() else "s"
            since = next((unit for least, unit in _SINCE_1970 if number > least), small)
            self._unit = suffix if suffix in _UNITS else since
        return number * _UNITS.get(self._unit, 1e6)


# --- Files


def _entries(path: Path, prompts: tuple[str, ...]) -> Iterator[_Entry]:
    """(where, entry) of each line that may be a request, whatever the file's form."""
    if set(_header(path)) & set(prompts):
        yield from _csv(path)
        return
    head = next((line.lstrip() for line in _lines(path) if line.strip()), "")
    if head.startswith(("{", "[")) and not _is_object(head):
        try:
            whole = json.loads("".join(_lines(path)))
        except (ValueError, RecursionError):
            whole = None  # lines of JSON, the first of them cut
        objects = whole if isinstance(whole, list) else [whole]
        if whole is not None:
            for number, entry in enumerate(objects, start=1):
                yield from _unpacked(f"{path}, object {number}", entry)
            return
    for where, entry in _json_lines(path, is_strict=False):
        yield from _unpacked(where, entry)


def _unpacked(where: str, entry: Any) -> Iterator[_Entry]:
    """An entry as it is, or the requests of a result of `vllm bench serve --save-detailed`."""
    if not isinstance(entry, dict):
        yield where, {}
        return
    inputs = entry.get("input_lens")
    if not isinstance(inputs, list):
        nested = entry.get("event")  # Dynamo's recorder wraps what it records
        yield where, nested if isinstance(nested, dict) and "request" not in entry else entry
        return
    outputs, starts = entry.get("output_lens"), entry.get("start_times")
    if not isinstance(outputs, list) or not isinstance(starts, list):
        raise ValueError(f"{where} has no output_lens and start_times; add --save-detailed")
    for prompt, output, start in zip(inputs, outputs, starts, strict=False):
        yield where, {"start_time": start, "prompt_len": prompt, "output_len": output}


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _json_lines(path: Path, is_strict: bool) -> Iterator[_Entry]:
    for number, line in enumerate(_lines(path), start=1):
        where = f"{path}, line {number}"
        if not line.strip() or not (is_strict or line.lstrip().startswith("{")):
            continue  # a message between the lines of JSON
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            if is_strict:
                raise ValueError(f"{where}: this is no JSON: {error}") from error
            entry = {}
        if not isinstance(entry, dict):
            raise ValueError(f"{where}: this is {type(entry).__name__}; it must be an object")
        yield where, entry


def _csv(path: Path) -> Iterator[_Entry]:
    lines = csv.DictReader(_lines(path), delimiter=_delimiter(path), skipinitialspace=True)
    try:
        for entry in lines:
            yield f"{path}, line {lines.line_num}", entry
    except csv.Error as error:
        raise ValueError(f"{path}, line {lines.line_num}: {error}") from error


def _header(path: Path) -> list[str]:
    """Columns of the first line, if the file is a CSV."""
    try:
        lines = csv.reader(_lines(path), delimiter=_delimiter(path), skipinitialspace=True)
        return next(lines, [])
    except csv.Error:
        return []


def _delimiter(path: Path) -> str:
    head = next(_lines(path), "")
    return ";" if ";" in head and "," not in head else ","


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as raw:
            is_packed = raw.read(2) == b"\x1f\x8b"
        opened = gzip.open if is_packed else open
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield from file
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


# --- Values


def _flat(entry: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of an object and the objects in it."""
    for name, value in entry.items():
        if isinstance(value, dict) and before.count(".") < 4:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _number(value: Any) -> float | None:
    """A finite number, also as text; None for anything else."""
    try:
        number = float(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        return None
    is_plain = number is not None and not isinstance(value, bool) and abs(number) < 1e20
    return number if is_plain else None


def _seconds(where: str, entry: Mapping[str, Any]) -> float:
    given = entry.get(_TOTAL)
    if given in (None, ""):
        return 0.0
    number = _number(given)
    if number is None or number < 0:
        raise ValueError(f"{where}: {_TOTAL} is {given!r}; it must be a number of seconds")
    return number


def _is_zero(entry: Mapping[str, Any], *names: str) -> bool:
    return any(_number(entry[name]) == 0 for name in names)


def _whole(where: str, name: str, entry: Mapping[str, Any], is_strict: bool) -> int:
    given = entry[name]
    number = None if is_strict else _number(given)
    try:
        value = int(given) if isinstance(given, str) and number is None else given
        if number is not None and number.is_integer():
            value = int(number)  # as 3.0, which tables write
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**53:
            return value
    except ValueError:
        pass
    raise ValueError(f"{where}: {name} is {given!r:.100}; it must be a whole number of at least 1")


def _hash_ids(where: str, entry: Mapping[str, Any], prompt_len: int) -> tuple[int, ...]:
    given = entry.get("hash_ids", [])
    if not isinstance(given, list) or not all(
        type(number) is int and 0 <= number < 2**63 for number in given
    ):
        raise ValueError(
            f"{where}: hash_ids is {given!r:.100}; it must be a list of whole numbers of at least 0"
        )
    if len(given) > (most := -(-prompt_len // HASH_ID_TOKENS)):
        raise ValueError(
            f"{where}: there are {len(given)} hash_ids; the prompt of {prompt_len} tokens has "
            f"room for {most}"
        )
    return tuple(given)
