"""How long a test waits for what must come, and how."""

import os
import time

WAIT_S = float(os.environ.get("NANOCP_TEST_WAIT_S", 120))
"""Longest wait of a test: shorter than a client may read nothing, and than a drain waits.

Mutants set less: there, what never comes is what a test must see.
"""


def until(condition, limit_s=WAIT_S):
    """Wait until the condition holds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
