"""Readers of request files, also piped, compressed or truncated: CSV, JSON lines, one JSON."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from nanocp.files.inputs import readable

PHASE = "metadata.benchmark_phase"
"""AIPerf's phase of a request; also set for warm-up requests of others."""
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[][{},]')

_Entry = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class LogFile:
    """A file's text, and notes of defects."""

    path: Path
    text: str
    notes: list[str]

    @classmethod
    def read(cls, path: Path) -> LogFile:
        """Raises ValueError; a truncated file is read up to the cut."""
        data, notes = io.BytesIO(), []
        try:
            with readable(path).open("rb") as raw:
                is_packed = raw.read(2) == b"\x1f\x8b"
                raw.seek(0)
                try:
                    file: Any = gzip.GzipFile(fileobj=raw) if is_packed else raw
                    while some := file.read1(1 << 16):
                        data.write(some)
                except EOFError:
                    notes.append("Its packed data ends early: what is there was read.")
            text = codecs.getincrementaldecoder("utf-8-sig")().decode(data.getvalue())
        except (OSError, UnicodeDecodeError, zlib.error) as error:
            why = f": {error}"
            if isinstance(error, UnicodeDecodeError):
                why = ": it must be text in UTF-8, as it is or packed by gzip"
            elif str(path).startswith(("http:", "https:")):
                why = " from its URL: fetch it, or pipe it into --log /dev/stdin"
            raise ValueError(f"{path} cannot be read{why}") from error
        return cls(path, text, notes)

    @property
    def lines(self) -> Iterator[str]:
        """Lines with their ends."""
        return io.StringIO(self.text, newline="")

    @property
    def header(self) -> list[str]:
        """Columns of the first line, if the file is a CSV."""
        is_json = self.text.lstrip()[:1] in ("{", "[")
        return [] if is_json else next(self._csv(csv.reader), [])

    def _csv(self, reader: Any) -> Any:
        delimiter = max(",;\t|", key=next(self.lines, "").count)
        return reader(self.lines, delimiter=delimiter, skipinitialspace=True)

    def rows(self) -> Iterator[_Entry]:
        """The rows of a CSV by the names of its columns."""
        rows = self._csv(csv.DictReader)
        try:
            for entry in rows:
                yield f"{self.path}, line {rows.line_num}", entry
        except csv.Error as error:
            raise ValueError(f"{self.path}, line {rows.line_num}: {error}") from error

    def objects(self) -> Iterator[_Entry]:
        """Candidate requests in any form but a CSV."""
        lines = [line for line in self.lines if line.strip()]
        if "".join(lines[:1]).lstrip()[:1] in ("{", "[") and not any(map(_is_object, lines[:20])):
            for text in (self.text, _closed(self.text)):
                try:
                    whole = json.loads(text)
                except (ValueError, RecursionError):
                    continue
                if text is not self.text:
                    self.notes.append("Its JSON ends early: what is complete was read.")
                for number, entry in enumerate(whole if isinstance(whole, list) else [whole], 1):
                    yield from self._unpacked(f"{self.path}, object {number}", entry)
                return
        for where, entry in self.json_lines(is_strict=False):
            yield from self._unpacked(where, entry)

    def json_lines(self, is_strict: bool) -> Iterator[_Entry]:
        """An object of each line."""
        for number, line in enumerate(self.lines, start=1):
            where = f"{self.path}, line {number}"
            if not line.strip() or not (is_strict or line.lstrip().startswith("{")):
                continue  # a message between the lines of JSON
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                if is_strict:
                    raise ValueError(
                        f"{where}: this is no JSON: {error}; take the line out if the file is cut"
                    ) from error
                entry = {}
            if not isinstance(entry, dict):
                raise ValueError(f"{where}: this is {type(entry).__name__}; it must be an object")
            yield where, entry

    def _unpacked(self, where: str, entry: Any) -> Iterator[_Entry]:
        """An entry as it is, or the requests of a load generator's result."""
        if not isinstance(entry, dict):
            yield where, {}
        elif isinstance(entry.get("benchmarks"), list):
            yield from self._guidellm(where, entry["benchmarks"])
        elif isinstance(entry.get("input_lens"), list):
            outputs, starts = entry.get("output_lens"), entry.get("start_times")
            if not isinstance(outputs, list) or not isinstance(starts, list):
                raise ValueError(
                    f"{where} has no output_lens and start_times; add --save-result "
                    "--save-detailed, or copy the file again if it is cut"
                )
            lists = entry["input_lens"], outputs, starts, entry.get("errors") or []
            for at, (prompt, output, start, error) in enumerate(zip_longest(*lists), start=1):
                named = {"prompt_len": prompt, "output_len": output, "start_time": start}
                yield f"{where}, request {at}", named | {"error": error}
        else:
            nested = entry.get("event")  # Dynamo's recorder wraps what it records
            yield where, nested if isinstance(nested, dict) and "request" not in entry else entry

    def _guidellm(self, where: str, benchmarks: list[Any]) -> Iterator[_Entry]:
        if len(benchmarks) > 1:
            self.notes.append(
                f"It has {len(benchmarks)} benchmarks, which are played one after the other."
            )
        for number, one in enumerate(benchmarks, start=1):
            values = dict(flat(one)) if isinstance(one, dict) else {}
            begins = number_of(values.get("start_time")) or 0.0
            done, errored, incomplete = (
                [each for each in values.get(f"requests.{kind}") or [] if isinstance(each, dict)]
                for kind in ("successful", "errored", "incomplete")
            )
            is_early = [(number_of(each.get("request_start_time")) or 0) < begins for each in done]
            made = number_of(values.get("scheduler_metrics.requests_made.successful")) or 0
            if len(done) < made:
                self.notes.append(
                    f"It keeps {len(done):,} of {made:,.0f} requests: give the rate (--rate)."
                )
            for at, (each, early) in enumerate(zip(done, is_early, strict=True), start=1):
                phase = {PHASE: "warmup"} if early and not all(is_early) else {}
                yield f"{where}, benchmark {number}, request {at}", each | phase
            for _ in (*errored, *incomplete):
                yield where, {"error": "it did not end"}


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _closed(text: str) -> str:
    """Close a truncated JSON text after its last complete element."""
    ends: list[str] = []
    complete = ""
    end = 0
    for token in _JSON_TOKEN.finditer(text):
        if token[0] in "[{":
            ends.append("]" if token[0] == "[" else "}")
        elif token[0] in "]}" and ends:
            ends.pop()
            end, complete = token.end(), "".join(reversed(ends))
        elif token[0] == ",":
            end, complete = token.start(), "".join(reversed(ends))
    return text[:end] + complete


def flat(entry: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of an object and the objects in it."""
    for name, value in entry.items():
        if isinstance(value, dict) and before.count(".") < 4:
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def number_of(value: Any) -> float | None:
    """A finite number, also as text; None for anything else."""
    try:
        number = float(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        return None
    is_plain = number is not None and not isinstance(value, bool) and abs(number) < 1e20
    return number if is_plain else None
