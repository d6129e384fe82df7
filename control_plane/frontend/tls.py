"""TLS at both APIs: one certificate, and clients' certificates if they are asked for.

Enters: file names. Leaves: what gRPC and uvicorn take. Does not know: ports, requests.
"""

from __future__ import annotations

import logging
import ssl
import stat
from pathlib import Path
from typing import Any

import grpc

from nanocp.service_config import ServiceConfig

logger = logging.getLogger(__name__)


def check_tls(service: ServiceConfig) -> None:
    """Raise ValueError, naming the key, for files that cannot be used; warn of an open key file."""
    if not service.ssl_certfile:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(service.ssl_certfile, service.ssl_keyfile)
        if service.ssl_ca_certs:
            context.load_verify_locations(service.ssl_ca_certs)
        mode = Path(service.ssl_keyfile).stat().st_mode
    except OSError as error:
        raise ValueError(
            f"ssl_certfile, ssl_keyfile or ssl_ca_certs cannot be used: {error.strerror or error}"
        ) from error
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        logger.warning("other users may read %s; chmod 600 it", service.ssl_keyfile)


def server_credentials(service: ServiceConfig) -> grpc.ServerCredentials | None:
    """Credentials of the gRPC port; None without TLS."""
    if not service.ssl_certfile:
        return None
    pair = Path(service.ssl_keyfile).read_bytes(), Path(service.ssl_certfile).read_bytes()
    roots = Path(service.ssl_ca_certs).read_bytes() if service.ssl_ca_certs else None
    return grpc.ssl_server_credentials(
        [pair], root_certificates=roots, require_client_auth=service.ssl_cert_reqs == 2
    )


def uvicorn_options(service: ServiceConfig) -> dict[str, Any]:
    """Options of the HTTP server; none without TLS."""
    if not service.ssl_certfile:
        return {}
    return {
        "ssl_keyfile": service.ssl_keyfile,
        "ssl_certfile": service.ssl_certfile,
        "ssl_ca_certs": service.ssl_ca_certs or None,
        "ssl_cert_reqs": service.ssl_cert_reqs,
    }
