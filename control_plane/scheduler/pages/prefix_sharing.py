"""Prefix sharing: requests read the full pages of a common prompt prefix in the same frames."""

from __future__ import annotations

from control_plane.scheduler.policies.dual_balanced import choose_members
from control_plane.scheduler.policies.layout import lay_out
from control_plane.scheduler.policies.waterfill import waterfill
from control_plane.scheduler.state.cluster_state import ClusterState
from control_plane.scheduler.state.proposal import Layout, Proposal, SharedPrefix
from control_plane.scheduler.state.request import Request, num_pages
from nanocp.values.plan import PAGE_SIZE, Arrival, TargetRun


class PrefixSharing:
    """Finds pages, and decides whether sharing them is worth it."""

    def __init__(self, state: ClusterState, is_on: bool) -> None:
        self._state = state
        self._is_on = is_on
        self.num_queried_tokens = 0
        """Prompt tokens of placed requests that brought page hashes."""
        self.num_hit_tokens = 0
        """Prompt tokens of placed requests that were already in the cluster."""
        self.new_pages: list[tuple[int, int, bytes]] | None = None
        """(instance, frame, hash) of pages found first since `take_new_pages`; None: not
        recorded."""
        self.stored: list[tuple[int, bytes]] | None = None
        """(request, hash) of the same pages, for who follows them; None: not recorded."""

    @property
    def hit_rate(self) -> float:
        """The share of looked-up prompt tokens found; 0 before the first look-up."""
        return self.num_hit_tokens / max(self.num_queried_tokens, 1)

    def layout(self, proposal: Proposal, arrival: Arrival, num_growth: int) -> Layout | None:
        """Lay out the arrival's pages as proposed, or nearer to pages that are worth sharing.

        num_growth: pages for coming tokens. None if the cluster cannot hold them now.
        """
        if self._is_on and arrival.page_hashes and arrival.needs_prefill:
            shared = self._find(arrival.page_hashes, proposal)
            drawn = self._drawn(proposal, shared, arrival.prompt_len) if shared.runs else None
            if drawn and (layout := lay_out(self._state, drawn, num_growth, shared)):
                return layout
        return lay_out(self._state, proposal, num_growth)

    def placed(self, request: Request, arrival: Arrival) -> None:
        """Count the shared tokens of a request that has its frames."""
        if self._is_on and arrival.page_hashes and arrival.needs_prefill:
            request.page_hashes = arrival.page_hashes
            self.num_queried_tokens += arrival.prompt_len
            self.num_hit_tokens += request.num_shared * PAGE_SIZE

    def adopted(self, request: Request, arrival: Arrival) -> None:
        """Share the pages of a request that already have KV."""
        if self._is_on and arrival.needs_prefill:
            request.page_hashes = arrival.page_hashes
            self.written(request)

    def written(self, request: Request, num_tokens: int | None = None) -> None:
        """Let others share the full pages of the first num_tokens tokens; None: of the prompt."""
        hashes = request.page_hashes
        end_page = len(hashes) if num_tokens is None else min(num_tokens // PAGE_SIZE, len(hashes))
        for run in request.runs:
            first_page = max(run.first_page, request.num_shared)
            end = min(run.first_page + run.num_pages, end_page)
            for page in range(first_page, end):
                self._cache(request, page, run)

    def written_page(self, request: Request, page: int, is_over: bool) -> None:
        """Let others share a page that a row has filled.

        is_over: the request has ended, and its frames are still quarantined.
        """
        run = request.runs[request.run_of(page * PAGE_SIZE)]
        self._cache(request, page, run, is_over)

    def _cache(
        self, request: Request, page: int, run: TargetRun, is_quarantined: bool = False
    ) -> None:
        page_hash, frame = request.page_hashes[page], run.frame + page - run.first_page
        if not self._state.frames[run.instance].cache(frame, page_hash, is_quarantined):
            return
        if self.new_pages is not None:
            self.new_pages.append((run.instance, frame, page_hash))
        if self.stored is not None:
            self.stored.append((request.request_id, page_hash))

    def take_new_pages(self) -> list[tuple[int, int, bytes]]:
        """Return new (instance, frame, hash) of findable pages."""
        taken, self.new_pages = self.new_pages or [], []
        return taken

    def _find(self, page_hashes: tuple[bytes, ...], proposal: Proposal) -> SharedPrefix:
        """Find shared pages on one node and on no more instances than the proposal has.

        More links would cost more than the prefix is worth.
        """
        state = self._state
        frames, candidates = state.frames, state.open
        runs: list[TargetRun] = []
        pages_on: dict[int, int] = {}
        frames_on: dict[int, int] = {}
        while sum(pages_on.values()) < len(page_hashes) and len(pages_on) < len(proposal.shares):
            first_page = sum(pages_on.values())
            held = {
                i: self._num_held(i, page_hashes, first_page)
                for i in candidates
                if i not in pages_on
            }
            instance = max(
                held,
                key=lambda i: (held[i], i == proposal.moe_binding, -state.loads.num_rows[i], -i),
                default=-1,
            )
            if instance < 0 or held[instance] == 0:
                break
            node = state.nodes[state.cluster.node_of(instance)]
            candidates = [i for i in node if i in state.open]
            pages_on[instance] = held[instance]
            frames_on[instance] = 0
            for page in range(first_page, first_page + held[instance]):
                frame = frames[instance].find(page_hashes[page])
                assert frame is not None
                last = runs[-1] if runs else None
                if last and last.instance == instance and last.frame + last.num_pages == frame:
                    runs[-1] = last._replace(num_pages=last.num_pages + 1)
                else:
                    runs.append(TargetRun(page, 1, instance, frame))
                frames_on[instance] += frames[instance].is_free(frame)
        return SharedPrefix(tuple(runs), pages_on, frames_on)

    def _num_held(self, instance: int, page_hashes: tuple[bytes, ...], first_page: int) -> int:
        find = self._state.frames[instance].find
        page = first_page
        while page < len(page_hashes) and find(page_hashes[page]) is not None:
            page += 1
        return page - first_page

    def _drawn(self, proposal: Proposal, shared: SharedPrefix, prompt_len: int) -> Proposal | None:
        """Move the proposal's MoE binding to the prefix; None if that costs too much balance.

        It may add one row, and tokens above the proposal's peak by twice the prompt. Up to the
        cluster's peaks it is free, so a popular prefix soon has several copies.
        """
        state, pages_on, rows = self._state, shared.pages_on, self._state.loads.num_rows
        moe_binding = proposal.moe_binding
        if moe_binding not in pages_on:
            moe_binding = min(pages_on, key=lambda i: (rows[i], state.loads.kv_tokens(i), i))
        if rows[moe_binding] > max(
            rows[proposal.moe_binding] + 1, max(rows[i] for i in state.open) - 1
        ):
            return None
        members = list(dict.fromkeys((moe_binding, *pages_on)))
        more = [
            i for i in choose_members(state, moe_binding, len(proposal.shares)) if i not in pages_on
        ]
        members += more[: max(len(proposal.shares) - len(members), 0)]
        levels = [num_pages(state.loads.kv_tokens(i)) + pages_on.get(i, 0) for i in members]
        shares = waterfill(levels, num_pages(prompt_len) - shared.num_pages)
        own_peak = max(
            state.loads.kv_tokens(i) + share * PAGE_SIZE for i, share in proposal.shares.items()
        )
        limit = max(own_peak + 2 * prompt_len, *map(state.loads.kv_tokens, state.open))
        for instance, level, share in zip(members, levels, shares, strict=True):
            if instance in pages_on and (level + share) * PAGE_SIZE > limit:
                return None
        return Proposal(
            moe_binding, {i: share for i, share in zip(members, shares, strict=True) if share}
        )
