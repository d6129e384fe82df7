"""Prompts' KV, read by NIXL from the memory of vLLM servers, checked, and cut into pages.

vLLM may free blocks whose lease has ended, and a read of them succeeds. It writes layer 0 of a
block first. So layer 0 is read again after all layers, and both readings must be equal; and it must
be the KV of the prompt's tokens, which is recomputed. Only then a page leaves this file.

Legend: L layers, S = 64, W width of KV.
"""

from __future__ import annotations

import ipaddress
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from data_plane.model.attention_kinds.gqa import GqaConfig
from data_plane.prefill.connector.paged_kv import PagedKv
from data_plane.prefill.pages import payload_of
from data_plane.prefill.pull.first_layer import FirstLayer
from data_plane.prefill.pull.kv_shape import KvShape
from data_plane.prefill.pull.side_channel import EngineMemory, allowed_address, shake_hands
from data_plane.transport.exchange import ExchangeError, ExchangeTimeout
from data_plane.transport.nixl.pages import NixlAgent, Place
from nanocp.values.plan import PAGE_SIZE
from nanocp.values.remote_blocks import RemoteBlocks

_STAGING_BYTES = 64 << 20
_LIMIT_S = 10.0
"""Longest time of one read, of at most _STAGING_BYTES."""


class KvChanged(RuntimeError):
    """The blocks do not hold the KV of the prompt, or no longer."""


class ReadStopped(RuntimeError):
    """The caller's obstacle ended the reading."""


class EngineReader:
    """Reads prompts' KV from the memory of engines. One `pages` of all its engines runs at a time.

    `meet` and `notify` may be called from other threads meanwhile.
    """

    def __init__(
        self, name: str, allowed: Sequence[str], shape: KvShape, first_layer: FirstLayer
    ) -> None:
        """name: of the NIXL agent, unique in the cluster. allowed: networks that may be dialled.

        Raises what NixlAgent raises.
        """
        self.agent = NixlAgent(name)
        self.shape, self.first_layer = shape, first_layer
        self._networks = [ipaddress.ip_network(network) for network in allowed]
        self._engines: dict[str, RemoteEngine] = {}
        self._lock = threading.Lock()
        self._staging: tuple[Any, Place] | None = None
        self.staging(0)

    def meet(self, blocks: RemoteBlocks) -> RemoteEngine:
        """Shake hands with every rank of the engine; an older RemoteEngine of it is closed.

        Blocks for up to 5 s a rank. Raises ValueError for what the client or the operator must
        mend, ConnectionError if the engine cannot be reached now.
        """
        address = allowed_address(blocks.host, self._networks)
        if blocks.tp_size > 1 and isinstance(self.shape.model.attention, GqaConfig):
            raise ValueError(
                f"tp_size is {blocks.tp_size}; it must be 1 for a model with K/V heads, of which a "
                "rank has only some"
            )
        memories = shake_hands(address, blocks)
        with self._lock:
            if older := self._engines.pop(blocks.engine_id, None):
                older.close()
            engine = self._engines[blocks.engine_id] = RemoteEngine(self, blocks, memories)
        return engine

    def staging(self, least: int) -> tuple[Any, Place]:
        """Return registered memory of at least this many bytes, uint8, and its place."""
        if self._staging is None or self._staging[1].num_bytes < least:
            self._staging = self.agent.allocate(max(least, _STAGING_BYTES))
            self._staging[0].fill(0)  # else the first read waits for the system to clear it
        return self._staging

    def abandon(self, place: Place) -> None:
        """Leave staging memory to a read that goes on: the next read gets other memory."""
        if self._staging is not None and self._staging[1] == place:
            self._staging = None

    def close(self) -> None:
        """Close every engine. Idempotent."""
        with self._lock:
            for engine in self._engines.values():
                engine.close()
            self._engines.clear()


class _Rank(NamedTuple):
    peer: str
    blocks: Any
    """NIXL's, of the layers that are read: layer * num_blocks + block."""


class _Chunk(NamedTuple):
    """Pages that are read together."""

    ends: dict[int, int]
    """Page -> its tokens."""
    places: dict[int, int]
    """Block, counted from the prompt's begin -> its place in the staging memory."""


class RemoteEngine:
    """An engine whose memory is known."""

    def __init__(
        self, reader: EngineReader, blocks: RemoteBlocks, memories: Sequence[EngineMemory]
    ) -> None:
        """Connect to every rank. blocks: any of the engine's. memories: by rank.

        Raises ValueError for memory that does not fit the model, ConnectionError.
        """
        first = memories[0]
        self.generation = blocks.generation
        self._reader, self._memory = reader, first
        self._name = f"the engine at {blocks.host}:{blocks.port}"
        self._size, self._block_bytes = first.block_size, first.block_lens[0]
        self._ratio = first.physical_blocks_per_logical_kv_block
        self._num_blocks = min([first.num_blocks, *(first.region_num_blocks or ())])
        self._order: str | None = None
        self._lock = threading.Lock()
        self._ranks: list[_Rank] = []
        self._is_closed = False
        try:
            for memory in memories:
                self._connect(memory)
        except (ValueError, ExchangeError) as error:
            self.close()
            if isinstance(error, ValueError):
                raise
            raise ConnectionError(f"{self._name}: {error}") from error

    def _connect(self, memory: EngineMemory) -> None:
        regions = self._reader.shape.check(memory)
        self._num_layers = len(regions)
        agent, kind = self._reader.agent, (memory.region_mem_types or ["VRAM"])[0]
        peer = agent.add_peer(memory.agent_metadata)
        self._ranks.append(_Rank(peer, None))
        bases, strides = memory.kv_caches_base_addr, memory.block_strides
        runs = [
            (bases[each], self._block_bytes, memory.device_id, strides[each], self._num_blocks)
            for each in regions
        ]
        self._ranks[-1] = rank = _Rank(peer, agent.blocks(runs, kind, peer))
        # A notification of an agent that has read nothing waits for a connection, which only
        # further calls would complete.
        _, place = agent.allocate(self._block_bytes)
        self._read(rank, place, np.zeros(1), np.zeros(1), str)
        agent.release(place)

    def check(self, blocks: RemoteBlocks) -> None:
        """Raise ValueError if the blocks cannot be those of a prompt at this engine."""
        most = self._num_blocks // self._ratio
        needed = -(-blocks.num_tokens // (self._size * self._ratio))
        if blocks.tp_size != len(self._ranks):
            raise ValueError(
                f"tp_size is {blocks.tp_size}; it must be {len(self._ranks)}, as in earlier blocks "
                "of this engine"
            )
        if len(blocks.block_ids) < needed:
            raise ValueError(
                f"remote_block_ids has {len(blocks.block_ids)} blocks; {blocks.num_tokens} tokens "
                f"need {needed}"
            )
        if not all(0 <= block < most for block in blocks.block_ids):
            raise ValueError(f"remote_block_ids must be from 0 to {most - 1}, the engine's blocks")

    def notify(self, text: str) -> None:
        """Send a notification to every rank. Raises ConnectionError if one is gone."""
        lost = None
        for rank in self._ranks:
            try:
                self._reader.agent.notify(rank.peer, text)
            except ExchangeError as error:
                lost = error
        if lost is not None:
            raise ConnectionError(f"{self._name}: {lost}") from lost

    def pages(
        self,
        blocks: RemoteBlocks,
        token_ids: Sequence[int],
        num_tokens: int,
        wanted: Sequence[int],
        obstacle: Callable[[], str],
    ) -> Iterator[tuple[int, int, Any]]:
        """Yield (page, tokens in it, payload uint8) of each wanted page, ascending, checked.

        A payload is valid until the next. token_ids: of the prompt, num_tokens of which are wanted.
        obstacle: asked after each read; a sentence ends the reading. Raises ConnectionError,
        KvChanged, ReadStopped.
        """
        if num_tokens > blocks.num_tokens:
            raise KvChanged(
                f"{self._name} has {blocks.num_tokens} tokens of the prompt, and {num_tokens} are "
                "wanted"
            )
        shape, num_areas = self._reader.shape, self._num_layers + 1
        least = num_areas * (PAGE_SIZE // self._size + 2) * self._block_bytes
        staging, place = self._reader.staging(least)
        capacity = place.num_bytes // self._block_bytes // num_areas
        data = torch.from_numpy(staging[: num_areas * capacity * self._block_bytes])
        areas = data.view(num_areas, capacity, self._block_bytes)
        page = torch.zeros(shape.model.num_kept_layers, PAGE_SIZE, shape.width, dtype=shape.dtype)

        def paged(order: str, num_layers: int) -> PagedKv:
            layers = [
                shape.views(area.view(shape.dtype), self._size, order)
                for area in areas[:num_layers]
            ]
            return PagedKv(layers, self._size, page)

        for chunk in self._chunks(wanted, num_tokens, capacity):
            self._stage(blocks, chunk, place, capacity, obstacle)
            num = len(chunk.places)
            if not torch.equal(areas[0, :num], areas[-1, :num]):
                raise KvChanged(f"{self._name} has written blocks while they were read")
            where = [chunk.places.get(block, 0) for block in range(max(chunk.places) + 1)]
            edges = {wanted[0], wanted[-1]}
            # Whoever takes a block writes its first token first.
            positions = [
                position
                for number, end in chunk.ends.items()
                for position in range(number * PAGE_SIZE, number * PAGE_SIZE + end)
                if number in edges or position % min(self._size, PAGE_SIZE) == 0
            ]
            self._check_rows(chunk, where, token_ids, positions, paged)
            assert self._order is not None
            kv = paged(self._order, self._num_layers)
            for number, end in chunk.ends.items():
                kv_LSW = kv.read(where, number, end, len(page))
                yield number, end, payload_of(kv_LSW, shape.fp8_rank).reshape(-1)

    def close(self) -> None:
        """Disconnect from every rank, once a read has ended. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                for rank in self._ranks:
                    self._reader.agent.remove_peer(rank.peer)

    def _chunks(self, wanted: Sequence[int], num_tokens: int, capacity: int) -> Iterator[_Chunk]:
        chunk = _Chunk({}, {})
        for page in wanted:
            end = min((page + 1) * PAGE_SIZE, num_tokens)
            more = range(page * PAGE_SIZE // self._size, -(-end // self._size))
            if chunk.ends and len(chunk.places.keys() | more) > capacity:
                yield chunk
                chunk = _Chunk({}, {})
            chunk.ends[page] = end - page * PAGE_SIZE
            for block in more:
                chunk.places.setdefault(block, len(chunk.places))
        if chunk.ends:
            yield chunk

    def _check_rows(
        self,
        chunk: _Chunk,
        where: Sequence[int],
        token_ids: Sequence[int],
        positions: Sequence[int],
        paged: Callable[[str, int], PagedKv],
    ) -> None:
        """Compare layer 0 at some positions; the first time this finds the order in a block."""
        layer, error = self._reader.first_layer, ""
        expected = layer.kv([token_ids[position] for position in positions], positions)
        orders = self._reader.shape.orders(self._size) if self._order is None else [self._order]
        for order in orders:
            first = paged(order, 1)
            pages = {
                number: first.read(where, number, end, 1)[0].clone()
                for number, end in chunk.ends.items()
            }
            rows = [pages[position // PAGE_SIZE][position % PAGE_SIZE] for position in positions]
            error = layer.error(torch.stack(rows), expected) or ""
            if not error:
                self._order = order
                return
        raise KvChanged(
            f"the blocks of {self._name} hold other KV than the prompt's: layer 0 is off by "
            f"{error}; they were freed, or weights, dtype or layout differ"
        )

    def _stage(
        self,
        blocks: RemoteBlocks,
        chunk: _Chunk,
        place: Place,
        capacity: int,
        obstacle: Callable[[], str],
    ) -> None:
        """Read blocks of all layers to their places, and then layer 0 once more behind them."""
        ids, ratio = blocks.block_ids, self._ratio
        rank = self._ranks[zlib.crc32(blocks.request_id.encode()) % len(self._ranks)]
        far = np.array([ids[block // ratio] * ratio + block % ratio for block in chunk.places])
        near, layer_L1 = np.arange(len(far)), np.arange(self._num_layers)[:, None]
        for into, remote in (
            (layer_L1 * capacity + near, layer_L1 * self._num_blocks + far),
            (self._num_layers * capacity + near, far),
        ):
            try:
                self._read(rank, place, into.ravel(), remote.ravel(), obstacle)
            except ExchangeError as error:
                if isinstance(error, ExchangeTimeout):
                    self.close()
                raise ConnectionError(f"{self._name}: {error}") from error

    def _read(
        self,
        rank: _Rank,
        place: Place,
        into: np.ndarray,
        remote: np.ndarray,
        obstacle: Callable[[], str],
    ) -> None:
        """Read blocks by number into blocks of a place by number, and wait."""
        agent, what = self._reader.agent, f"{len(into)} blocks of {rank.peer} by NIXL"
        size = self._block_bytes
        with self._lock:
            if self._is_closed:
                raise ConnectionError(f"{self._name} is met again, or given up")
            run = (place.address, size, place.device, size, place.num_bytes // size)
            local = agent.blocks([run], place.kind)
            read = agent.prepare_read(
                local, into.astype(np.int32), rank.blocks, remote.astype(np.int32)
            )
            agent.post(read, what, -1)
            try:
                agent.finish(read, what, -1, lambda: True, _LIMIT_S)
            except ExchangeTimeout:
                self._reader.abandon(place)
                raise
            agent.discard(read)
        if sentence := obstacle():
            raise ReadStopped(sentence)
