"""Prefix sharing: full pages of a prompt that are in the cluster already are read where they are,
by several requests.

Enters: an arrival's page hashes, a policy's choice, requests whose prompt is written. Leaves: the
pages that are there, and the choice drawn to them. Does not know: tokens, tickets, when a page goes
(pools keep free ones until they are taken).
"""

from __future__ import annotations

from control_plane.scheduler.cluster_state import ClusterState
from control_plane.scheduler.layout import lay_out
from control_plane.scheduler.policies.dual_balanced import choose_members
from control_plane.scheduler.policies.policy import Choice
from control_plane.scheduler.request import NOTHING_SHARED, Request, SharedPrefix, num_pages
from control_plane.scheduler.waterfill import waterfill
from nanocp.plan import PAGE_SIZE, Arrival, TargetRun


class PrefixSharing:
    """Finds pages, and says when sharing them is worth it."""

    def __init__(self, state: ClusterState, is_on: bool) -> None:
        self._state = state
        self._is_on = is_on
        self.num_queried_tokens = 0
        """Prompt tokens of placed requests that brought page hashes."""
        self.num_hit_tokens = 0
        """Those of them that were in the cluster already."""

    @property
    def hit_rate(self) -> float:
        """The latter as a share of the former; 0 if there were none."""
        return self.num_hit_tokens / max(self.num_queried_tokens, 1)

    def lay_out(
        self, choice: Choice, arrival: Arrival, num_growth: int
    ) -> tuple[Choice, SharedPrefix, tuple[list[tuple[int, int]], dict[int, int]] | None]:
        """(choice, pages shared, growth.lay_out of both): the policy's choice, or what it becomes
        if there are pages that are worth sharing, and if that can be placed now."""
        if self._is_on and arrival.page_hashes and arrival.needs_prefill:
            shared = self._find(arrival.page_hashes, choice)
            drawn = self._drawn(choice, shared, arrival.prompt_len) if shared.runs else None
            if drawn and (laid_out := lay_out(self._state, drawn, num_growth, shared)):
                return drawn, shared, laid_out
        return choice, NOTHING_SHARED, lay_out(self._state, choice, num_growth)

    def placed(self, request: Request, arrival: Arrival) -> None:
        """The request has its frames."""
        if self._is_on and arrival.page_hashes and arrival.needs_prefill:
            request.page_hashes = arrival.page_hashes
            self.num_queried_tokens += arrival.prompt_len
            self.num_hit_tokens += request.num_shared * PAGE_SIZE

    def written(self, request: Request) -> None:
        """Every receiver has the request's pages: from now on others may read those that are full."""
        pools, hashes = self._state.pools, request.page_hashes
        for first_page, count, instance, frame in request.runs:
            for page in range(
                max(first_page, request.num_shared), min(first_page + count, len(hashes))
            ):
                pools[instance].cache(frame + page - first_page, hashes[page])

    def _find(self, page_hashes: tuple[bytes, ...], choice: Choice) -> SharedPrefix:
        """The pages that are there, on no more instances than the choice has and all of one node:
        for a request, more links cost more than its prefix is worth."""
        state = self._state
        pools, candidates = state.pools, range(len(state.pools))
        runs: list[TargetRun] = []
        pages_on: dict[int, int] = {}
        frames_on: dict[int, int] = {}
        while sum(pages_on.values()) < len(page_hashes) and len(pages_on) < len(choice.shares):
            first_page = sum(pages_on.values())
            held = {
                i: self._num_held(i, page_hashes, first_page)
                for i in candidates
                if i not in pages_on
            }
            instance = max(
                held,
                key=lambda i: (held[i], i == choice.moe_binding, -state.num_rows[i], -i),
                default=-1,
            )
            if instance < 0 or held[instance] == 0:
                break
            candidates = state.nodes[state.cluster.node_of(instance)]
            pages_on[instance] = held[instance]
            frames_on[instance] = 0
            for page in range(first_page, first_page + held[instance]):
                frame = pools[instance].find(page_hashes[page])
                assert frame is not None
                last = runs[-1] if runs else None
                if last and last.instance == instance and last.frame + last.num_pages == frame:
                    runs[-1] = last._replace(num_pages=last.num_pages + 1)
                else:
                    runs.append(TargetRun(page, 1, instance, frame))
                frames_on[instance] += pools[instance].is_free(frame)
        return SharedPrefix(tuple(runs), pages_on, frames_on)

    def _num_held(self, instance: int, page_hashes: tuple[bytes, ...], first_page: int) -> int:
        """Pages in a row from the first on."""
        find = self._state.pools[instance].find
        page = first_page
        while page < len(page_hashes) and find(page_hashes[page]) is not None:
            page += 1
        return page - first_page

    def _drawn(self, choice: Choice, shared: SharedPrefix, prompt_len: int) -> Choice | None:
        """The choice with the MoE binding where the prefix is and WaterFill for the other pages;
        None if balance would pay too much for it.

        A row more than the policy's own MoE binding would have, and twice the request's length more
        than the peak that the policy's choice makes, is what sharing may cost; up to the cluster's
        present peaks it costs nothing. So a prefix that many ask for is soon in several places.
        """
        state, pages_on, rows = self._state, shared.pages_on, self._state.num_rows
        moe_binding = choice.moe_binding
        if moe_binding not in pages_on:
            moe_binding = min(pages_on, key=lambda i: (rows[i], state.kv_tokens(i), i))
        if rows[moe_binding] > max(rows[choice.moe_binding] + 1, max(rows) - 1):
            return None
        members = list(dict.fromkeys((moe_binding, *pages_on)))
        more = [
            i for i in choose_members(state, moe_binding, len(choice.shares)) if i not in pages_on
        ]
        members += more[: max(len(choice.shares) - len(members), 0)]
        levels = [num_pages(state.kv_tokens(i)) + pages_on.get(i, 0) for i in members]
        shares = waterfill(levels, num_pages(prompt_len) - shared.num_pages)
        own_peak = max(state.kv_tokens(i) + share * PAGE_SIZE for i, share in choice.shares.items())
        limit = max(own_peak + 2 * prompt_len, *map(state.kv_tokens, range(len(rows))))
        for instance, level, share in zip(members, levels, shares, strict=True):
            if instance in pages_on and (level + share) * PAGE_SIZE > limit:
                return None
        return Choice(
            moe_binding, {i: share for i, share in zip(members, shares, strict=True) if share}
        )
