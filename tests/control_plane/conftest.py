"""Clients of these tests wait as long as their tests do: a busy machine answers late."""

from httpx._config import DEFAULT_TIMEOUT_CONFIG

from harness.serve_process import WAIT_S

# The one that `httpx.get` and the others have as their default; it is 5 s.
for phase in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, phase, float(WAIT_S))
