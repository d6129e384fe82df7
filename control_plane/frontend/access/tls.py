"""TLS at both APIs: one certificate, and clients' certificates if configured."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import stat
from pathlib import Path
from typing import Any

import grpc

from nanocp.config.service import ServiceConfig

logger = logging.getLogger(__name__)

_RENEW_S = 2.0
"""Time between two looks at the files of the certificate."""


def check_tls(service: ServiceConfig) -> None:
    """Raise ValueError, naming the key, for unusable files; warn of an open key file."""
    if not service.ssl_certfile:
        return
    _check_files(service)
    if Path(service.ssl_keyfile).stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        logger.warning("other users may read %s; chmod 600 it", service.ssl_keyfile)


def _check_files(service: ServiceConfig) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate, key, roots = service.ssl_certfile, service.ssl_keyfile, service.ssl_ca_certs
    what = ""
    try:
        for name, file in (("certfile", certificate), ("keyfile", key), ("ca_certs", roots)):
            if file:
                what = f"ssl_{name} {file} cannot be read"
                Path(file).read_bytes()
        what = f"ssl_certfile {certificate} and ssl_keyfile {key} cannot be used together"
        context.load_cert_chain(certificate, key)
        if roots:
            what = f"ssl_ca_certs {roots} has no certificates that can be used"
            context.load_verify_locations(roots)
    except OSError as error:
        raise ValueError(f"{what}: {error.strerror or error}") from error


class RenewedFiles:
    """Notices that the certificate or its key was renewed. Each user has its own."""

    def __init__(self, service: ServiceConfig) -> None:
        self._service = service
        self._stamps = self._now()

    def have_changed(self) -> bool:
        """Return whether the files have changed since the last call, and are a usable pair."""
        stamps = self._now()
        if stamps == self._stamps:
            return False
        self._stamps = stamps
        try:
            _check_files(self._service)
        except ValueError as error:
            logger.warning("the former certificate stays: %s", error)
            return False
        return True

    def _now(self) -> tuple[int, ...]:
        service = self._service
        return tuple(
            map(_changed_ns, (service.ssl_keyfile, service.ssl_certfile, service.ssl_ca_certs))
        )


def _changed_ns(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns if path else 0
    except OSError:
        return 0


def server_credentials(service: ServiceConfig) -> grpc.ServerCredentials | None:
    """Return credentials of the gRPC port, with renewal; None without TLS."""
    if not service.ssl_certfile:
        return None
    renewed = RenewedFiles(service)
    return grpc.dynamic_ssl_server_credentials(
        _grpc_configuration(service),
        # gRPC asks at each new connection; None: the latest stays.
        lambda: _grpc_configuration(service) if renewed.have_changed() else None,
        require_client_authentication=service.ssl_cert_reqs == 2,
    )


def _grpc_configuration(service: ServiceConfig) -> Any:
    pair = Path(service.ssl_keyfile).read_bytes(), Path(service.ssl_certfile).read_bytes()
    roots = Path(service.ssl_ca_certs).read_bytes() if service.ssl_ca_certs else None
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)


async def renew_for_ever(service: ServiceConfig, context: ssl.SSLContext) -> None:
    """Load renewed certificates into the HTTP server's context, for new connections."""
    renewed = RenewedFiles(service)
    while True:
        await asyncio.sleep(_RENEW_S)
        if renewed.have_changed():
            # If they change once more meanwhile, the next look finds them.
            with contextlib.suppress(OSError):
                context.load_cert_chain(service.ssl_certfile, service.ssl_keyfile)
                logger.info("%s was renewed", service.ssl_certfile)


def uvicorn_options(service: ServiceConfig) -> dict[str, Any]:
    """Return options of the HTTP server; none without TLS."""
    if not service.ssl_certfile:
        return {}
    return {
        "ssl_keyfile": service.ssl_keyfile,
        "ssl_certfile": service.ssl_certfile,
        "ssl_ca_certs": service.ssl_ca_certs or None,
        "ssl_cert_reqs": service.ssl_cert_reqs,
    }
