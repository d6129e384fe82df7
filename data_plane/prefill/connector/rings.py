"""An engine's writers into the rings of instances, of any cluster that asks it.

Clusters come and go: a writer to a dead receiver is dropped.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence
from typing import Any

from data_plane.kv.page_ring import PageRingWriter, prefill_ring
from data_plane.prefill.connector.ticket import EngineTicket
from data_plane.transport.exchange import Term
from data_plane.transport.nixl.pages import NixlAgent
from data_plane.transport.segments import Segments
from nanocp.config.limits import LimitsConfig
from nanocp.values.members import Peer

_ATTACH_MS = 2_000


class PageWriters:
    """Writers of rings, opened at first use. For one thread."""

    def __init__(self, allowed: Sequence[str]) -> None:
        """allowed: networks that may be dialled, such as 10.0.0.0/8; empty: this host alone.

        Raises ValueError for one that is no network.
        """
        self._networks = [ipaddress.ip_network(network) for network in allowed]
        self._writers: dict[tuple[Any, ...], PageRingWriter] = {}
        self._nixl: dict[str, NixlAgent] = {}

    def write(
        self,
        ticket: EngineTicket,
        instance: int,
        *,
        page: int,
        num_tokens: int,
        payload: Any,
        is_cancelled: Callable[[], bool],
    ) -> bool:
        """Write a page as soon as there is a place; False if `is_cancelled` ended the wait.

        Raises PeerLost, ExchangeTimeout, or ValueError if the receiver may not be dialled, has
        another writer, or takes pages of another size.
        """
        return self._writer(ticket, instance).write(
            ticket=ticket.ticket,
            page=page,
            num_tokens=num_tokens,
            payload=payload,
            timeout_ms=ticket.timeout_ms,
            is_cancelled=is_cancelled,
        )

    def close(self) -> None:
        """Close every writer. Idempotent."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _writer(self, ticket: EngineTicket, instance: int) -> PageRingWriter:
        if instance not in ticket.peers:
            raise ValueError(f"ticket {ticket.ticket} does not say where instance {instance} is")
        where = ticket.peers[instance]
        key = (ticket.cluster, ticket.term, ticket.writer, instance, where)
        writer = self._writers.get(key)
        if writer is not None and writer.receiver_is_alive():
            return writer
        for stale in [key for key in self._writers if not self._writers[key].receiver_is_alive()]:
            self._writers.pop(stale).close()
        self._writers[key] = self._open(ticket, instance)
        return self._writers[key]

    def _open(self, ticket: EngineTicket, instance: int) -> PageRingWriter:
        if ticket.page_backend == "nixl" and ticket.cluster not in self._nixl:
            self._nixl[ticket.cluster] = NixlAgent(f"{ticket.cluster} engine {ticket.writer}")
        nixl = self._nixl.get(ticket.cluster)
        is_tcp = ticket.page_backend == "tcp"
        term = Term(ticket.term)
        segments = Segments(ticket.cluster, is_always_tcp=is_tcp, nixl=nixl, term=term)
        peers = [Peer("", "")] * (max(ticket.peers) + 1)
        for number, peer in ticket.peers.items():
            peers[number] = Peer(*peer)
        segments.meet(peers)
        if nixl is not None or not segments.is_shared(instance):
            self._require_allowed(peers[instance].address)
        limits = LimitsConfig(start_timeout_ms=_ATTACH_MS)
        return PageRingWriter(segments, instance, limits, prefill_ring(ticket.writer))

    def _require_allowed(self, address: str) -> None:
        host = address.rpartition(":")[0].strip("[]")
        try:
            ip = ipaddress.ip_address(host)
        except ValueError:
            raise ValueError(f"an instance is at {address!r}, which is no IP address") from None
        if self._networks:
            is_allowed = any(ip in network for network in self._networks)
        else:
            is_allowed = _is_own(host)
        if not is_allowed:
            raise ValueError(
                f"an instance is at {address}, which this engine may not dial; allow its network "
                'in --kv-transfer-config: "kv_connector_extra_config": {"allowed": ["..."]}'
            )


def _is_own(host: str) -> bool:
    """True for an address of this host: only such a one can be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
        return True
