"""Page rings and page moves within one process, for tests.

Between processes, kv/page_ring.py and kv/peer_rings.py do the same.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np

from data_plane.kv.page_ring import ArrivedPage
from nanocp.values.plan import PAGE_SIZE


class LocalPageRing:
    """Pages within one process."""

    def __init__(self) -> None:
        self._pages: deque[ArrivedPage] = deque()
        self.is_cut = False
        """Whether its connection has ended, which the receiver can see; pages get lost then."""

    def __len__(self) -> int:
        return len(self._pages)

    def put(self, ticket: int, page: int, content: np.ndarray, num_tokens: int = PAGE_SIZE) -> None:
        """A page arrives: its KV entries, uint64."""
        self._pages.append(
            ArrivedPage(
                ticket=ticket, page=page, num_tokens=num_tokens, payload=content.view(np.uint8)
            )
        )

    def arrived(self) -> Iterator[ArrivedPage]:
        """See PageSource."""
        while self._pages:
            yield self._pages[0]
            self._pages.popleft()

    def close(self) -> None:
        """Forget what is there."""
        self._pages.clear()


class LocalPeerRings:
    """Moves within one process. `room` pages at most wait between two instances."""

    def __init__(
        self, instance: int, rings: dict[tuple[int, int], LocalPageRing], room: int = 2
    ) -> None:
        """rings: (source, destination) -> ring, shared by all instances."""
        self._instance = instance
        self._rings = rings
        self._room = room

    def connect(self) -> None:
        """See PageMover."""

    def arrived(self) -> Iterator[Iterator[ArrivedPage]]:
        """See PageMover."""
        return (
            ring.arrived()
            for (_, destination), ring in self._rings.items()
            if destination == self._instance
        )

    def has_lost(self, peer: int) -> bool:
        """See PageMover."""
        return self._rings[peer, self._instance].is_cut

    def has_place(self, peer: int) -> bool:
        """See PageMover."""
        return len(self._rings[self._instance, peer]) < self._room

    def send(
        self, peer: int, *, ticket: int, page: int, num_tokens: int, payload: np.ndarray
    ) -> None:
        """See PageMover."""
        if not (ring := self._rings[self._instance, peer]).is_cut:
            ring.put(ticket, page, payload, num_tokens)

    def close(self) -> None:
        """See PageMover."""


def local_peer_rings(num_instances: int) -> list[LocalPeerRings]:
    """One for each instance, connected."""
    pairs = [(i, j) for i in range(num_instances) for j in range(num_instances) if i != j]
    rings = {pair: LocalPageRing() for pair in pairs}
    return [LocalPeerRings(instance, rings) for instance in range(num_instances)]
