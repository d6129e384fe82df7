"""An engine like vLLM around the connector's real halves: blocks, chunks, preemption, prefix hits.

Its KV is that of a HashModel, so each page can be compared with one cut from the dense KV. A block
that was freed is overwritten by the next step, so a page that is read too late or too early shows.
"""

import pickle
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from data_plane.prefill.connector.paged_kv import PagedKv
from data_plane.prefill.connector.requests import PagePart, TicketedRequests
from data_plane.prefill.connector.rings import PageWriters
from data_plane.prefill.connector.sender import PageSender
from harness.hash_clusters.hash_model import HashModel
from nanocp.values.plan import PAGE_SIZE

POISON = 0xDEAD
NUM_BLOCKS = 256
SAMPLED = 1


@dataclass
class Request:
    """A prompt in the engine."""

    request_id: str
    token_ids: tuple[int, ...]
    params: dict[str, Any]
    ended: Callable[[dict[str, Any] | None], None]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    is_new: bool = True
    is_resumed: bool = False


class FakeVllm:
    """One engine, one step at a time; only `add` and `abort` may come from other threads."""

    def __init__(self, block_size: int, places: PageWriters, seed: int,
                 chunk_tokens: tuple[int, int] = (1, 200), preempted_share: float = 0.0,
                 model: HashModel | None = None, fingerprint: dict[str, str] | None = None,
                 max_held_blocks: int = 10_000, has_mtp: bool = False) -> None:  # fmt: skip
        """has_mtp: it speculates by the model's MTP layer, whose KV it has too."""
        self._has_mtp = has_mtp
        self.block_size = block_size
        self.model = model or HashModel()
        self._random = random.Random(seed)
        self._chunk_tokens = chunk_tokens
        self._preempted_share = preempted_share
        shape = (self.model.num_layers + has_mtp, NUM_BLOCKS, block_size, 1)
        self._kv = np.full(shape, POISON, np.uint64)
        self._free = list(range(NUM_BLOCKS))
        self._freed: list[int] = []
        self._users = [0] * NUM_BLOCKS
        self._cached: dict[tuple[int, ...], int] = {}
        """The block whose last token ends this prefix of a prompt, while it is in use."""
        page = np.zeros((self.model.num_layers + 1, PAGE_SIZE, 1), np.uint64)
        paged = PagedKv(
            [[layer] for layer in self._kv],
            block_size,
            page,
            lambda page: page.copy().view(np.uint8).reshape(-1),
        )

        def read_page(part: PagePart, number: int, num_tokens: int) -> np.ndarray:
            return paged.read(part.blocks[0], number, num_tokens, part.ticket.num_layers)

        self.requests = TicketedRequests(fingerprint or {}, max_held_blocks)
        self.sender = PageSender(read_page, places)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._delayed: dict[str, Request] = {}
        """Ended requests whose blocks the connector still needs."""
        self._finished_ids: set[str] = set()
        self._preempted_ids: set[str] = set()
        self._calls: deque[Callable[[], None]] = deque()

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: dict[str, Any],
        ended: Callable[[dict[str, Any] | None], None] = lambda answer: None,
    ) -> None:
        """Compute a prompt; `ended` is called with the answer's kv_transfer_params."""
        request = Request(request_id, tuple(token_ids), params, ended)
        self._calls.append(lambda: self._waiting.append(request))

    def abort(self, request_id: str) -> None:
        """End a request as if its client had gone."""
        self._calls.append(lambda: self._abort(request_id))

    @property
    def is_busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(
            self._calls
            or self._waiting
            or self._running
            or self._finished_ids
            or self._delayed
            or self.requests.is_holding
        )

    @property
    def num_blocks_used(self) -> int:
        """Blocks that are not free."""
        return NUM_BLOCKS - len(self._free)

    def step(self) -> None:
        """Schedule, compute, and take what the worker reports: one turn of the engine."""
        while self._calls:
            self._calls.popleft()()
        if self._running and self._random.random() < self._preempted_share:
            self._preempt(self._running.pop())
        work = pickle.loads(pickle.dumps(self.requests.step(self._schedule())))
        self.sender.drop(work.dropped)
        # As vLLM: what is freed is overwritten by the next step, after the worker has dropped it.
        self._kv[:, self._freed] = POISON
        self._freed.clear()
        computed = [(request, self._compute(request)) for request in self._running]
        self.sender.queue(work.parts)
        finished_ids, self._finished_ids = self._finished_ids, set()
        sent = self.sender.finished(finished_ids, 0.01 if work.is_idle else 0.0)
        for request, is_done in computed:
            if is_done:
                self._running.remove(request)
                request.ended(self._end(request, is_aborted=False))
        self.requests.sent(sent)
        for request_id in sent:
            self._release(self._delayed.pop(request_id))

    # --- vLLM's scheduler

    def _schedule(self) -> SimpleNamespace:
        while self._waiting and self._allocate(self._waiting[0]):
            request = self._waiting.popleft()
            self._running.append(request)
            self.requests.allocated(request.request_id, request.params, len(request.token_ids))
        new, cached, chunks = [], [], {}
        for request in self._running:
            left = len(request.token_ids) - request.num_computed
            chunks[request.request_id] = min(left, self._random.randint(*self._chunk_tokens))
            (new if request.is_new else cached).append(request)
        scheduled = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=request.request_id,
                    block_ids=(list(request.blocks),),
                    num_computed_tokens=request.num_computed,
                )
                for request in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[request.request_id for request in cached],
                resumed_req_ids={r.request_id for r in cached if r.is_resumed},
                new_block_ids=[(list(r.blocks),) if r.is_resumed else None for r in cached],
                num_computed_tokens=[request.num_computed for request in cached],
            ),
            num_scheduled_tokens=chunks,
            total_num_scheduled_tokens=sum(chunks.values()),
            preempted_req_ids=self._preempted_ids,
        )
        self._preempted_ids = set()
        for request in self._running:
            request.is_new = request.is_resumed = False
        self._chunks = chunks
        return scheduled

    def _allocate(self, request: Request) -> bool:
        """Give a request all its blocks: those of a cached prefix first."""
        ids, size = request.token_ids, self.block_size
        hits = []
        while (end := (len(hits) + 1) * size) < len(ids) and ids[:end] in self._cached:
            hits.append(self._cached[ids[:end]])
        num_new = -(-len(ids) // size) - len(hits)
        if num_new > len(self._free):
            return False
        self._random.shuffle(self._free)
        request.blocks = hits + [self._free.pop() for _ in range(num_new)]
        request.num_computed = len(hits) * size
        for block in request.blocks:
            self._users[block] += 1
        return True

    def _preempt(self, request: Request) -> None:
        self._release(request)
        self._preempted_ids.add(request.request_id)
        request.is_resumed = not request.is_new
        self._waiting.appendleft(request)

    def _abort(self, request_id: str) -> None:
        for requests in (self._running, self._waiting):
            for request in list(requests):
                if request.request_id == request_id:
                    requests.remove(request)
                    request.ended(self._end(request, is_aborted=True))

    def _end(self, request: Request, is_aborted: bool) -> dict[str, Any] | None:
        self._finished_ids.add(request.request_id)
        is_needed, answer = self.requests.finished(request.request_id, is_aborted)
        if is_needed:
            self._delayed[request.request_id] = request
        else:
            self._release(request)
        return answer

    def _release(self, request: Request) -> None:
        """Free the request's blocks; those that no other uses are overwritten by the next step."""
        for block in request.blocks:
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)
                self._freed.append(block)
        free = set(self._free)
        self._cached = {ids: block for ids, block in self._cached.items() if block not in free}
        request.blocks = []

    # --- vLLM's worker

    def _compute(self, request: Request) -> bool:
        """Compute the chunk; whether the prompt is complete."""
        begin = request.num_computed
        end = begin + self._chunks[request.request_id]
        # The last position's next token is one that this engine samples.
        ids = (*request.token_ids, SAMPLED) if self._has_mtp else request.token_ids
        kv = np.concatenate(self.model.prefill(ids, end, self._has_mtp), axis=1)
        for position in range(begin, end):
            block, offset = divmod(position, self.block_size)
            self._kv[:, request.blocks[block], offset, 0] = kv[:, position]
        request.num_computed = end
        for block in range(end // self.block_size):
            self._cached.setdefault(
                request.token_ids[: (block + 1) * self.block_size], request.blocks[block]
            )
        return end == len(request.token_ids)
