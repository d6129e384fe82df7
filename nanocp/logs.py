"""Log lines on standard error: text or JSON, each with a UTC timestamp.

A record's fields (`extra=fields(...)`) follow a text as key=value; in JSON they are keys.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

_PACKAGES = ("nanocp", "control_plane", "data_plane")
"""Loggers that get the chosen level; libraries only warn."""


def configure(log_format: str, level: str, process: str = "") -> None:
    """Write every logger's lines to standard error; `process` names a member's process.

    log_format, level: of LOG_FORMATS and LOG_LEVELS in nanocp.config.service.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((_JsonLines if log_format == "json" else _TextLines)(process))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    set_level(level)


def set_level(level: str) -> None:
    """Set this process' log level, one of nanocp.config.service.LOG_LEVELS."""
    for package in _PACKAGES:
        logging.getLogger(package).setLevel(level.upper())


def get_level() -> str:
    """The level that this process logs from."""
    return logging.getLevelName(logging.getLogger(_PACKAGES[0]).getEffectiveLevel()).lower()


def fields(**values: Any) -> dict[str, Any]:
    """The `extra` of a record with these fields, without None."""
    return {"fields": {name: value for name, value in values.items() if value is not None}}


class _Lines(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        time = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        values: Mapping[str, Any] = getattr(record, "fields", {})
        return self.line(time, record, record.getMessage() + trace, values)

    def line(
        self, time: str, record: logging.LogRecord, message: str, values: Mapping[str, Any]
    ) -> str:
        raise NotImplementedError


class _TextLines(_Lines):
    def line(
        self, time: str, record: logging.LogRecord, message: str, values: Mapping[str, Any]
    ) -> str:
        source = self._process or record.name
        said = "".join(f" {name}={_shown(value)}" for name, value in values.items())
        return f"{time} {record.levelname} {source}: {message}{said}"


class _JsonLines(_Lines):
    def line(
        self, time: str, record: logging.LogRecord, message: str, values: Mapping[str, Any]
    ) -> str:
        head = {"time": time, "level": record.levelname.lower(), "logger": record.name}
        if self._process:
            head["process"] = self._process
        return json.dumps({**head, "message": message, **values}, default=str)


def _shown(value: object) -> str:
    text = str(value)
    is_plain = text.isprintable() and not set(text) & set(' "=')
    return text if is_plain and text else json.dumps(text)
