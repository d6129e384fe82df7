"""Prompts' KV, read by NIXL from the memory of vLLM servers, checked, and cut into pages.

vLLM may free blocks whose lease has ended, and a read of them succeeds. It writes layer 0 of a
block first. So layer 0 is read again after all layers, and both readings must be equal; and it must
be the KV of the prompt's tokens, which is recomputed. Only then a page leaves this file.

Legend: L layers, S = 64, W width of KV.
"""

from __future__ import annotations

import ipaddress
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from data_plane.model.attention_kinds.gqa import GqaConfig
from data_plane.prefill.connector.paged_kv import PagedKv
from data_plane.prefill.pages import payload_of
from data_plane.prefill.probe import kv_error
from data_plane.prefill.pull.first_layer import FirstLayer
from data_plane.prefill.pull.holds import KvChanged
from data_plane.prefill.pull.kv_shape import KvShape
from data_plane.prefill.pull.side_channel import EngineMemory, allowed_address, shake_hands
from data_plane.transport.exchange import ExchangeError, ExchangeTimeout
from data_plane.transport.nixl.pages import NixlAgent, Place
from nanocp.values.plan import PAGE_SIZE
from nanocp.values.remote_blocks import RemoteBlocks

_STAGING_BYTES = 64 << 20
_LIMIT_S = 10.0
"""Longest time of one read, of at most _STAGING_BYTES."""
_MAX_ABANDONED = 4
"""Most reads that have not ended in time, each with its memory."""


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
        self._abandoned: list[tuple[Place, Any]] = []
        """Memory of reads that did not end in time."""
        self.staging(0)

    def meet(self, blocks: RemoteBlocks) -> RemoteEngine:
        """Shake hands with rank 0 of the engine, unless a connection to it can be used.

        Blocks for up to 5 s. Raises ValueError for what the client or the operator must mend,
        ConnectionError if the engine cannot be reached now.
        """
        address = allowed_address(blocks.host, self._networks)
        if (engine := self._usable(blocks)) is not None:
            return engine
        memory = shake_hands(address, blocks, 0)
        with self._lock:
            # Another name of it may have been met meanwhile.
            if (engine := self._usable(blocks)) is None:
                if older := self._engines.pop(blocks.engine_id, None):
                    older.close()
                engine = RemoteEngine(self, address, blocks, memory)
                self._engines[blocks.engine_id] = engine
        return engine

    def _usable(self, blocks: RemoteBlocks) -> RemoteEngine | None:
        engine = self._engines.get(blocks.engine_id)
        if engine is None or (engine.generation or 0) < (blocks.generation or 0):
            return None
        return engine if engine.is_usable else None

    def staging(self, least: int) -> tuple[Any, Place]:
        """Return registered memory of at least this many bytes, uint8, and its place.

        Raises ConnectionError if reads of hung engines have taken all that there may be.
        """
        if self._staging is None or self._staging[1].num_bytes < least:
            self._abandoned = [each for each in self._abandoned if not self._is_over(*each)]
            if len(self._abandoned) == _MAX_ABANDONED:
                raise ConnectionError(f"{_MAX_ABANDONED} reads of engines have not ended")
            self._staging = self.agent.allocate(max(least, _STAGING_BYTES))
            self._staging[0].fill(0)  # else the first read waits for the system to clear it
        return self._staging

    def abandon(self, place: Place, read: Any) -> None:
        """Leave staging memory to a read that goes on: the next read gets other memory."""
        if self._staging is not None and self._staging[1] == place:
            self._staging = None
            self._abandoned.append((place, read))

    def _is_over(self, place: Place, read: Any) -> bool:
        try:
            if not self.agent.is_done(read, "an old read by NIXL", -1):
                return False
            self.agent.discard(read)
        except ExchangeError:
            pass  # Its engine is gone.
        self.agent.release(place)
        return True

    def close(self) -> None:
        """Close every engine. Idempotent."""
        with self._lock:
            for engine in self._engines.values():
                engine.close()
            self._engines.clear()


class RemoteEngine:
    """An engine whose memory is known.

    Only clients say how many ranks it has, and a vLLM that is asked for another answers nobody any
    more. So rank 1 and above are met once a prompt that names them was read right from rank 0.
    """

    def __init__(
        self, reader: EngineReader, address: str, blocks: RemoteBlocks, memory: EngineMemory
    ) -> None:
        """Connect to rank 0. address: its IP address. blocks: any of its own. memory: rank 0's.

        Raises ValueError for memory that does not fit the model, ConnectionError.
        """
        self.generation = blocks.generation
        self._reader, self._address = reader, address
        self._name = f"the engine at {blocks.host}:{blocks.port}"
        self._size, self._block_bytes = memory.block_size, memory.block_lens[0]
        self._ratio = memory.physical_blocks_per_logical_kv_block
        self._num_blocks = min([memory.num_blocks, *(memory.region_num_blocks or ())])
        self._order: str | None = None
        """The order of K/V heads in a block; None: no prompt was right yet."""
        self._lock = threading.Lock()
        self._ranks: dict[str, Any] = {}
        """Peer -> NIXL's blocks of the layers that are read: layer * num_blocks + block."""
        self._is_closed = False
        self.is_usable = True
        """False: the engine must be met again."""
        self._connect(memory)

    def _connect(self, memory: EngineMemory) -> None:
        regions = self._reader.shape.check(memory)
        self._num_layers = len(regions)
        agent, kind = self._reader.agent, (memory.region_mem_types or ["VRAM"])[0]
        bases, strides = memory.kv_caches_base_addr, memory.block_strides
        runs = [
            (bases[each], self._block_bytes, memory.device_id, strides[each], self._num_blocks)
            for each in regions
        ]
        peer = agent.add_peer(memory.agent_metadata)
        self._ranks[peer] = None
        try:
            with self._named():
                self._ranks[peer] = agent.blocks(runs, kind, peer)
            # A notification of an agent that has read nothing waits for a connection, which only
            # further calls would complete.
            _, place = agent.allocate(self._block_bytes)
            self._read(peer, place, np.zeros(1), np.zeros(1))
        except ConnectionError:
            self.close()
            raise
        agent.release(place)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except ExchangeError as error:
            raise ConnectionError(f"{self._name}: {error}") from error

    def check(self, blocks: RemoteBlocks) -> None:
        """Raise ValueError if the blocks cannot be those of a prompt at this engine."""
        has_heads = isinstance(self._reader.shape.model.attention, GqaConfig)
        if (has_heads or self._order is not None) and blocks.tp_size != len(self._ranks):
            why = "a rank has only some K/V heads" if has_heads else "as with earlier prompts"
            raise ValueError(f"tp_size is {blocks.tp_size}; it must be {len(self._ranks)}: {why}")
        needed = -(-blocks.num_tokens // (self._size * self._ratio))
        if len(blocks.block_ids) < needed:
            raise ValueError(
                f"remote_block_ids has {len(blocks.block_ids)} blocks; {blocks.num_tokens} tokens "
                f"need {needed}"
            )
        most = self._num_blocks // self._ratio
        if not all(0 <= block < most for block in blocks.block_ids):
            raise ValueError(f"remote_block_ids must be from 0 to {most - 1}, the engine's blocks")

    def notify(self, text: str) -> None:
        """Send a notification to every known rank. Raises ConnectionError once one is gone."""
        for peer in list(self._ranks):
            with self._named():
                self._reader.agent.notify(peer, text)

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
        KvChanged, and ValueError for a rank that does not fit the model.
        """
        shape, size, num_areas = self._reader.shape, self._size, self._num_layers + 1
        per_page = -(-(size + PAGE_SIZE - math.gcd(size, PAGE_SIZE)) // size)
        staging, place = self._reader.staging(num_areas * per_page * self._block_bytes)
        capacity = place.num_bytes // self._block_bytes // num_areas
        data = torch.from_numpy(staging[: num_areas * capacity * self._block_bytes])
        areas = data.view(num_areas, capacity, self._block_bytes)
        page = torch.zeros(shape.model.num_kept_layers, PAGE_SIZE, shape.width, dtype=shape.dtype)
        orders = shape.orders(size) if self._order is None else [self._order]
        kvs = {
            order: PagedKv(
                [shape.views(area.view(shape.dtype), size, order) for area in areas[:-1]],
                size,
                page,
            )
            for order in orders
        }
        edges, num_pages = {wanted[0], wanted[-1]}, capacity // per_page
        # KV of a page depends on all tokens before it: of pages that are not wanted, since others
        # have them, layer 0 is compared too.
        asked = set(wanted)
        others = [number for number in range(wanted[-1]) if number not in asked]
        parts = [
            (numbers[begin : begin + num_pages], num_layers)
            for numbers, num_layers in ((others, 1), (list(wanted), self._num_layers))
            for begin in range(0, len(numbers), num_pages)
        ]
        for numbers, num_layers in parts:
            ends = {number: min(PAGE_SIZE, num_tokens - number * PAGE_SIZE) for number in numbers}
            where: dict[int, int] = {}
            for number, end in ends.items():
                first = number * PAGE_SIZE
                for block in range(first // size, -(-(first + end) // size)):
                    where.setdefault(block, len(where))
            self._stage(blocks, list(where), place, capacity, num_layers, obstacle)
            if not torch.equal(areas[0, : len(where)], areas[-1, : len(where)]):
                raise KvChanged(f"{self._name} has written blocks while they were read")
            begin = min(where)
            near = [0] * begin + [where.get(block, 0) for block in range(begin, max(where) + 1)]
            order = self._order_of(kvs, near, ends, edges, token_ids)
            for rank in range(len(self._ranks), blocks.tp_size):
                self._connect(shake_hands(self._address, blocks, rank))
            self._order, kvs = order, {order: kvs[order]}
            for number, end in ends.items() if numbers[0] in asked else ():
                kv_LSW = kvs[order].read(near, number, end, len(page))
                yield number, end, payload_of(kv_LSW, shape.fp8_rank).reshape(-1)

    def close(self) -> None:
        """Disconnect from every rank, once a read has ended. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed, self.is_usable = True, False
                for peer in self._ranks:
                    self._reader.agent.remove_peer(peer)

    def _order_of(
        self,
        kvs: Mapping[str, PagedKv],
        near: Sequence[int],
        ends: Mapping[int, int],
        edges: Collection[int],
        token_ids: Sequence[int],
    ) -> str:
        """Return the order in which layer 0 of pages is that of the prompt.

        What a position changes of a token's KV is compared in edges, and once in each block.
        """
        layer, dtype, error = self._reader.first_layer, self._reader.shape.dtype, None
        at = [number * PAGE_SIZE + row for number in ends for row in range(ends[number])]
        step = min(self._size, PAGE_SIZE)
        moved = [n for n, each in enumerate(at) if each // PAGE_SIZE in edges or each % step == 0]
        unmoved = layer.unmoved_kv([token_ids[position] for position in at]).float()
        positions = [at[n] for n in moved]
        expected = layer.kv([token_ids[position] for position in positions], positions).float()
        for order, kv in kvs.items():
            pages = [kv.read(near, each, ends[each], 1)[0, : ends[each]].clone() for each in ends]
            found = torch.cat(pages).float()
            error = kv_error(found[:, layer.unmoved], unmoved, dtype, is_first_layer=True)
            error = error or kv_error(found[moved], expected, dtype, is_first_layer=True)
            if error is None:
                return order
        raise KvChanged(
            f"the blocks of {self._name} hold other KV than the prompt's: layer 0 is off by "
            f"{error}; they were freed, or weights, dtype or layout differ"
        )

    def _stage(
        self,
        blocks: RemoteBlocks,
        wanted: Sequence[int],
        place: Place,
        capacity: int,
        num_layers: int,
        obstacle: Callable[[], str],
    ) -> None:
        """Read blocks of the first layers to their places, and then layer 0 once more."""
        ids, ratio = blocks.block_ids, self._ratio
        peer = list(self._ranks)[ids[0] % len(self._ranks)]
        far = np.array([ids[block // ratio] * ratio + block % ratio for block in wanted])
        near, layer_L1 = np.arange(len(far)), np.arange(num_layers)[:, None]
        for into, remote in (
            (layer_L1 * capacity + near, layer_L1 * self._num_blocks + far),
            (self._num_layers * capacity + near, far),
        ):
            self._read(peer, place, into.ravel(), remote.ravel())
            if sentence := obstacle():
                raise KvChanged(sentence)

    def _read(self, peer: str, place: Place, into: np.ndarray, remote: np.ndarray) -> None:
        """Read blocks by number into blocks of a place by number, and wait."""
        agent, what, size = self._reader.agent, f"{len(into)} blocks by NIXL", self._block_bytes
        with self._lock, self._named():
            if self._is_closed:
                raise ConnectionError(f"{self._name} is met again, or given up")
            run = (place.address, size, place.device, size, place.num_bytes // size)
            local = agent.blocks([run], place.kind)
            read = agent.prepare_read(
                local, into.astype(np.int32), self._ranks[peer], remote.astype(np.int32)
            )
            agent.post(read, what, -1)
            try:
                agent.finish(read, what, -1, lambda: True, _LIMIT_S)
            except ExchangeTimeout:
                self._reader.abandon(place, read)
                raise
            agent.discard(read)
