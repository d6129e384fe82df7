"""The slots of one instance: memory and a file for pages outside the frames (KV offload)."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from hashlib import blake2b
from typing import IO, Any

import numpy as np

from data_plane.kv.huge_pages import huge_pages
from nanocp.config.scheduler import SchedulerConfig

logger = logging.getLogger(__name__)

_CHECKSUM_BYTES = 8
_DISK_S = 5.0
"""A disk that takes longer for a page hangs, and its file is abandoned."""


class Slots:
    """Slots 0 to num_host - 1 are in memory, the others in a file. For one thread.

    If the disk hangs, the file and its pages are given up.
    """

    def __init__(self, num_host: int, num_file: int, page_bytes: int, file_dir: str) -> None:
        """Raises ValueError if memory or disk is too small, or the directory takes no file."""
        self._num_host = num_host
        self._page_bytes = page_bytes
        try:
            memory = huge_pages(max(1, num_host * page_bytes), is_taken=True)
        except OSError as error:
            raise ValueError(
                f"kv_offload.host_gib: {num_host * page_bytes:,} bytes of memory cannot be taken "
                f"({error.strerror})"
            ) from error
        self.memory = memory[: num_host * page_bytes].reshape(num_host, page_bytes)
        """[slots in memory, page_bytes] uint8."""
        self.copy: Callable[[Any, np.ndarray], None] = _copy
        """Copies a page that `write` is given into a slot of `memory`."""
        self._checksums: dict[int, bytes] = {}
        self._file: IO[bytes] | None = None
        self._has_warned = False
        self._is_given_up = False
        if num_file:
            try:
                # It has no name: nothing is left of it when the process ends, however it does.
                self._file = tempfile.TemporaryFile(dir=file_dir, prefix="nanocp-kv-")  # noqa: SIM115
                os.posix_fallocate(self._file.fileno(), 0, num_file * page_bytes)
            except OSError as error:
                self.close()
                raise ValueError(
                    f"kv_offload.file_dir is {file_dir!r}: no file of {num_file * page_bytes:,} "
                    f"bytes can be made there ({error.strerror})"
                ) from error

    @classmethod
    def of(cls, scheduler: SchedulerConfig, file_dir: str, page_bytes: int) -> Slots | None:
        """Make an instance's slots; None without kv_offload. Raises what the constructor raises."""
        num_host, num_file = scheduler.offload_host_pages, scheduler.offload_file_pages
        if not num_host:
            return None
        return cls(num_host, num_file, page_bytes, file_dir)

    def write(self, slot: int, payload: Any) -> bool:
        """Put a page into a slot; False if the file cannot take it, as on a full disk.

        payload: uint8 [page_bytes]; for a slot in memory, as `copy` takes it.
        """
        if slot < self._num_host:
            self.copy(payload, self.memory[slot])
            return True
        assert self._file is not None
        try:
            file, offset = self._file.fileno(), self._offset(slot)
            num_bytes = self._in_time(lambda: os.pwrite(file, payload.data, offset))
        except OSError as error:
            self._warn(f"a page could not be written: {error.strerror}")
            return False
        self._checksums[slot] = _checksum(payload)
        return num_bytes == self._page_bytes

    def read(self, slot: int) -> np.ndarray | None:
        """Return a slot's page, uint8 [page_bytes], perhaps a view; None if it is lost."""
        if slot < self._num_host:
            page: np.ndarray = self.memory[slot]
            return page
        assert self._file is not None
        payload = np.empty(self._page_bytes, np.uint8)
        try:
            file, offset = self._file.fileno(), self._offset(slot)
            num_bytes = self._in_time(lambda: os.preadv(file, [payload.data], offset))
        except OSError as error:
            self._warn(f"a page could not be read: {error.strerror}")
            return None
        if num_bytes < self._page_bytes or _checksum(payload) != self._checksums.get(slot):
            self._warn("a page is not what was written; it is computed again")
            return None
        return payload

    def close(self) -> None:
        """Delete the file. Idempotent."""
        if self._file is not None and not self._is_given_up:  # else to close it would hang too
            self._file.close()

    def _in_time(self, call: Callable[[], int]) -> int:
        """Return a system call's result. Raises OSError, also if the disk hangs or has hung."""
        if self._is_given_up:
            raise OSError(errno.ETIMEDOUT, "the disk hung")
        answer: Future[int] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except OSError as error:
                answer.set_exception(error)

        # No pool: a process would wait for its threads at the end.
        threading.Thread(target=run, name="page file", daemon=True).start()
        try:
            return answer.result(_DISK_S)
        except TimeoutError:
            self._is_given_up = True
            sentence = f"the disk hangs for {_DISK_S:g} s, so the tier is given up until a restart"
            raise OSError(errno.ETIMEDOUT, sentence) from None

    def _offset(self, slot: int) -> int:
        return (slot - self._num_host) * self._page_bytes

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            logger.warning("the file of kv_offload: %s; later failures are not logged", what)
            self._has_warned = True


def _copy(payload: np.ndarray, place: np.ndarray) -> None:
    place.reshape(payload.shape)[...] = payload


def _checksum(payload: np.ndarray) -> bytes:
    return blake2b(payload.data, digest_size=_CHECKSUM_BYTES).digest()
