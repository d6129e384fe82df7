"""API keys: which clients a service with keys answers.

Enters: keys, a call's header. Leaves: yes or no; for gRPC also the refusal. Does not know: HTTP,
what is asked.

Clients send a key as `Authorization: Bearer KEY`, over HTTP and in gRPC's metadata.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

logger = logging.getLogger(__name__)

REFUSED = (
    "an API key is required, as `Authorization: Bearer KEY`; the request has none, or not one of "
    "this service's"
)
_LOOK_S = 1.0
"""Least time between two looks at the file of keys."""
_MAX_USER = 128
"""Characters of a user's name that count."""
_GUARDED = ("/nanocp.v1.Inference/", "/nanocp.v1.Control/")


class ApiKeys:
    """The keys in service.api_keys and api_keys_file. Without any, every client is answered."""

    def __init__(self, keys: Sequence[str], file: str = "") -> None:
        """file: see ServiceConfig.api_keys_file. Raises ValueError if it has no keys to be used."""
        self._own = tuple(_digest(key) for key in keys)
        self._file = Path(file) if file else None
        self._stamp: tuple[int, int] | None = None
        self._looked_s = 0.0
        self._all = self._own
        if self._file is not None:
            self._stamp = _stamp(self._file)
            self._all += _keys_in(self._file)

    @property
    def _digests(self) -> tuple[bytes, ...]:
        """Digests of the keys that are valid now."""
        now_s = time.monotonic()
        if self._file is not None and now_s - self._looked_s > _LOOK_S:
            self._looked_s = now_s
            stamp = _stamp(self._file)
            if stamp != self._stamp:
                self._stamp = stamp
                self._read_again(self._file)
        return self._all

    def _read_again(self, file: Path) -> None:
        """Take the keys of the changed file; the former ones stay if it has none to be used."""
        try:
            self._all = self._own + _keys_in(file)
        except ValueError as error:
            logger.warning("the former API keys stay: %s", error)
        else:
            logger.info("%s has changed; valid API keys: %d", file, len(self._all))

    def tenant(self, authorization: str | None, user: str = "") -> str:
        """Whose request it is: the digest of its key; without keys the user that it names."""
        if not self._digests:
            return user[:_MAX_USER]
        return _digest((authorization or "").partition(" ")[2]).hex()[:16]

    def admit(self, authorization: str | None) -> bool:
        """Whether a client that sends this header is answered.

        Takes as long for a nearly right key as for a wrong one.
        """
        if not self._digests:
            return True
        scheme, _, key = (authorization or "").partition(" ")
        found = [hmac.compare_digest(_digest(key), digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(found)


def _stamp(file: Path) -> tuple[int, int] | None:
    """What changes when the file does; None if there is none."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


def _keys_in(file: Path) -> tuple[bytes, ...]:
    """Digests of the file's keys. Raises ValueError if it has none, or one that cannot be."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"api_keys_file {file} cannot be read: {error}") from error
    keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
    if not keys or not all(key.isascii() and key.isprintable() for key in keys):
        raise ValueError(
            f"api_keys_file {file} must have an API key in each line, of printable ASCII, and at "
            "least one; lines that begin with # do not count"
        )
    return tuple(map(_digest, keys))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class RequireApiKey(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls of the clients' services without a key.

    Other services, such as health, need none: probes have no key.
    """

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> grpc.RpcMethodHandler | None:
        """See grpc.aio.ServerInterceptor."""
        metadata = dict(handler_call_details.invocation_metadata or ())
        if not handler_call_details.method.startswith(_GUARDED) or self._keys.admit(
            metadata.get("authorization")
        ):
            return await continuation(handler_call_details)

        async def refuse(request: bytes, context: grpc.aio.ServicerContext) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSED)

        return grpc.unary_unary_rpc_method_handler(refuse)
