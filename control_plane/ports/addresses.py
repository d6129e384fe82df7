"""Addresses at which members and clients reach this machine."""

from __future__ import annotations

import ipaddress
import socket

from nanocp.config.service import ServiceConfig

_EVERY_INTERFACE = ("0.0.0.0", "::")
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that no machine has (RFC 5737, RFC 3849): only the route to them is looked up."""


def advertised_host(service: ServiceConfig) -> str:
    """Return the host that other machines dial: service.advertised_host, else service.host.

    Every interface becomes the address of the default route. The machine's own name may be a
    loopback address, as on Debian.
    """
    if service.advertised_host or service.host not in _EVERY_INTERFACE:
        return service.advertised_host or service.host
    family = socket.AF_INET6 if service.host == "::" else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ELSEWHERE[family], 9))
            return str(probe.getsockname()[0])
        except OSError:
            return str(socket.getaddrinfo(socket.gethostname(), None, family)[0][4][0])


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server at this host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def join(host: str, port: int) -> str:
    """Return host:port, or [host]:port for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
