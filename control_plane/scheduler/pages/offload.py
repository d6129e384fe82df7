"""KV offload: the pages in slots outside the frames, and the copies into and out of them.

Each page is offloaded once, as soon as it is full, so a frame can be taken without a copy. A full
memory gives its least recently used page to the file; a full file drops one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from control_plane.scheduler.pages.prefix_sharing import PrefixSharing
from control_plane.scheduler.pages.quarantine import Quarantine
from control_plane.scheduler.pages.tickets import Tickets
from control_plane.scheduler.pages.tiers import Key, OwnPage, Tier
from control_plane.scheduler.state.answer import Answer
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.frame_ledger import FrameRun
from control_plane.scheduler.state.request import Request
from nanocp.config.scheduler import SchedulerConfig
from nanocp.values.offload import Fetch, StoredPage, Stow, TransferMissed, WrittenPage
from nanocp.values.plan import CARRY_PAGE, PAGE_SIZE, TransferDone, TransferFenced

MAX_COPYING = 16
"""Most pages of one instance that are being copied from frames into slots."""


def _empty_tiers(num_host: int, num_file: int) -> tuple[Tier, Tier]:
    return Tier(0, num_host), Tier(num_host, num_file)


class OffloadReading(NamedTuple):
    """The use of a cluster's slots. Pairs are of memory and file."""

    num_kept: tuple[int, ...]
    """Pages that can be found."""
    num_stowed: tuple[int, ...]
    num_fetched: tuple[int, ...]
    num_hit_tokens: int


class _Stowing(NamedTuple):
    tier: Tier
    pages: list[tuple[Key, int]]
    """(page, slot)."""
    is_demotion: bool


class Offload:
    """The slots of a cluster. It does nothing when it is off."""

    def __init__(
        self,
        config: SchedulerConfig,
        state: ClusterState,
        sharing: PrefixSharing,
        tickets: Tickets,
        quarantine: Quarantine,
        answer: Answer,
    ) -> None:
        self._num_slots = config.offload_host_pages, config.offload_file_pages
        self._state, self._sharing, self._tickets = state, sharing, tickets
        self._quarantine, self._answer = quarantine, answer
        instances = range(len(state.frames))
        self.tiers = [_empty_tiers(*self._num_slots) for _ in instances]
        """Memory and file, by instance."""
        self.instance_of: dict[Key, int] = {}
        """Instance of each page that can be found in a slot."""
        self._queued: list[dict[bytes, int]] = [{} for _ in instances]
        """By instance: pages to offload -> frames, the oldest first."""
        self._num_copying = [0 for _ in instances]
        self._copying: set[Key] = set()
        self._stowing: dict[tuple[int, int], _Stowing] = {}
        """By ticket and instance."""
        self._fetching: dict[int, list[Key]] = {}
        """By ticket: pages that are read for it."""
        self.pins: Counter[Key] = Counter()
        """Number of tickets that each page is read for, at least 1."""
        self._preempted: dict[int, tuple[int, int]] = {}
        """Preempted request -> (its tokens, ticket of its own pages)."""
        self._state_pages = range(CARRY_PAGE, CARRY_PAGE + state.cluster.carry_pages)
        self._leaving: deque[Request] = deque()
        """Ended requests whose pages a window in flight may still write."""
        self.num_hit_tokens = 0
        """Prompt tokens of placed requests whose pages came from slots."""
        self.num_stowed, self.num_fetched = [0, 0], [0, 0]
        """Pages written to (memory, file) and read from them since the start."""
        sharing.new_pages = [] if self.is_on else None

    @property
    def is_on(self) -> bool:
        """Return whether memory outside the frames is configured."""
        return self._num_slots[0] > 0

    @property
    def reading(self) -> OffloadReading:
        """The numbers that metrics show."""
        num_kept = [sum(len(tiers[kind].kept) for tiers in self.tiers) for kind in (0, 1)]
        stowed, fetched = tuple(self.num_stowed), tuple(self.num_fetched)
        return OffloadReading(tuple(num_kept), stowed, fetched, self.num_hit_tokens)

    # --- what requests do

    def written(self, pages: Iterable[WrittenPage]) -> None:
        """Let others find pages that rows have filled."""
        for request_id, attempt, page, page_hash in pages:
            request = self._state.requests.get(request_id)
            is_over = request is None or request.arrival.attempt != attempt
            if is_over:
                leaving = (each for each in self._leaving if each.request_id == request_id)
                request = next((each for each in leaving if each.arrival.attempt == attempt), None)
            # Without the pages before it nobody would find this one.
            if request is not None and len(request.page_hashes) == page:
                request.page_hashes += (page_hash,)
                self._sharing.written_page(request, page, is_over)

    def released(self, request: Request) -> None:
        """Record that the request gave up its frames; a window may still have it."""
        if self.is_on:
            if request.ticket is not None:
                self.over(request.ticket)
            if request.last_window is not None:
                self._leaving.append(request)
            self._use(request.page_hashes)

    def window_reported(self) -> None:
        """Forget ended requests that no window in flight has."""
        quarantine = self._quarantine
        while self._leaving:
            last_window = self._leaving[0].last_window or 0
            if any(quarantine.last_reported[i] < last_window for i in quarantine.seats):
                return
            self._leaving.popleft()

    def placed(self, request: Request, is_recomputed: bool) -> None:
        """Fetch pages of the request's ticket from slots, as far as they are contiguous.

        Shared pages count as used, and are offloaded too. is_recomputed: see Arrival.
        """
        if not self.is_on:
            return
        for run in request.runs:
            for index in range(min(run.num_pages, request.num_shared - run.first_page)):
                page_hash = request.page_hashes[run.first_page + index]
                if page_hash not in self.instance_of:
                    self._queue(run.instance, page_hash, run.frame + index)
        found = [] if request.ticket is None or is_recomputed else self._found(request)
        keys = [key for key, _ in found]
        if request.ticket is not None and found:
            self._fetching[request.ticket] = keys
            self.pins.update(keys)
            pages: dict[int, list[StoredPage]] = {}
            for key, page in found:
                pages.setdefault(self.instance_of[key], []).append(page)
                self.num_fetched[page.slot >= self._num_slots[0]] += 1
            for instance, of_instance in pages.items():
                self._answer.fetches.append(Fetch(request.ticket, instance, tuple(of_instance)))
            if kv := [page.page for _, page in found if page.page < CARRY_PAGE]:
                end = min((kv[-1] + 1) * PAGE_SIZE, request.arrival.prompt_len - 1)
                self.num_hit_tokens += end - kv[0] * PAGE_SIZE
        if not keys or isinstance(keys[-1], bytes):
            self.forget(request.request_id)
        self._use(request.page_hashes)

    def _found(self, request: Request) -> list[tuple[Key, StoredPage]]:
        """Return the ticket's pages, from the first on, that are in slots.

        A recurrent state counts only whole and at its position (protocol.md, state of the
        position).
        """
        num_tokens = request.arrival.prompt_len - 1
        num_then, ticket = self._preempted.get(request.request_id, (-1, -1))
        found: list[tuple[Key, StoredPage]] = []
        for run in request.targets(num_tokens):
            for page in range(run.first_page, run.first_page + run.num_pages):
                key: Key = OwnPage(request.request_id, ticket, page)
                if page < len(request.page_hashes):
                    key = request.page_hashes[page]
                elif num_then != num_tokens:
                    return found
                if key not in self.instance_of:
                    return [each for each in found if each[1].page < CARRY_PAGE]
                slot = self._tier_of(key).kept[key]
                found.append((key, StoredPage(page, slot, run.instance)))
        return found

    def over(self, ticket: int) -> None:
        """Record that the ticket is complete or fenced: its reads are refused."""
        for key in self._fetching.pop(ticket, ()):
            self._unpin(key)

    def missed(self, event: TransferMissed) -> None:
        """Forget all pages of a ticket that the instance could not read."""
        for key in self._fetching.pop(event.ticket, ()):
            self._unpin(key)
            # A page that another ticket reads stays until that one is over.
            if key not in self.pins and self.instance_of.get(key) == event.instance:
                self._drop(key)

    def _unpin(self, key: Key) -> None:
        self.pins[key] -= 1
        if not self.pins[key]:
            del self.pins[key]
            if isinstance(key, OwnPage):
                self.forget(key.request_id)

    # --- copies into slots

    def stow_all(self, request: Request) -> tuple[int, tuple[int, ...]] | None:
        """Offload all pages of a stopped request, with its last page and recurrent state.

        Its frames stay until the returned instances have answered for the ticket. None: no copy.
        """
        num_full, rest = divmod(request.position, PAGE_SIZE)
        if not self.is_on or len(request.page_hashes) < num_full:
            return None
        self.forget(request.request_id)
        ticket, instances = self._tickets.next_number(), []
        self._preempted[request.request_id] = request.position, ticket
        pages_on: dict[int, list[tuple[Key, int]]] = {}
        runs = [*request.runs]
        fits = len(self._state_pages) <= self._num_slots[0]
        if request.carry is not None and request.carry_source is None and fits:
            runs.append(request.carry)
        for run in runs:
            end = run.first_page + run.num_pages
            if run.first_page < CARRY_PAGE:
                end = min(end, num_full + bool(rest))
            for page in range(run.first_page, end):
                key: Key = OwnPage(request.request_id, ticket, page)
                if page < num_full:
                    key = request.page_hashes[page]
                if key not in self.instance_of and key not in self._copying:
                    frame = run.frame + page - run.first_page
                    pages_on.setdefault(run.instance, []).append((key, frame))
        for instance, pages in pages_on.items():
            slots = self._take_slots(instance, pages)
            if slots:
                self._stow(ticket, instance, slots, [frame for _, frame in pages])
                instances.append(instance)
        return (ticket, tuple(instances)) if instances else None

    def plan(self) -> None:
        """Offload queued pages within the bound on copies."""
        if not self.is_on:
            return
        for instance, frame, page_hash in self._sharing.take_new_pages():
            self._queue(instance, page_hash, frame)
        for instance in self._state.open:
            if not self._queued[instance]:
                continue
            pages = self._next_pages(instance)
            slots = self._take_slots(instance, pages)
            # What found no slot is stowed when it is shared: pages are taken faster than copied.
            frames = [FrameRun(frame, 1) for _, frame in pages[: len(slots)]]
            if not frames:
                continue
            # A copy is one more reader, which leaves at its end (protocol.md, quarantine).
            ledger, ticket = self._state.frames[instance], self._tickets.next_number()
            for run in frames:
                ledger.share(run.frame)
            ledger.quarantine(frames)
            self._quarantine.hold({instance: frames}, None, (), ticket, (instance,))
            self._stow(ticket, instance, slots, [run.frame for run in frames])

    def _queue(self, instance: int, page_hash: bytes, frame: int) -> None:
        queued = self._queued[instance]
        queued[page_hash] = frame
        # While copies stand still: of more pages than frames, some are in no frame any more.
        if len(queued) > self._state.frames[instance].num_frames:
            del queued[next(iter(queued))]

    def _next_pages(self, instance: int) -> list[tuple[Key, int]]:
        queued, ledger = self._queued[instance], self._state.frames[instance]
        pages: list[tuple[Key, int]] = []
        while queued and len(pages) < MAX_COPYING - self._num_copying[instance]:
            key, frame = next(iter(queued.items()))
            del queued[key]
            is_known = key in self.instance_of or key in self._copying
            if not is_known and ledger.find(key) == frame:
                pages.append((key, frame))
        return pages

    def _take_slots(self, instance: int, pages: list[tuple[Key, int]]) -> list[tuple[Key, int]]:
        """Return (page, memory slot) within the free slots; older pages go to the file."""
        host, file = self.tiers[instance]
        slots: list[tuple[Key, int]] = []
        demoted: list[tuple[Key, int]] = []
        sources: list[int] = []
        for key, _ in pages:
            taken = host.take(self.pins)
            if taken is None:
                break
            slots.append((key, taken.slot))
            if taken.page is None:
                continue
            del self.instance_of[taken.page]
            place = file.take(self.pins) if isinstance(taken.page, bytes) else None
            if place is not None:
                if place.page is not None:
                    del self.instance_of[place.page]
                demoted.append((taken.page, place.slot))
                sources.append(taken.slot)
        if demoted:
            ticket = self._tickets.next_number()
            self._quarantine.hold({}, None, (), ticket, (instance,))
            self._stow(ticket, instance, demoted, sources, is_demotion=True)
        return slots

    def _stow(
        self,
        ticket: int,
        instance: int,
        slots: list[tuple[Key, int]],
        sources: list[int],
        is_demotion: bool = False,
    ) -> None:
        pages = tuple((source, slot) for source, (_, slot) in zip(sources, slots, strict=False))
        self._answer.stows.append(Stow(ticket, instance, pages, is_demotion))
        tier = self.tiers[instance][is_demotion]
        self._stowing[ticket, instance] = _Stowing(tier, slots, is_demotion)
        self._copying.update(key for key, _ in slots)
        if not is_demotion:
            self._num_copying[instance] += len(slots)

    def answered(self, event: TransferDone | TransferFenced) -> None:
        """Make pages findable, or drop them, if the ticket was for a copy into slots."""
        stowing = self._stowing.pop((event.ticket, event.instance), None)
        if stowing is None:
            return
        tier, slots, is_demotion = stowing
        self._copying.difference_update(key for key, _ in slots)
        if not is_demotion:
            self._num_copying[event.instance] -= len(slots)
        for key, slot in slots:
            own = (
                (0, event.ticket) if isinstance(key, bytes) else self._preempted.get(key.request_id)
            )
            if isinstance(event, TransferDone) and own is not None and own[1] == event.ticket:
                tier.kept[key] = slot
                self.instance_of[key] = event.instance
                self.num_stowed[is_demotion] += 1
            else:
                tier.free.append(slot)

    # --- slots

    def _tier_of(self, key: Key) -> Tier:
        host, file = self.tiers[self.instance_of[key]]
        return host if key in host.kept else file

    def _use(self, page_hashes: Sequence[bytes]) -> None:
        """Mark pages as used. The first ones are given up last."""
        for key in reversed(page_hashes):
            if key in self.instance_of:
                kept = self._tier_of(key).kept
                kept[key] = kept.pop(key)

    def _drop(self, key: Key) -> None:
        if key in self.instance_of:
            tier = self._tier_of(key)
            tier.free.append(tier.kept.pop(key))
            del self.instance_of[key]

    def forget(self, request_id: int) -> None:
        """Drop the pages that only this preempted request has."""
        num_tokens, ticket = self._preempted.pop(request_id, (0, -1))
        for page in (num_tokens // PAGE_SIZE, *self._state_pages):
            self._drop(OwnPage(request_id, ticket, page))

    # --- terms

    def end_term(self) -> None:
        """Stop all copies; confirmed pages stay."""
        for stowing in self._stowing.values():
            stowing.tier.free += [slot for _, slot in stowing.pages]
        self._stowing.clear()
        self._copying.clear()
        self._num_copying = [0] * len(self._num_copying)
        self._fetching.clear()
        self.pins.clear()
        self._leaving.clear()
        for request_id in list(self._preempted):
            self.forget(request_id)

    def lose(self, instance: int) -> None:
        """Empty the slots of a seat whose process changed or left."""
        for tier in self.tiers[instance]:
            for key in tier.kept:
                del self.instance_of[key]
        self.tiers[instance] = _empty_tiers(*self._num_slots)
        self._queued[instance].clear()

    def check(self) -> None:
        """Check that every slot is free, being filled, or found."""
        filling: dict[int, list[int]] = {}
        for stowing in self._stowing.values():
            filling.setdefault(id(stowing.tier), []).extend(slot for _, slot in stowing.pages)
        kept: dict[Key, int] = {}
        for instance, (host, file) in enumerate(self.tiers):
            first = 0
            for tier, num_slots in zip((host, file), self._num_slots, strict=True):
                slots = sorted([*tier.free, *tier.kept.values(), *filling.get(id(tier), ())])
                wanted = list(range(first, first + num_slots))
                assert slots == wanted, f"slots of instance {instance} are {slots}, not {wanted}"
                kept |= dict.fromkeys(tier.kept, instance)
                first += num_slots
        assert kept == self.instance_of, "pages in slots are not those that are found"
        pins = Counter(key for keys in self._fetching.values() for key in keys)
        assert pins == self.pins, f"pinned are {self.pins}, read are {pins}"
        assert self.pins.keys() <= kept.keys(), "a page is being fetched that is in no slot"
        copying = [key for stowing in self._stowing.values() for key, _ in stowing.pages]
        assert sorted(map(repr, copying)) == sorted(map(repr, self._copying))
        assert not self._copying & kept.keys(), "a page has two slots"
