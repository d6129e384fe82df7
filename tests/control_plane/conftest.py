"""Clients of these tests wait as long as their tests do: a busy machine answers late."""

from functools import cache

from httpx._config import DEFAULT_TIMEOUT_CONFIG
from httpx._transports import default

from harness.services.serve_process import WAIT_S

# The one that `httpx.get` and the others have as their default; it is 5 s.
for phase in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, phase, float(WAIT_S))
# Each `httpx.get` would read the certificates of all authorities anew, though it sends plain HTTP.
default.create_ssl_context = cache(default.create_ssl_context)
