"""The connector's half in vLLM's scheduler: the pages to send after each step.

vLLM may overwrite freed blocks, so an ended request holds them until the worker is done. A
preempted request sends its pages again; a receiver takes each once.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

from data_plane.prefill.connector.fingerprint import difference
from data_plane.prefill.connector.ticket import KEY, EngineTicket, accepted, refused
from data_plane.transport.nixl.pages import nixl_package
from nanocp.values.plan import CARRY_PAGE, PAGE_SIZE


class PagePart(NamedTuple):
    """Pages of a request that the step completes."""

    request_id: str
    ticket: EngineTicket
    blocks: tuple[tuple[int, ...], ...]
    """From position 0 on, by vLLM's group of layers."""
    first_page: int
    end_page: int

    def pages(self) -> list[int]:
        """Return page numbers; those of the recurrent state come with the prompt's last ones."""
        pages = list(range(self.first_page, self.end_page))
        if self.end_page * PAGE_SIZE >= self.ticket.num_tokens:
            for first, count, _ in self.ticket.targets:
                pages += range(first, first + count) if first >= CARRY_PAGE else ()
        return pages


@dataclass(slots=True)
class StepWork:
    """The worker's tasks for one step."""

    parts: list[PagePart] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)
    """Requests whose blocks may be overwritten from now on."""
    is_idle: bool = False
    """True for a step that only collects sent pages."""


@dataclass(slots=True)
class _Tracked:
    ticket: EngineTicket | None
    refusal: dict[str, Any] | None = None
    blocks: list[tuple[int, ...]] = field(default_factory=list)
    num_pages: int = 0
    """Since the request's start or latest preemption."""
    has_parts: bool = False


class TicketedRequests:
    """Requests with tickets; called as vLLM's scheduler calls a connector."""

    def __init__(self, fingerprint: Mapping[str, str], max_held_blocks: int) -> None:
        """max_held_blocks: of ended requests; with more, new tickets are refused as busy."""
        self._fingerprint = fingerprint
        self._engine = secrets.token_hex(8)
        """This process's name, unlike a restarted engine's."""
        self._max_held_blocks = max_held_blocks
        self._tracked: dict[str, _Tracked] = {}
        self._held: dict[str, int] = {}
        """By ended request."""
        self._aborted: set[str] = set()

    def allocated(self, request_id: str, params: Mapping[str, Any] | None, num_tokens: int) -> None:
        """Note a request's blocks. params: its kv_transfer_params. num_tokens: of its prompt."""
        if request_id in self._tracked or not params or KEY not in params:
            return
        try:
            ticket = EngineTicket.from_params(params[KEY])
        except ValueError as error:
            self._tracked[request_id] = _Tracked(None, refused("refused", str(error)))
            return
        refusal = None
        num_held = sum(self._held.values())
        if differs := difference(self._fingerprint, ticket.fingerprint):
            refusal = refused("refused", differs)
        elif num_tokens != ticket.num_tokens:
            refusal = refused(
                "refused", f"the prompt has {num_tokens} tokens, its ticket {ticket.num_tokens}"
            )
        elif ticket.page_backend == "nixl" and nixl_package() is None:
            refusal = refused(
                "refused", "page_backend is nixl, and NIXL is not installed beside vLLM"
            )
        elif ticket.engine not in ("", self._engine):
            refusal = refused("restarted", "the engine has been restarted since its probe")
        elif num_held > self._max_held_blocks:
            refusal = refused(
                "busy",
                f"{num_held} blocks wait to be sent; at most {self._max_held_blocks} may "
                "(max_held_blocks)",
            )
        self._tracked[request_id] = _Tracked(ticket, refusal)

    def step(self, scheduled: Any) -> StepWork:
        """Return the parts to send after the step (vLLM's SchedulerOutput)."""
        work = StepWork(dropped=self._aborted, is_idle=scheduled.total_num_scheduled_tokens == 0)
        self._aborted = set()
        for request_id in scheduled.preempted_req_ids or ():
            if tracked := self._tracked.get(request_id):
                tracked.blocks, tracked.num_pages = [], 0
                work.dropped.add(request_id)
        for new in scheduled.scheduled_new_reqs:
            if tracked := self._tracked.get(new.req_id):
                tracked.blocks = list(map(tuple, new.block_ids))
                self._add_part(work, scheduled, new.req_id, tracked, new.num_computed_tokens)
        cached = scheduled.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            if not (tracked := self._tracked.get(request_id)):
                continue
            if request_id in cached.resumed_req_ids:
                tracked.blocks = []
            if (more := cached.new_block_ids[index]) is not None:
                pairs = zip_longest(tracked.blocks, more, fillvalue=())
                tracked.blocks = [(*own, *added) for own, added in pairs]
            num_computed = cached.num_computed_tokens[index]
            self._add_part(work, scheduled, request_id, tracked, num_computed)
        return work

    def _add_part(
        self, work: StepWork, scheduled: Any, request_id: str, tracked: _Tracked, num_computed: int
    ) -> None:
        ticket = tracked.ticket
        if ticket is None or tracked.refusal is not None:
            return
        num_tokens = num_computed + scheduled.num_scheduled_tokens[request_id]
        # A page that is not full is complete only with the prompt.
        end = num_tokens // PAGE_SIZE
        if num_tokens >= ticket.num_tokens:
            end = -(-ticket.num_tokens // PAGE_SIZE)
        if end > tracked.num_pages:
            work.parts.append(
                PagePart(request_id, ticket, tuple(tracked.blocks), tracked.num_pages, end)
            )
            tracked.num_pages, tracked.has_parts = end, True

    def finished(self, request_id: str, is_aborted: bool) -> tuple[bool, dict[str, Any] | None]:
        """Return whether an ended request's blocks are still needed, and the answer."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return False, None
        if not tracked.has_parts:
            return False, tracked.refusal
        self._held[request_id] = sum(map(len, tracked.blocks))
        if is_aborted:
            self._aborted.add(request_id)
        return True, accepted(tracked.num_pages, self._engine)

    def sent(self, request_ids: Iterable[str]) -> None:
        """Release the blocks of these requests."""
        for request_id in request_ids:
            self._held.pop(request_id, None)

    @property
    def is_holding(self) -> bool:
        """True while ended requests' blocks are held: the engine must go on stepping."""
        return bool(self._held)
