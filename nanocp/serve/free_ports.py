"""Free ports for code that must know its ports before binding them."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_ports(number: int = 1, host: str = "127.0.0.1") -> int:
    """The first of `number` consecutive ports that are free at the host now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        with ExitStack() as stack:
            first = 0
            try:
                for offset in range(number):
                    probe = stack.enter_context(socket.socket(family))
                    probe.bind((host, first + offset if first else 0))
                    first = first or int(probe.getsockname()[1])
            except (OSError, OverflowError):
                continue
            return first
