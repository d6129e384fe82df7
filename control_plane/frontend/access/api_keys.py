"""Keys of clients and operators, over HTTP and gRPC.

They come as `Authorization: Bearer KEY`, `x-api-key: KEY`, or both.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from nanocp.config.service import ServiceConfig

logger = logging.getLogger(__name__)

REFUSED = (
    "an API key is required, as `Authorization: Bearer KEY` or `x-api-key: KEY`; the request has "
    "none, or two, or not one of this service's"
)
_LOOK_S = 1.0
"""Least time between two looks at the file of keys."""
_MAX_USER = 128
"""Characters of a user's name that count."""


class ApiKeys:
    """The keys in service.api_keys and api_keys_file. Without any, every client is answered."""

    field = "api_keys_file"
    """Setting that names the file."""

    def __init__(self, keys: Sequence[str], file: str = "", salts_by_key: bool = False) -> None:
        """file, salts_by_key: see ServiceConfig. Raises ValueError for a file without keys."""
        self.salts_by_key = salts_by_key
        """Whether tenants share no cached KV."""
        self._own = tuple(_digest(key) for key in keys)
        self._file = Path(file) if file else None
        self._stamp: tuple[int, int] | None = None
        self._looked_s = 0.0
        self._of_file: dict[bytes, str] = {}
        if self._file is not None:
            self._stamp = _stamp(self._file)
            self._of_file = self._keys_in(self._file)

    @property
    def _digests(self) -> tuple[bytes, ...]:
        now_s = time.monotonic()
        if self._file is not None and now_s - self._looked_s > _LOOK_S:
            self._looked_s = now_s
            stamp = _stamp(self._file)
            if stamp != self._stamp:
                self._stamp = stamp
                self._read_again(self._file)
        return (*self._own, *self._of_file)

    def _read_again(self, file: Path) -> None:
        """Read the changed file; keep the former keys if it has no valid ones."""
        try:
            self._of_file = self._keys_in(file)
        except ValueError as error:
            logger.warning("the former keys stay: %s", error)
        else:
            num_keys = len(self._own) + len(self._of_file)
            logger.info("%s has changed; valid keys: %d (%s)", file, num_keys, self.field)

    def _keys_in(self, file: Path) -> dict[bytes, str]:
        """Return digest -> name of the file's keys. Raises ValueError for none, or a wrong one."""
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.field} {file} cannot be read: {error}") from error
        lines = [line for each in lines if (line := each.strip()) and not line.startswith("#")]
        if not lines or not all(line.isascii() and line.isprintable() for line in lines):
            raise ValueError(
                f"{self.field} {file} must have a key in each line, of printable ASCII, and at "
                "least one; lines that begin with # do not count"
            )
        return {_digest(key): name for name, key in map(self._parts_of, lines)}

    def _parts_of(self, line: str) -> tuple[str, str]:
        return "", line

    def tenant(self, headers: Mapping[str, str], user: str = "") -> str:
        """Return the digest of the request's key; without keys its user."""
        if not self._digests:
            return user[:_MAX_USER]
        return _digest(_key_in(headers)).hex()[:16]

    def admit(self, headers: Mapping[str, str]) -> bool:
        """Return whether a client that sends these headers is answered.

        headers: HTTP's or a call's metadata, found by names in lower case.
        """
        digests = self._digests
        return not digests or self._found(headers, digests) is not None

    def _found(self, headers: Mapping[str, str], digests: Sequence[bytes]) -> bytes | None:
        """Return the digest of the headers' key, if it is one of these, in constant time."""
        given = _digest(_key_in(headers))
        found = [digest for digest in digests if hmac.compare_digest(given, digest)]
        return found[0] if found else None


class OperatorKeys(ApiKeys):
    """The keys in service.operator_keys_file, for people who see and change the whole cluster.

    A service with any keys asks for one.
    """

    field = "operator_keys_file"

    def __init__(self, service: ServiceConfig) -> None:
        """Raises ValueError if the file has no valid keys."""
        super().__init__((), service.operator_keys_file)
        self._has_keys = service.has_keys
        self._is_public = service.public_status

    def _parts_of(self, line: str) -> tuple[str, str]:
        """The key is the last word, after the operator's name."""
        name, _, key = line.rpartition(" ")
        return name.strip() or f"operator {_digest(key).hex()[:8]}", key

    def who(self, headers: Mapping[str, str]) -> str | None:
        """Return the name of the operator that sends these headers; None for others.

        Without keys everyone is an operator, without a name.
        """
        if not self._has_keys:
            return ""
        found = self._found(headers, self._digests)
        return None if found is None else self._of_file[found]

    def admit(self, headers: Mapping[str, str]) -> bool:
        """Return whether the sender may read metrics and the cluster's data."""
        return self._is_public or self.who(headers) is not None


def _key_in(headers: Mapping[str, str]) -> str:
    """Return the key that the headers give; empty, as no key is, if they give none or two."""
    own = headers.get("x-api-key", "")
    scheme, _, key = (headers.get("authorization") or f"Bearer {own}").partition(" ")
    return key if scheme.lower() == "bearer" and own in ("", key) else ""


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
