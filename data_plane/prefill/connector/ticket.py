"""An engine's ticket, to write a prompt's pages, and its answer, in `kv_transfer_params`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

KEY = "nanocp"
PROTOCOL = 3
"""Version of tickets and answers, equal on both sides."""

JSON = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EngineTicket:
    """One transfer, for the engine that computes its prompt."""

    cluster: str
    """Prefix of the rings' names."""
    term: int
    ticket: int
    num_tokens: int
    """Tokens of the engine's whole prompt."""
    targets: tuple[tuple[int, int, int], ...]
    """Runs of wanted pages (first page, number of pages, instance)."""
    peers: Mapping[int, tuple[str, str]]
    """(node, address) by instance, as of segments.Peer."""
    writer: int
    """Number of the engine's ring at each instance."""
    timeout_ms: int
    """Longest wait for a place in a ring."""
    page_backend: str
    """auto: shared memory within a node, else TCP. tcp: TCP always. nixl: NIXL."""
    kv_dtype: str
    num_layers: int
    """Layers of a page, with drafts the MTP layer too."""
    fingerprint: Mapping[str, str]
    engine: str
    """The engine's process, from its probe; empty in a probe."""

    def to_params(self) -> dict[str, Any]:
        """Return the ticket as a request's kv_transfer_params."""
        fields = asdict(self)
        fields["peers"] = {str(instance): peer for instance, peer in self.peers.items()}
        return {KEY: {"protocol": PROTOCOL, **fields}}

    @classmethod
    def from_params(cls, params: JSON) -> EngineTicket:
        """Read `to_params`'s value for KEY. Raises ValueError naming the fault."""
        fields = dict(params)
        if (protocol := fields.pop("protocol", None)) != PROTOCOL:
            raise ValueError(
                f"the request speaks protocol {protocol} and the connector {PROTOCOL}: install the "
                "same version of nanocp beside vLLM"
            )
        try:
            fields["targets"] = tuple((int(a), int(b), int(c)) for a, b, c in fields["targets"])
            fields["peers"] = {
                int(instance): (str(node), str(address))
                for instance, (node, address) in fields["peers"].items()
            }
            return cls(**fields)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"the request's ticket cannot be read: {error!r}") from error

    def instance_of(self, page: int) -> int | None:
        """Return the page's instance; None if it is not wanted."""
        for first, count, instance in self.targets:
            if first <= page < first + count:
                return instance
        return None


def accepted(num_pages: int, engine: str) -> dict[str, Any]:
    """Return the answer to a ticket whose pages are on their way."""
    return {KEY: {"num_pages": num_pages, "engine": engine}}


def refused(kind: str, reason: str) -> dict[str, Any]:
    """Return the answer to a ticket without pages.

    kind: `refused`; `busy`, another engine may take it; `restarted`, this process has passed no
    probe.
    """
    return {KEY: {kind: reason}}
