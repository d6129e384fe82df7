"""What an engine is sent with a prompt, so that it can write the pages, and what it answers.

Enters: a transfer's ticket, where its pages go. Leaves: the same as JSON values, in the field
`kv_transfer_params` of a request. Does not know: HTTP, engines, rings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

KEY = "nanocp"
"""Our key in kv_transfer_params; other connectors have others."""
PROTOCOL = 3
"""Version of what is sent and answered; both sides must have the same."""

JSON = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EngineTicket:
    """One transfer, for the engine that computes its prompt."""

    cluster: str
    """Prefix of the names of the receivers' rings."""
    term: int
    """The term of these rings (protocol.md, terms)."""
    ticket: int
    num_tokens: int
    """Positions whose KV is wanted: 0 .. num_tokens - 1, the whole prompt that the engine gets."""
    targets: tuple[tuple[int, int, int], ...]
    """Runs of pages (first page, number of pages, instance); other pages are not wanted."""
    peers: Mapping[int, tuple[str, str]]
    """(node, address) by instance; see segments.Peer."""
    writer: int
    """The number of the ring that the engine writes at each instance."""
    timeout_ms: int
    """Longest wait for a place in a ring."""
    page_backend: str
    """auto: shared memory within a node, else TCP. tcp: TCP always. nixl: NIXL."""
    kv_dtype: str
    """DataPlaneConfig.kv_dtype: in what form pages are written."""
    num_layers: int
    """Layers of a page: the model's, and with drafts the MTP layer behind them."""
    fingerprint: Mapping[str, str]
    """What the model and the pages must be; see fingerprint.py."""
    engine: str
    """The engine's process, as its answer to the probe named it; empty in a probe."""

    def to_params(self) -> dict[str, Any]:
        """The ticket as a request's kv_transfer_params."""
        fields = asdict(self)
        fields["peers"] = {str(instance): peer for instance, peer in self.peers.items()}
        return {KEY: {"protocol": PROTOCOL, **fields}}

    @classmethod
    def from_params(cls, params: JSON) -> EngineTicket:
        """Read `to_params`'s value for KEY. Raises ValueError, saying what is wrong with it."""
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
        """The instance that the page goes to; None if it is not wanted."""
        for first, count, instance in self.targets:
            if first <= page < first + count:
                return instance
        return None


def accepted(num_pages: int, engine: str) -> dict[str, Any]:
    """The answer to a ticket whose pages are on their way. engine: see EngineTicket."""
    return {KEY: {"num_pages": num_pages, "engine": engine}}


def refused(kind: str, reason: str) -> dict[str, Any]:
    """The answer to a ticket for which no page is sent.

    kind: `refused`; `busy`, another engine may take it; `restarted`, this process has passed no
    probe.
    """
    return {KEY: {kind: reason}}
