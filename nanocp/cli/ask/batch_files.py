"""Files of a batch in OpenAI's format: requests, answers and failures, a line each."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from nanocp.files.inputs import readable

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
"""Paths that a request may name."""


class BatchLine(NamedTuple):
    """One line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]


class BatchAnswer(NamedTuple):
    """The answer to one request."""

    custom_id: str
    status: int
    """HTTP status; 0 if no answer came."""
    request_id: str
    """X-Request-Id of the answer."""
    body: Any
    """JSON of the answer, or its text."""

    @property
    def is_success(self) -> bool:
        """True for an answer with output."""
        return self.status == 200

    def line(self) -> str:
        """A line of OpenAI's output and error files."""
        response = {
            "status_code": self.status,
            "request_id": self.request_id,
            "body": self.body,
        }
        values = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": self.custom_id,
            "response": response if self.status else None,
            "error": None
            if self.status
            else {"code": "connection_error", "message": str(self.body)},
        }
        return json.dumps(values, ensure_ascii=False) + "\n"


def read_requests(path: Path) -> Iterator[BatchLine]:
    """Requests of a file, without empty lines.

    Raises ValueError, naming the line and the field, at the first bad one.
    """
    seen: set[str] = set()
    try:
        with readable(path).open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        request = _request(line)
                        if request.custom_id in seen:
                            raise ValueError(
                                f"custom_id is {request.custom_id!r}, as in a line before; it must "
                                "be there once"
                            )
                    except ValueError as error:
                        raise ValueError(f"{path}, line {number}: {error}") from None
                    seen.add(request.custom_id)
                    yield request
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8: {error.reason}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def _request(line: str) -> BatchLine:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError("it must be a JSON object")
    custom_id, body = values.get("custom_id"), values.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError(f"custom_id is {custom_id!r}; it must be a text")
    if values.get("method") != "POST":
        raise ValueError(f"method is {values.get('method')!r}; it must be POST")
    if values.get("url") not in ENDPOINTS:
        raise ValueError(f"url is {values.get('url')!r}; it must be {' or '.join(ENDPOINTS)}")
    if not isinstance(body, dict):
        raise ValueError("body must be a JSON object")
    if body.get("stream"):
        raise ValueError("body.stream is true; an answer of a batch is one line")
    return BatchLine(custom_id, values["url"], body)


class BatchOutput:
    """Output and error files of a batch, which grow by whole lines."""

    def __init__(self, output: Path, errors: Path, resume: bool) -> None:
        """Open both files; `resume` keeps earlier answers, but no failures.

        Raises ValueError for an output without `resume`, a line that is no answer, or an unwritable
        file.
        """
        self.done: frozenset[str] = frozenset()
        """custom_ids that an earlier run has answered."""
        try:
            if resume and output.exists():
                self.done = _answered(output)
            self._output = output.open("a" if resume else "x", encoding="utf-8")
            self._errors = errors.open("w" if resume else "x", encoding="utf-8")
        except FileExistsError as error:
            raise ValueError(
                f"{error.filename} exists; go on with --resume, or give another name"
            ) from None
        except OSError as error:
            raise ValueError(f"{error.filename} cannot be written: {error.strerror}") from None

    def write(self, answer: BatchAnswer) -> None:
        """Append an answer's line, flushed. Raises OSError."""
        file: TextIO = self._output if answer.is_success else self._errors
        file.write(answer.line())
        file.flush()

    def close(self) -> None:
        """Close both files; remove an empty error file."""
        self._output.close()
        self._errors.close()
        errors = Path(self._errors.name)
        if errors.stat().st_size == 0:
            errors.unlink()


def _answered(path: Path) -> frozenset[str]:
    """custom_ids of a file's answers; a cut last line is removed."""
    answered: set[str] = set()
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                answered.add(json.loads(line)["custom_id"])
            except (ValueError, LookupError, TypeError):
                raise ValueError(f"{path}, line {number}: it is no answer of a batch") from None
            end += len(line)
    os.truncate(path, end)
    return frozenset(answered)
