"""Reads request logs: traces of Mooncake and Azure, load generators, Dynamo, NanoCP, JSON, CSV.

Requests are in order of arrival; a ValueError names the line and the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from nanocp.simulator.loads.arrival_times import DATE, UNITS, ZONED, LogTime, unit_of
from nanocp.simulator.loads.log_files import PHASE, LogFile, flat, number_of
from nanocp.simulator.loads.workload_request import HASH_ID_TOKENS, WorkloadRequest

ARRIVAL, PROMPT, OUTPUT = "arrival", "prompt", "output"
KNOWN: Mapping[str, tuple[str, ...]] = {
    ARRIVAL: (
        *("request.request_received_ms", "request_received_ms", "timestamp_ms", "arrival_ms"),
        *("metadata.request_start_ns", "request_start_time", "start_time_ns", "start_time"),
        *("arrival_time", "arrived_at", "arrival", "timestamp", "TIMESTAMP", "time", "ts"),
    ),
    PROMPT: (
        *("request.replay.input_length", "request.input_tokens", "input_length", "prompt_tokens"),
        *("usage.prompt_tokens", "usage.input_tokens", "ContextTokens", "input_tokens"),
        *("metrics.input_sequence_length.value", "metrics.input_sequence_length"),
        *("tokens_in", "num_prompt_tokens", "prompt_len", "input_len", "isl"),
    ),
    OUTPUT: (
        *("request.output_tokens", "output_length", "completion_tokens"),
        *("usage.completion_tokens", "usage.output_tokens", "GeneratedTokens", "output_tokens"),
        *("metrics.output_sequence_length.value", "metrics.output_sequence_length"),
        *("tokens_out", "num_generation_tokens", "output_len", "osl"),
    ),
}
"""Names of fields in logs; a dot enters an object. The first that a line has counts."""
STRICT = {
    "mooncake": {ARRIVAL: "timestamp", PROMPT: "input_length", OUTPUT: "output_length"},
    "azure": {ARRIVAL: "TIMESTAMP", PROMPT: "ContextTokens", OUTPUT: "GeneratedTokens"},
}
"""Traces whose every line is a request."""
_TOTAL = "total_s"
"""A line with only this time marks the end of its request."""
_TIMES_OF_A_LINE = ("time", "ts")
_MEASURED = "profiling"
_FAILED = ("error", "metadata.was_cancelled")


@dataclass(frozen=True, slots=True)
class RequestLog:
    """The requests of a file, and how it was read."""

    requests: tuple[WorkloadRequest, ...]
    """In order of arrival; the first arrives at 0."""
    fields: tuple[str, str, str]
    """Names of the fields read as arrival (with unit), prompt and output."""
    num_skipped: int
    """Lines that are no request."""
    num_failed: int = 0
    num_warm_up: int = 0
    notes: tuple[str, ...] = ()
    """Defects of the file."""

    @property
    def rate_per_s(self) -> float:
        """Requests a second. Raises ValueError if no two arrive at different times."""
        span_us = self.requests[-1].arrival_us
        if not span_us:
            raise ValueError("the log holds no two requests at different times; give --rate")
        return len(self.requests) / (span_us / 1e6)


def read_log(path: Path, names: Mapping[str, str] | None = None, time_unit: str = "") -> RequestLog:
    """Read any log.

    names: of arrival, prompt and output, if not known here. time_unit: if it cannot be inferred.
    """
    given = {what.strip(): name.strip() for what, name in (names or {}).items()}
    if unknown := sorted(set(given) - set(KNOWN)):
        raise ValueError(f"a log has no {', '.join(unknown)}; it has {', '.join(KNOWN)}")
    if nameless := [what for what, name in given.items() if not name]:
        raise ValueError(f"--fields has no name for {nameless[0]}; write {nameless[0]}=NAME")
    known = {what: (given[what],) if what in given else KNOWN[what] for what in KNOWN}
    reader = _Reader(known, is_strict=False)
    file = LogFile.read(path)
    is_csv = bool(set(file.header) & set(known[PROMPT]))
    wrong: ValueError | None = None
    there = file.header if is_csv else []
    for where, entry in file.rows() if is_csv else file.objects():
        if wrong:
            raise wrong
        values = dict(flat(entry))
        there = there or list(values)
        try:
            reader.read(where, values)
        except ValueError as error:
            wrong = error
    if wrong and is_csv and reader.requests and not file.text.endswith("\n"):
        reader.num_skipped += 1  # the last row is cut
    elif wrong:
        raise wrong
    if not reader.requests:
        failed = f" ({reader.num_failed:,} failed)" if reader.num_failed else ""
        notes = "".join(f" {note}" for note in file.notes)
        begins = f"it begins with {file.text[:80]!r}" if file.text.strip() else "it is empty"
        found = f"its first has {', '.join(there[:20])}" if there else begins
        raise ValueError(
            f"{path}: no line has an arrival and the numbers of tokens of a prompt and an output"
            f"{failed}; {found}.{notes} An access log and tables of results have none. Take `vllm "
            "bench serve --save-result --save-detailed`, guidellm's benchmarks.json, AIPerf's "
            "profile_export.jsonl, Dynamo's DYN_REQUEST_TRACE or NanoCP's own log with "
            "--log-format json, or name the fields: --fields arrival=T,prompt=P,output=O"
        )
    return reader.log(time_unit, file.notes)


def read_trace(kind: str, path: Path) -> RequestLog:
    """Read a trace of STRICT, in which no line may be wrong or go back in time.

    Mooncake (FAST'25) has a JSON object a line: timestamp (ms), input_length, output_length,
    optional hash_ids and `tenant`. Azure (ISCA'24) has a CSV.
    """
    names, file = STRICT[kind], LogFile.read(path)
    reader = _Reader({what: (name,) for what, name in names.items()}, is_strict=True)
    is_azure = kind == "azure"
    if is_azure and (missing := set(names.values()) - set(file.header)):
        raise ValueError(f"{path}, line 1: the header lacks {', '.join(sorted(missing))}")
    for where, entry in file.rows() if is_azure else file.json_lines(is_strict=True):
        reader.read(where, entry)
    return reader.log("" if is_azure else "ms", file.notes)


class _Reader:
    def __init__(self, known: Mapping[str, tuple[str, ...]], is_strict: bool) -> None:
        self._known, self._is_strict = known, is_strict
        self._found: dict[str, str] = {}
        self.num_skipped = self.num_failed = self._num_warm_up = 0
        self.requests: list[WorkloadRequest] = []
        self._moments: list[LogTime] = []
        self._took_us: list[float] = []

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
        elif entry.get(PHASE, _MEASURED) != _MEASURED:
            self._num_warm_up += 1
            return
        elif any(value and name.startswith(_FAILED) for name, value in entry.items()):
            self.num_failed += 1
            return
        elif not all(found.values()) or _is_zero(entry, found[PROMPT], found[OUTPUT]):
            self.num_skipped += 1
            return
        at = _moment(where, found[ARRIVAL], entry[found[ARRIVAL]], is_strict)
        is_late = not is_strict and found[ARRIVAL] in _TIMES_OF_A_LINE
        took_us = 1e6 * _seconds(where, entry) if is_late else 0.0
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
        self._moments.append(at)
        self._took_us.append(took_us)
        self._found = self._found or found

    def log(self, time_unit: str, notes: list[str]) -> RequestLog:
        """The log. Raises ValueError if the times have no unit, or go back in a trace."""
        found = self._found
        if not found:
            return RequestLog((), ("", "", ""), self.num_skipped)
        unit = unit_of(self._moments, time_unit)
        us = UNITS.get(unit, 1.0)
        arrivals_us = [
            us * at.value - took for at, took in zip(self._moments, self._took_us, strict=True)
        ]
        for before, after, at in zip(arrivals_us, arrivals_us[1:], self._moments[1:], strict=False):
            if self._is_strict and before > after:
                raise ValueError(
                    f"{at.where}: {at.name} goes back by {(before - after) / 1e6} s; lines must be "
                    "in order of time"
                )
        order = sorted(range(len(self.requests)), key=arrivals_us.__getitem__)
        first_us = arrivals_us[order[0]]
        return RequestLog(
            tuple(
                replace(self.requests[at], arrival_us=round(arrivals_us[at] - first_us))
                for at in order
            ),
            (f"{found[ARRIVAL]} ({unit})", found[PROMPT], found[OUTPUT]),
            self.num_skipped,
            self.num_failed,
            self._num_warm_up,
            tuple(notes),
        )


def _seconds(where: str, entry: Mapping[str, Any]) -> float:
    given = entry.get(_TOTAL)
    if given in (None, ""):
        return 0.0
    number = number_of(given)
    if number is None or number < 0:
        raise ValueError(f"{where}: {_TOTAL} is {given!r}; it must be a number of seconds")
    return number


def _moment(where: str, name: str, value: Any, is_strict: bool) -> LogTime:
    number = number_of(value)
    if number is not None:
        is_odd = is_strict and name == "timestamp" and type(value) is not int
        if number < 0 or is_odd:
            raise ValueError(
                f"{where}: {name} is {value!r}; it must be a whole number of at least 0"
            )
        return LogTime(where, name, number)
    try:
        found = datetime.fromisoformat(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: {name} is {value!r:.100}; it must be a number, or a time like "
            "2023-11-16 18:15:46.6805900"
        ) from error
    date, found = (ZONED, found) if found.tzinfo else (DATE, found.replace(tzinfo=UTC))
    delta = found - datetime(1970, 1, 1, tzinfo=UTC)
    return LogTime(where, name, float(delta // timedelta(microseconds=1)), date)


def _is_zero(entry: Mapping[str, Any], *names: str) -> bool:
    return any(number_of(entry[name]) == 0 for name in names)


def _whole(where: str, name: str, entry: Mapping[str, Any], is_strict: bool) -> int:
    given = entry[name]
    number = None if is_strict else number_of(given)
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
