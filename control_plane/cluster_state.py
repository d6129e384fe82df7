"""What has been decided for every instance: rows, links, partials, frames, tokens; and whether more would fit.

Enters: placed requests and changes to them. Leaves: loads for the policies, and the one check that guards placement,
re-binding and extension (can_allocate). Does not know: events, windows in flight, what an instance reports.

Two numbers are never mixed: kv_tokens is what attention reads (WaterFill and every cost use it); frames used, promised
and quarantined are what only the capacity check reads. `num_rows` balances; `rows_committed` also counts parked rows
and is what max_rows bounds, so that a parked row can always come back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping

from control_plane.page_table import FramePool
from control_plane.request import Request, State
from nanocp.config import ClusterConfig
from nanocp.plan import PAGE_SIZE, InstanceLoad


class ClusterState:
    """The decided state. Policies read it; only the scheduler changes it."""

    def __init__(self, cluster: ClusterConfig) -> None:
        num = cluster.num_instances
        self.cluster = cluster
        self.bounds = cluster.bounds
        self.nodes = tuple(
            range(first, min(first + cluster.instances_per_node, num))
            for first in range(0, num, cluster.instances_per_node)
        )
        self.requests: dict[int, Request] = {}
        """Placed requests that have not ended."""
        self.multi: list[tuple[int, int]] = []
        """(CP degree, id), ascending, of running rows with a KV binding that is not just their MoE binding."""
        self.step = 0
        """First step of the next window."""
        self.pools = [FramePool(cluster.num_frames) for _ in range(num)]
        self.num_rows = [0] * num
        """Rows decided for each instance, in transfer or running; parked rows left out."""
        self.rows_committed = [0] * num
        self.attention_rows = [0] * num
        self.partials = [0] * num
        self.links = [[0] * num for _ in range(num)]
        self._fixed_tokens = [0] * num
        self._growing_rows = [0] * num

    # --- loads

    def kv_tokens(self, instance: int) -> int:
        """Tokens that attention on the instance reads in the next step, those in transfer included."""
        return self._fixed_tokens[instance] + self._growing_rows[instance] * self.step

    def load(self, instance: int) -> InstanceLoad:
        """The instance's load as a value."""
        pool = self.pools[instance]
        return InstanceLoad(
            kv_tokens=self.kv_tokens(instance),
            num_rows=self.num_rows[instance],
            frames_used=pool.num_used,
            frames_free=pool.num_free + pool.num_promised,
            frames_quarantined=pool.num_quarantined,
            frames_committed=pool.num_used + pool.num_promised,
        )

    # --- can it be carried? (can_allocate)

    def can_allocate(self, moe_binding: int, shares: Mapping[int, int], promise: Mapping[int, int]) -> bool:
        """Whether frames for `shares` and `promise` (instance -> pages), a row and its links are within all bounds."""
        span = shares.keys() | promise.keys()
        return all(
            shares.get(instance, 0) + promise.get(instance, 0) <= self.pools[instance].num_free for instance in span
        ) and self.can_carry(moe_binding, span)

    def can_carry(self, moe_binding: int, span: Iterable[int]) -> bool:
        """Whether one more row at the MoE binding, with links to the rest of the span, is within all bounds."""
        bounds = self.bounds
        if self.rows_committed[moe_binding] >= bounds.max_rows:
            return False
        if self.attention_rows[moe_binding] >= bounds.max_attention_rows:
            return False
        num_partials = self.partials[moe_binding]
        for instance in span:
            if instance == moe_binding:
                continue
            num_partials += 1
            if self.links[moe_binding][instance] >= bounds.max_links:
                return False
            if self.attention_rows[instance] >= bounds.max_attention_rows:
                return False
        return num_partials <= bounds.max_partials

    def can_rebind(self, request: Request, moe_binding: int) -> bool:
        """Whether the row could move to another instance of its KV binding, its links with it."""
        span = request.span
        self._carry(request.moe_binding, span, -1)
        possible = self.can_carry(moe_binding, span)
        self._carry(request.moe_binding, span, +1)
        return possible

    def can_extend(self, request: Request, instance: int) -> bool:
        """Whether the KV binding could grow by an instance outside the request's span."""
        moe_binding = request.moe_binding
        return instance == moe_binding or (
            self.links[moe_binding][instance] < self.bounds.max_links
            and self.attention_rows[instance] < self.bounds.max_attention_rows
            and self.partials[moe_binding] < self.bounds.max_partials
        )

    # --- changes

    def place(self, request: Request, shares: Mapping[int, int], promise: Mapping[int, int]) -> None:
        """Allocate and promise frames, and commit the row and its links. The MoE binding's pages come last."""
        moe_binding = request.moe_binding
        for instance in sorted(shares, key=lambda instance: (instance == moe_binding, instance)):
            count = shares[instance]
            pool = self.pools[instance]
            frames = pool.take(count + promise.get(instance, 0))
            request.pages.extend((instance, frame) for frame in frames[:count])
            request.pages_on[instance] = count
            if len(frames) > count:
                request.promised[instance] = frames[: count - 1 : -1]
            pool.num_used += count
            pool.num_promised += len(frames) - count
        for instance, count in promise.items():
            if instance not in shares:
                request.promised[instance] = self.pools[instance].take(count)[::-1]
                self.pools[instance].num_promised += count
        self._carry(moe_binding, request.span, +1)
        self.num_rows[moe_binding] += 1
        for instance, count in request.pages_on.items():
            self._count_tokens(request, instance, count * PAGE_SIZE)
        tail = request.pages[-1][0]
        self._count_tokens(request, tail, request.position - len(request.pages) * PAGE_SIZE)
        self.requests[request.request_id] = request

    def append_page(self, request: Request, holder: int) -> None:
        """Allocate the request's next page on the holder; the caller has checked that it can.

        The frame is the holder's promise to this request, or an uncommitted one, which releases a promise elsewhere.
        """
        pool = self.pools[holder]
        page = len(request.pages)
        is_new = holder not in request.pages_on
        if is_new and holder not in request.promised and holder != request.moe_binding:
            self._link(request.moe_binding, holder, +1)
        promised = request.promised.get(holder)
        if promised:
            frame = promised.pop()
            pool.num_promised -= 1
            if not promised:
                del request.promised[holder]
        else:
            frame = pool.take(1, after=None if is_new else request.last_frame(holder))[0]
            self._release_one_promise(request)
        pool.num_used += 1
        was_multi = self._multi_key(request)
        request.pages.append((holder, frame))
        request.pages_on[holder] = request.pages_on.get(holder, 0) + 1
        if request.state is State.RUNNING:
            self._reindex(was_multi, self._multi_key(request))
            self._cross(request, page)

    def run(self, request: Request) -> None:
        """The row runs from the next window on; the page of its position is allocated."""
        if request.state is State.PARKED:
            self.num_rows[request.moe_binding] += 1
        request.state = State.RUNNING
        request.since_step = self.step
        self._reindex(None, self._multi_key(request))
        tail = request.position // PAGE_SIZE
        self._grow(request, request.pages[tail][0], self.step)
        for page in range(tail + 1, len(request.pages)):
            self._cross(request, page)

    def park(self, request: Request) -> None:
        """The row leaves the windows from the next one on. It keeps its place under every bound."""
        if request.state is State.RUNNING:
            self._halt(request)
        request.state = State.PARKED
        self.num_rows[request.moe_binding] -= 1

    def rebind(self, request: Request, moe_binding: int) -> None:
        """Move the row; the caller has checked that it can."""
        span = request.span
        old_key = self._multi_key(request)
        self._carry(request.moe_binding, span, -1)
        self._carry(moe_binding, span, +1)
        self.num_rows[request.moe_binding] -= 1
        self.num_rows[moe_binding] += 1
        request.moe_binding = moe_binding
        self._reindex(old_key, self._multi_key(request))

    def remove(self, request: Request) -> dict[int, list[int]]:
        """The request ended: release all but its used frames, which become quarantined and are returned."""
        if request.state is State.RUNNING:
            self._halt(request)
        if request.state is not State.PARKED:
            self.num_rows[request.moe_binding] -= 1
        self._carry(request.moe_binding, request.span, -1)
        for instance, frames in request.promised.items():
            self.pools[instance].num_promised -= len(frames)
            self.pools[instance].give_back(frames)
        for instance, tokens in request.tokens_on.items():
            self._fixed_tokens[instance] -= tokens
        held: dict[int, list[int]] = {}
        for instance, frame in request.pages:
            held.setdefault(instance, []).append(frame)
        for instance, frames in held.items():
            self.pools[instance].num_used -= len(frames)
            self.pools[instance].num_quarantined += len(frames)
        del self.requests[request.request_id]
        return held

    def free(self, held: Mapping[int, list[int]]) -> None:
        """Quarantined frames become free."""
        for instance, frames in held.items():
            self.pools[instance].num_quarantined -= len(frames)
            self.pools[instance].give_back(frames)

    # --- inside

    def _carry(self, moe_binding: int, span: Iterable[int], sign: int) -> None:
        self.rows_committed[moe_binding] += sign
        self.attention_rows[moe_binding] += sign
        for instance in span:
            if instance != moe_binding:
                self._link(moe_binding, instance, sign)

    def _link(self, moe_binding: int, instance: int, sign: int) -> None:
        self.links[moe_binding][instance] += sign
        self.attention_rows[instance] += sign
        self.partials[moe_binding] += sign

    def _release_one_promise(self, request: Request) -> None:
        """An uncommitted frame was taken: give one promised frame back, of an instance without a page if there is."""
        if not request.promised:
            return
        instance = min(request.promised, key=lambda i: (i in request.pages_on, -len(request.promised[i]), i))
        promised = request.promised[instance]
        self.pools[instance].num_promised -= 1
        self.pools[instance].give_back([promised.pop(0)])
        if not promised:
            del request.promised[instance]
            if instance not in request.pages_on and instance != request.moe_binding:
                self._link(request.moe_binding, instance, -1)

    def _multi_key(self, request: Request) -> tuple[int, int] | None:
        if len(request.pages_on) == 1 and request.moe_binding in request.pages_on:
            return None
        return len(request.pages_on), request.request_id

    def _reindex(self, old: tuple[int, int] | None, new: tuple[int, int] | None) -> None:
        if old == new:
            return
        if old is not None:
            del self.multi[bisect_left(self.multi, old)]
        if new is not None:
            insort(self.multi, new)

    def _halt(self, request: Request) -> None:
        self._stop_growing(request, self.step)
        request.position = request.position_at(self.step)
        self._reindex(self._multi_key(request), None)

    # A row's tail page grows by one token each step. Instead of visiting every row each step, an instance counts the
    # rows that grow there: a row growing since step s adds step - (s - 1) tokens.

    def _grow(self, request: Request, holder: int, step: int) -> None:
        request.grows_on = holder
        request.grows_since = step
        self._growing_rows[holder] += 1
        self._fixed_tokens[holder] -= step - 1

    def _stop_growing(self, request: Request, step: int) -> None:
        holder = request.grows_on
        self._growing_rows[holder] -= 1
        self._fixed_tokens[holder] += request.grows_since - 1
        self._count_tokens(request, holder, step - request.grows_since)

    def _cross(self, request: Request, page: int) -> None:
        holder = request.pages[page][0]
        if holder != request.grows_on:
            step = request.since_step + page * PAGE_SIZE - request.position
            self._stop_growing(request, step)
            self._grow(request, holder, step)

    def _count_tokens(self, request: Request, instance: int, tokens: int) -> None:
        request.tokens_on[instance] = request.tokens_on.get(instance, 0) + tokens
        self._fixed_tokens[instance] += tokens
