"""Named segments in /dev/shm: owned by a living process, mapped by others, swept after its death.

The owner holds an exclusive flock until it ends, so a shared flock proves it dead. Three traps:

- A flock stays while any copy of its open file exists. So the lock has a descriptor of its own,
  which is never mapped, and a forked child closes it.
- A file that is visible before it is locked looks dead. So it gets its name last.
- A sparse file kills its writer when /dev/shm is full. So all pages are allocated at once.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import struct
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from data_plane.transport.exchange import ExchangeTimeout, PeerLost, Term
from data_plane.transport.futex import Word, require_platform

CACHE_LINE = 64
"""Alignment of everything in a segment, in bytes."""

DIRECTORY = Path("/dev/shm")

_CLUSTER_ID = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_NAME = re.compile(
    r"nanocp-(?P<cluster_id>[A-Za-z0-9_.-]+)-t(?P<term>[0-9]+)"
    r"-(exchange|gpu_memory[0-9]+|nixl_ep|deep_ep[0-9]+|nvshmem[0-9]+|prefill[0-9]+|pull|moves_from_[0-9]+|hidden_rows|pass_tokens)-(?P<instance>[0-9]+)"
)
_PREAMBLE = struct.Struct("<8sQ")  # magic, bytes of description
_MAGIC = b"nanocp\x00\x01"
_APPEAR_POLL_S = 0.01
_CLAIM = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 1, 0)


class NoRoom(ValueError):
    """/dev/shm is too small for a segment; the message says by how much, and the remedy."""


def aligned(num_bytes: int) -> int:
    """Round bytes up to a multiple of CACHE_LINE."""
    return -(-num_bytes // CACHE_LINE) * CACHE_LINE


def segment_name(cluster_id: str, term: int, kind: str, instance: int) -> str:
    """Return a segment's name in a term. Raises ValueError on an unusable cluster id."""
    if not _CLUSTER_ID.fullmatch(cluster_id):
        raise ValueError(
            f"cluster_id is {cluster_id!r}; it must be 1 to 100 letters, digits, '_', '.' or '-'"
        )
    return f"nanocp-{cluster_id}-t{term}-{kind}-{instance}"


def _header(description: str) -> bytes:
    text = description.encode()
    return (_PREAMBLE.pack(_MAGIC, len(text)) + text).ljust(
        aligned(_PREAMBLE.size + len(text)), b"\0"
    )


def _owner_is_alive(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def _map(fd: int) -> mmap.mmap:
    # Populated, so that the first step does not pay for thousands of page faults.
    return mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _map_apart(locked_fd: int) -> mmap.mmap:
    fd = os.open(f"/proc/self/fd/{locked_fd}", os.O_RDWR)
    try:
        return _map(fd)
    finally:
        os.close(fd)


class SegmentServer(Protocol):
    """The way into a segment for writers that cannot map it: tcp_server.TcpSegmentServer."""

    def is_attached(self, segment: str, writer: str) -> bool | None:
        """True while the writer is attached, None if it never was."""

    def send_word(self, segment: str, offset: int, value: int) -> None:
        """Send a word of the segment to its attached writers."""

    def withdraw(self, segment: OwnedSegment) -> None:
        """End the connections to the segment."""


class OwnedSegment:
    """A segment of this process: a header, then zeros. Other processes can attach once it is made.

    Contents begin at `data_offset`, a multiple of CACHE_LINE. Raises NoRoom, or ValueError if the
    name belongs to a living process.
    """

    def __init__(self, name: str, description: str, data_bytes: int) -> None:
        require_platform()
        header = _header(description)
        self.name = name
        self.description = description
        self.data_offset = len(header)
        self.server: SegmentServer | None = None
        self.served_words: tuple[Word, ...] = ()
        """Sent to a writer that attaches through the server."""
        self.bulk: Any = None
        """Memory for pages apart from the segment, uint8, if they come by NIXL."""
        self.grant = b""
        """The permission to write into `bulk`."""
        self.progress: Callable[[], None] | None = None
        """Must be called while a writer writes, if any."""
        self._lock_fd: int | None = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR, 0o600)
        try:
            _allocate(self._lock_fd, name, len(header) + data_bytes)
            os.pwrite(self._lock_fd, header, 0)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.memory = _map_apart(self._lock_fd)
            _link(self._lock_fd, name)
        except BaseException:
            os.close(self._lock_fd)
            raise
        _owned.add(self)

    def publish(self, word: Word, value: int) -> None:
        """Set a word that writers await, on every node."""
        word.store(value)
        if self.server is not None:
            self.server.send_word(self.name, word.offset, value)

    def is_attached(self, writer: str) -> bool | None:
        """True while a writer attached by the server is there; None if none did."""
        return None if self.server is None else self.server.is_attached(self.name, writer)

    def close(self) -> None:
        """Remove the name and give up the ownership. Idempotent; a no-op in a forked child."""
        if self._lock_fd is None:
            return
        if self.server is not None:
            self.server.withdraw(self)
        # The name goes first: no process may find a segment without an owner.
        _unlink(self.name)
        self.disown()

    def disown(self) -> None:
        """Give up the ownership and the mapping, but keep the name."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None
            del self.memory
            self.served_words = ()  # They are views, and would keep the memory.


_owned: weakref.WeakSet[OwnedSegment] = weakref.WeakSet()


def _disown_all() -> None:
    for segment in list(_owned):
        segment.disown()


os.register_at_fork(after_in_child=_disown_all)


def _allocate(fd: int, name: str, num_bytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG):
            raise
        raise NoRoom(f"{name} needs {_room(num_bytes)}") from error


def obstacle_to_more(cluster_id: str, num_instances: int) -> str:
    """Return why this machine has no room for this number of further instances; else empty."""
    sizes: Counter[tuple[str, str]] = Counter()
    for match in filter(None, map(_NAME.fullmatch, os.listdir(DIRECTORY))):
        if match["cluster_id"] == cluster_id:
            with suppress(FileNotFoundError):
                size = (DIRECTORY / match[0]).stat().st_size
                sizes[match["term"], match["instance"]] += size
    num_bytes = num_instances * max(sizes.values(), default=0)
    is_short = num_bytes > _free_bytes()
    return f"room for {num_instances} more: needed are {_room(num_bytes)}" if is_short else ""


def _free_bytes() -> int:
    status = os.statvfs(DIRECTORY)
    return status.f_bavail * status.f_frsize


def _room(num_bytes: int) -> str:
    return (
        f"{num_bytes / 2**20:.1f} MiB of {DIRECTORY}, which has {_free_bytes() / 2**20:.1f} MiB "
        "free: enlarge it (docker: --shm-size) or lower the cluster's bounds"
    )


def _link(fd: int, name: str) -> None:
    directory_fd = os.open(DIRECTORY, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # With dst_dir_fd, os.link follows the symbolic link under /proc.
        try:
            os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=directory_fd)
        except FileExistsError:
            if not _unlink_if_dead(name):
                raise ValueError(
                    f"{DIRECTORY / name} belongs to a living process; choose another cluster id "
                    "or stop that process"
                ) from None
            os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=directory_fd)
    finally:
        os.close(directory_fd)


class Segment(Protocol):
    """A segment of another process, in which this process writes its own places."""

    name: str
    description: str
    data_offset: int
    memory: mmap.mmap
    bulk: Any
    """Memory for pages apart from `memory`, uint8, if they go by NIXL; else None."""

    def publish(
        self,
        word: Word,
        value: int,
        chunks: Sequence[tuple[int, int]] = (),
        bulk: tuple[int, int] | None = None,
    ) -> None:
        """Set the word after all that was written to `memory`; lost if the owner is dead.

        chunks, bulk: (offset, bytes) of `memory` and `bulk` that must arrive.
        """

    def owner_is_alive(self) -> bool:
        """True while the owner's process lives."""

    def claim(self) -> bool:
        """Become the segment's only writer until this process ends; False if there is another."""

    def require(self, description: str) -> None:
        """Raise ValueError, naming the first line that differs, unless the description is equal."""
        require_description(self.name, self.description, description)

    def close(self) -> None:
        """Give up the segment. Idempotent."""


class PeerSegment(Segment):
    """An instance's segment on this node, mapped for reading and writing.

    Waits until it exists. Raises ExchangeTimeout, TermOver, PeerLost if its owner is dead,
    ValueError if another version made it.
    """

    def __init__(self, name: str, instance: int, timeout_ms: float, term: Term) -> None:
        require_platform()
        self.name = name
        self.bulk: Any = None
        self._fd: int | None = _open_when_there(name, instance, timeout_ms, term)
        try:
            if not _owner_is_alive(self._fd):
                raise PeerLost(f"the process that made {name} is gone", instance)
            self.description = _read_description(self._fd, name)
            self.data_offset = len(_header(self.description))
            self.memory = _map(self._fd)
        except BaseException:
            os.close(self._fd)
            raise

    def publish(
        self,
        word: Word,
        value: int,
        chunks: Sequence[tuple[int, int]] = (),
        bulk: tuple[int, int] | None = None,
    ) -> None:
        assert bulk is None, "the segment has no bulk"
        word.store(value)

    def owner_is_alive(self) -> bool:
        assert self._fd is not None, f"{self.name} is closed"
        return _owner_is_alive(self._fd)

    def claim(self) -> bool:
        assert self._fd is not None, f"{self.name} is closed"
        try:  # not flock, which proves the owner alive
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _CLAIM)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            del self.memory


def require_description(name: str, found: str, expected: str) -> None:
    """Raise ValueError, naming the first line that differs, unless both descriptions are equal."""
    lines = zip_longest(found.splitlines(), expected.splitlines(), fillvalue="nothing")
    for line, expected_line in lines:
        if line != expected_line:
            raise ValueError(
                f"{name} has '{line}' where this process has '{expected_line}': all processes of a "
                "cluster need the same model, dtype, wire form and bounds"
            )


def _open_when_there(name: str, instance: int, timeout_ms: float, term: Term) -> int:
    deadline = time.monotonic() + timeout_ms / 1000
    while True:
        try:
            return os.open(DIRECTORY / name, os.O_RDWR)
        except FileNotFoundError:
            if time.monotonic() >= deadline:
                raise ExchangeTimeout(
                    f"{DIRECTORY / name} did not appear in {timeout_ms:.0f} ms: its instance did "
                    "not start, or runs on another machine, which shared memory does not reach",
                    instance,
                ) from None
        term.check()
        time.sleep(_APPEAR_POLL_S)


def _read_description(fd: int, name: str) -> str:
    magic, num_bytes = _PREAMBLE.unpack(os.pread(fd, _PREAMBLE.size, 0))
    if magic != _MAGIC:
        raise ValueError(
            f"{DIRECTORY / name} was made by another version (magic {magic!r}, not {_MAGIC!r})"
        )
    return os.pread(fd, num_bytes, _PREAMBLE.size).decode()


def sweep_stale(cluster_prefix: str = "") -> list[str]:
    """Remove dead owners' segments whose cluster id has the prefix; returns their names."""
    matches = (_NAME.fullmatch(name) for name in sorted(os.listdir(DIRECTORY)))
    names = [
        match[0] for match in matches if match and match["cluster_id"].startswith(cluster_prefix)
    ]
    return [name for name in names if _unlink_if_dead(name)]


def unlink_cluster(cluster_id: str) -> list[str]:
    """Remove every segment of the cluster, also of living owners; returns the names."""
    matches = (_NAME.fullmatch(name) for name in sorted(os.listdir(DIRECTORY)))
    names = [match[0] for match in matches if match and match["cluster_id"] == cluster_id]
    return [name for name in names if _unlink(name)]


def is_owned(name: str) -> bool:
    """True if a living owner has a segment of this name; a dead one's is removed."""
    return not _unlink_if_dead(name)


def _unlink(name: str) -> bool:
    with suppress(FileNotFoundError):
        os.unlink(DIRECTORY / name)
        return True
    return False


def _unlink_if_dead(name: str) -> bool:
    """Remove a dead owner's segment; True if the name is free now."""
    try:
        fd = os.open(DIRECTORY / name, os.O_RDWR)
    except FileNotFoundError:
        return True
    except PermissionError:
        return False
    try:
        return not _owner_is_alive(fd) and _unlink(name)
    finally:
        os.close(fd)
