"""Links between stages of a pipeline in different processes: rings (page_ring.py) of messages."""

from __future__ import annotations

import numpy as np
import torch

from data_plane.kv.page_ring import ArrivedPage, PageRing, PageRingWriter
from data_plane.transport.exchange import PeerLost
from data_plane.transport.segments import Segments
from data_plane.transport.stage_links import HiddenRows, PassTokens, StageLinks
from nanocp.config.limits import LimitsConfig

_HIDDEN, _TOKENS = "hidden_rows", "pass_tokens"
_TOKEN_WORDS = 2
"""u64 words of a token: request id, token id."""
RING_FRAMES = 64
"""Frames of one layer in a ring of KV; a busy stage reads its rings only between layers."""


def places_of(max_in_flight: int) -> int:
    """Return the places of a ring of hidden rows for these passes in flight."""
    return max_in_flight + 2


class RingStageLinks(StageLinks):
    """One stage's links, for one thread; a ring has a place for every pass in flight."""

    def __init__(
        self,
        segments: Segments,
        stage: int,
        num_stages: int,
        max_pass_tokens: int,
        row: torch.Tensor,
        limits: LimitsConfig,
        max_in_flight: int | None = None,
    ) -> None:
        """row: a hidden row of zeros. max_in_flight: of passes; None: one for each stage."""
        self._segments, self._stage, self._num_stages = segments, stage, num_stages
        self._row, self._limits = row, limits
        self._own_tokens: list[PassTokens] = []
        self._ring: PageRing | None = None
        self._writer: PageRingWriter | None = None
        if num_stages > 1:
            row_bytes = _TOKEN_WORDS * 8 if stage == 0 else row.nbytes
            kind = _TOKENS if stage == 0 else _HIDDEN
            places = places_of(max_in_flight or num_stages)
            self._ring = PageRing.create(segments, stage, places, max_pass_tokens * row_bytes, kind)

    def connect(self) -> None:
        if self._num_stages > 1:
            target = (self._stage + 1) % self._num_stages
            kind = _TOKENS if target == 0 else _HIDDEN
            self._writer = PageRingWriter(
                self._segments, target, self._limits, kind, may_be_short=True
            )

    def wait(self, timeout_ms: float) -> None:
        if self._ring is not None:
            self._ring.wait(timeout_ms)

    def close(self) -> None:
        for end in (self._writer, self._ring):
            if end is not None:
                end.close()

    def send_hidden(self, rows: HiddenRows) -> None:
        payload = rows.rows.contiguous().view(torch.uint8).flatten().numpy()
        self._write(rows.number, rows.layout << 32 | rows.next_layer, len(rows.rows), payload)

    def receive_hidden(self) -> HiddenRows | None:
        page = self._take()
        if page is None:
            return None
        payload = torch.from_numpy(page.payload)
        layout, next_layer = divmod(page.page, 1 << 32)
        rows = payload.view(self._row.dtype).view(page.num_tokens, len(self._row))
        return HiddenRows(page.ticket, layout, next_layer, rows)

    def send_tokens(self, tokens: PassTokens) -> None:
        if self._writer is None:
            self._own_tokens.append(tokens)
            return
        payload = np.array(tokens.tokens, np.uint64).reshape(-1)
        self._write(tokens.number, 0, len(tokens.tokens), payload)

    def receive_tokens(self) -> PassTokens | None:
        if self._ring is None:
            return self._own_tokens.pop(0) if self._own_tokens else None
        page = self._take()
        if page is None:
            return None
        words = page.payload.view(np.uint64).reshape(-1, _TOKEN_WORDS).tolist()
        return PassTokens(page.ticket, tuple((request, token) for request, token in words))

    def _write(self, ticket: int, page: int, count: int, payload: np.ndarray) -> None:
        assert self._writer is not None, "not connected"
        self._writer.write(
            ticket=ticket,
            page=page,
            num_tokens=count,
            payload=payload,
            timeout_ms=self._limits.exchange_timeout_ms,
        )

    def _take(self) -> ArrivedPage | None:
        """Return the next message, copied, or None; PeerLost if none can come."""
        assert self._ring is not None
        is_lost = self._ring.has_lost_writer
        arrived = self._ring.arrived()
        page = next(arrived, None)
        if page is None:
            if is_lost:
                source = (self._stage - 1) % self._num_stages
                raise PeerLost(
                    f"stage {self._stage} waits for stage {source}, from which its connection has "
                    "ended",
                    source,
                )
            return None
        page = page._replace(payload=page.payload.copy())
        next(arrived, None)  # the place is free from here on
        return page
