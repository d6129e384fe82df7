"""gRPC metadata of a member's calls: its name and its secret."""

from __future__ import annotations

NAME = "nanocp-member"
SECRET = "nanocp-secret"


def member_metadata(name: str, secret: str) -> tuple[tuple[str, str], ...]:
    """Metadata for every call of the member to the controller and to the front ends."""
    return ((NAME, name), (SECRET, secret))
