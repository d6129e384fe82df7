"""The event log: every call of the scheduler, written as it happens, to be replayed.

It is a file of JSON lines, a Header and then Calls. A long log continues in LOG.part2, LOG.part3
and so on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal, Union, get_args

from pydantic import Discriminator, Tag, TypeAdapter, ValidationError
from pydantic_core import to_json

from nanocp.config.cluster import ClusterConfig
from nanocp.config.pipeline import PipelineConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.service import ServiceConfig
from nanocp.values.passes import ServiceEvent
from nanocp.values.plan import InstanceLost, Plan

logger = logging.getLogger(__name__)

VERSION = 1
"""Version of the file's format; a log of another version is refused."""
_BUFFER_BYTES = 1 << 16
_MAX_CALLS = 8192
"""Calls that may wait for the disk: at least half a minute of a busy service."""
_FLUSH_S = 1.0
"""Longest time for which a call stays in the buffer of a log that has a thread."""
_PART_BYTES = 1024 * 10**6
"""Size at which a service's log goes on in another part."""
_CLOSE_S = 2.0
"""Longest wait for the disk when a log that has a thread is closed."""


def _kind(entry: Any) -> str | None:
    return str(entry[0]) if isinstance(entry, list | tuple) and entry else None


if TYPE_CHECKING:
    _Entry = tuple[str, ServiceEvent]
else:
    # [name of the event's class, its fields]: some events differ in nothing but their class.
    _Entry = Annotated[
        Union[  # noqa: UP007 (of a list that is computed)
            tuple(
                Annotated[tuple[Literal[kind.__name__], kind], Tag(kind.__name__)]
                for kind in get_args(ServiceEvent)
            )
        ],
        Discriminator(_kind),
    ]


@dataclass(frozen=True, slots=True)
class Header:
    """The configuration of the scheduler."""

    __pydantic_config__ = {"extra": "forbid"}

    nanocp_event_log: int
    """VERSION."""
    cluster: ClusterConfig
    scheduler: SchedulerConfig
    wall_us: int = 0
    """Unix time at `now_us` 0, in us. 0: unknown, as in a simulation."""
    pipeline: PipelineConfig | None = None
    """None: the scheduler is for a cluster of instances."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the scheduler."""

    __pydantic_config__ = {
        "extra": "forbid",
        "ser_json_bytes": "base64",
        "val_json_bytes": "base64",
    }

    now_us: int
    events: list[_Entry]
    """(name of its class, event), in order."""
    plan: dict[str, int | str] | None
    """`digest` of the answer. None: the scheduler failed in this call."""


_HEADER = TypeAdapter(Header)
_CALL = TypeAdapter(Call)


_NEW_LAST = {"instances": 0, "placements": None}
"""Fields with a last element since drafts -> its value without drafts.

It is left out then, so that older logs replay.
"""


def digest(plan: Plan) -> dict[str, int | str]:
    """Digest a plan: its window, and 16 bytes (in hex) for each other field that is not empty.

    Digests are equal exactly for equal plans.
    """
    digests: dict[str, int | str] = {}
    for field in fields(plan):
        name, value = field.name, getattr(plan, field.name)
        if name == "window" and value is not None:
            digests[name] = value
        elif value:
            if name == "instances":
                value = [each[:-1] for each in value]  # the coordinator names the expert table
            if name in _NEW_LAST and all(each[-1] == _NEW_LAST[name] for each in value):
                value = [each[:-1] for each in value]
            if name == "pass_plan":
                value = value._replace(table=value.table[:-2])  # a pass has no drafts or table
            digests[name] = blake2b(to_json(value, bytes_mode="base64"), digest_size=16).hexdigest()
    return digests


class EventLog:
    """A log that is being written; if it fails, a warning says so and the service continues.

    Writes are buffered until `flush`, except a lost instance and a failed scheduler.
    """

    def __init__(
        self,
        path: Path,
        cluster: ClusterConfig,
        scheduler: SchedulerConfig,
        wall_us: int = 0,
        max_bytes: int = 0,
        pipeline: PipelineConfig | None = None,
    ) -> None:
        """Begin a log. An existing one is renamed by the time of its last write.

        wall_us, pipeline: see Header. max_bytes: size after which another part follows; 0: one
        part. Raises OSError if the log cannot be written, is no regular file, or is in use.
        """
        self._path = path
        self._max_bytes = max_bytes
        self._num_parts = 1
        self._has_calls = False
        self.num_missing = 0
        """At least this many calls are missing because the log could not be written."""
        header = Header(VERSION, cluster, scheduler, wall_us, pipeline)
        first_line = _HEADER.dump_json(header) + b"\n"
        try:
            self._first = _begun(path)
            try:
                self._first.write(first_line)
                self._file = path.open("ab", buffering=_BUFFER_BYTES)
            except OSError:
                path.unlink()
                self._first.close()
                raise
        except OSError as error:
            raise OSError(f"the event log {path} cannot be written: {error.strerror}") from error

    def write(self, now_us: int, events: Sequence[ServiceEvent], plan: Plan | None) -> None:
        """Write one call and its answer; no plan: the scheduler failed."""
        if self._file.closed:
            self.num_missing += 1
            return
        named = [(type(event).__name__, event) for event in events]
        call = Call(now_us, named, None if plan is None else digest(plan))
        line = _CALL.dump_json(call, exclude_defaults=True) + b"\n"
        self._has_calls = True
        try:
            self._file.write(line)
            if plan is None or any(isinstance(event, InstanceLost) for event in events):
                self._file.flush()
            if 0 < self._max_bytes <= self._file.tell():
                self._file.close()
                self._num_parts += 1
                self._file = _part(self._path, self._num_parts).open("ab", _BUFFER_BYTES)
        except OSError as error:
            self._end(error)

    def flush(self) -> None:
        """Write the buffer."""
        try:
            if not self._file.closed:
                self._file.flush()
        except OSError as error:
            self._end(error)

    def close(self) -> None:
        """Write the buffer and close, or remove an empty log. Idempotent."""
        if self._first.closed:
            return
        try:
            self._file.close()
            if not self._has_calls:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            self._end(error)
        self._first.close()

    def _end(self, error: OSError) -> None:
        logger.warning(
            "the event log %s ends here: %s; a restart begins another", self._path, error.strerror
        )
        self.num_missing += 1
        with contextlib.suppress(OSError):
            self._file.close()


class LogThread:
    """A thread that writes a log, so that a disk that hangs stops nobody.

    If too many calls wait for the disk, the log ends after them: one with a gap could not be
    replayed.
    """

    def __init__(self, log: EventLog, max_calls: int = _MAX_CALLS) -> None:
        self._log = log
        self._calls: queue.Queue[tuple[int, Sequence[ServiceEvent], Plan | None] | None] = (
            queue.Queue(max_calls)
        )
        self.num_dropped = 0
        """Calls that are missing because the disk was too slow."""
        self._thread = threading.Thread(target=self._run, name="event log", daemon=True)
        self._thread.start()

    @property
    def num_missing(self) -> int:
        """The number of missing calls, with a slow, full or broken disk."""
        return self.num_dropped + self._log.num_missing

    def write(self, now_us: int, events: Sequence[ServiceEvent], plan: Plan | None) -> None:
        """Queue one call and its answer; see EventLog.write. Never waits."""
        if self.num_dropped == 0:
            with contextlib.suppress(queue.Full):
                self._calls.put_nowait((now_us, events, plan))
                return
            logger.warning(
                "the event log ends here: the disk has not taken %d calls of the scheduler",
                self._calls.maxsize,
            )
        self.num_dropped += 1

    def close(self) -> None:
        """Write the queue, within a bounded time. Idempotent."""
        with contextlib.suppress(queue.Full):
            self._calls.put(None, timeout=_CLOSE_S)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.warning(
                "the event log is not complete: the disk left %d calls of the scheduler unwritten",
                self._calls.qsize() + self.num_dropped,
            )
        elif self.num_dropped:
            logger.warning("the event log lacks the last %d calls", self.num_dropped)

    def _run(self) -> None:
        flush_at_s = math.inf
        while True:
            left_s = flush_at_s - time.monotonic()
            try:
                if left_s <= 0:
                    raise queue.Empty
                call = self._calls.get(timeout=left_s if left_s < math.inf else None)
            except queue.Empty:
                self._log.flush()
                flush_at_s = math.inf
                continue
            if call is None:
                self._log.close()
                return
            self._log.write(*call)
            flush_at_s = min(flush_at_s, time.monotonic() + _FLUSH_S)


def _part(path: Path, number: int) -> Path:
    return path if number == 1 else path.with_name(f"{path.name}.part{number}")


def parts(path: Path) -> list[Path]:
    """Return the files of a log in order, at least the first."""
    found = [path]
    while (following := _part(path, len(found) + 1)).exists():
        found.append(following)
    return found


def _begun(path: Path) -> BinaryIO:
    """The file is locked while open; an earlier log is kept. Raises OSError."""
    if path.exists() and not path.is_file():  # to open a FIFO would wait for its reader
        raise OSError(errno.EINVAL, "it is no regular file; name a file, or a path that is free")
    while True:
        file = path.open("ab", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another service may have renamed it, or removed it, before it was locked.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    if file.tell() == 0:
                        return file
                    _keep(path)
        except BlockingIOError as error:
            file.close()
            raise OSError(
                error.errno, "another service writes it; give each service a file of its own"
            ) from error
        file.close()


def _keep(path: Path) -> None:
    at = datetime.fromtimestamp(parts(path)[-1].stat().st_mtime, UTC)
    kept, number = path.with_name(f"{path.name}.{at:%Y%m%dT%H%M%SZ}"), 1
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.name}.{at:%Y%m%dT%H%M%SZ}-{number}")
    for index, part in enumerate(parts(path), 1):
        part.rename(_part(kept, index))


def log_lines(
    path: Path,
    opened: Callable[[Path], contextlib.AbstractContextManager[Iterable[bytes]]] = lambda part: (
        part.open("rb")
    ),
) -> Iterator[bytes]:
    """Yield the lines of a log, part after part. `opened` opens a file. Raises OSError."""
    for part in parts(path):
        with opened(part) as file:
            yield from file


def open_event_log(
    service: ServiceConfig,
    cluster: ClusterConfig,
    scheduler: SchedulerConfig,
    wall_us: int,
    pipeline: PipelineConfig | None = None,
) -> LogThread | None:
    """Open the configured log, with a thread that writes it; None without one.

    wall_us, pipeline: see Header. Raises OSError if it cannot be written.
    """
    if not service.event_log:
        return None
    path = Path(service.event_log)
    return LogThread(EventLog(path, cluster, scheduler, wall_us, _PART_BYTES, pipeline))


class LogReader:
    """A log that is being read, as an iterator of its calls; then see `is_truncated`."""

    def __init__(self, lines: Iterable[bytes], name: str) -> None:
        """Read the header. name: the log's name in errors.

        Raises ValueError for a header of another version, or none.
        """
        self._lines = iter(lines)
        self._name = name
        self.is_truncated = False
        line = next(self._lines, b"")
        try:
            version = json.loads(line)["nanocp_event_log"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"{name} is no event log: it must begin with the line that --event-log writes"
            ) from None
        if version != VERSION:
            raise ValueError(
                f"{name} is an event log of version {version}; it must be of version {VERSION}"
            )
        self.header: Header = self._record(1, line, _HEADER)

    def __iter__(self) -> Iterator[Call]:
        """Yield the calls in order.

        Raises ValueError with a damaged record's number (the header is 1) and mistake.
        """
        for number, line in enumerate(self._lines, start=2):
            if not line.endswith(b"\n"):
                # A process that was killed while it wrote: everything before is whole.
                self.is_truncated = True
                return
            yield self._record(number, line, _CALL)

    def _record(self, number: int, line: bytes, adapter: TypeAdapter[Any]) -> Any:
        try:
            return adapter.validate_json(line, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            reason = f"{where}: {first['msg']}" if where else first["msg"]
            raise ValueError(f"{self._name}, record {number}: {reason}") from error
