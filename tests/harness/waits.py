"""How long a test waits for what must come."""

import os

WAIT_S = float(os.environ.get("NANOCP_TEST_WAIT_S", 120))
"""Longest wait of a test: shorter than a client may read nothing, and than a drain waits.

Mutants set less: there, what never comes is what a test must see.
"""
