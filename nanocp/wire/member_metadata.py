"""How a member says which it is, and proves it: two entries in the metadata of each of its calls.

Enters: a member's name and secret. Leaves: metadata for gRPC. Does not know: who makes secrets, who
checks them.
"""

from __future__ import annotations

NAME = "nanocp-member"
SECRET = "nanocp-secret"


def member_metadata(name: str, secret: str) -> tuple[tuple[str, str], ...]:
    """Metadata for every call of the member to the controller and to the front ends."""
    return ((NAME, name), (SECRET, secret))
