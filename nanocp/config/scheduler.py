"""Admission, placement and moves of requests. Standard library only: the scheduler imports it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated

from nanocp.config.choices import (
    INTERNAL,
    PROFILED,
    Among,
    Natural,
    Positive,
    check_fields,
    require,
)
from nanocp.config.cost import CostConfig, check_ttft_targets
from nanocp.values.plan import PAGE_SIZE

LANES = ("off", "measured", "always", "random")
LANE_ORDERS = ("behind_first", "dual_batch_overlap", "nanoflow")
_SEARCHED = "combine N/N, attention N/N, exchange N/N, experts N/N"
_LANE_ORDER = "|".join((*LANE_ORDERS, _SEARCHED))
DRAFTING = ("measured", "always", "random")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Admission, placement and moves of requests (arXiv 2605.21100, 4.2)."""

    __pydantic_config__ = {"extra": "forbid"}

    policy: str = "cost_aware"
    """Placement of requests: a name of control_plane.scheduler.policies, such as cost_aware,
    dual_balanced (the paper's rule) or fixed_degree:2."""
    profile: str = ""
    """File of `nanocp profile`: costs of a step, and lengths for which a CP degree, two lanes and
    drafts pay. Empty: estimates for the device."""
    steps_per_window: Positive = 1
    """Steps k that one plan covers (arXiv 2605.21100, 6.1)."""
    cp_degree_buckets: Annotated[tuple[tuple[int, int], ...], PROFILED] = ((1024, 1), (2048, 2))
    """(length, degree) pairs, ascending: a request of fewer than `length` tokens gets `degree`.
    cost_aware takes only the requests of degree 1 from it and cp_degree_max; `costs` decide on
    others."""
    cp_degree_max: Annotated[Positive, PROFILED] = 4
    """CP degree of requests at or above the last bucket's length."""
    ttft_targets: tuple[tuple[int, int], ...] = ()
    """(priority, ms) pairs: most time from placement to KV for prompts of that class; cost_aware
    spreads prompts that would be late over NICs of a node. Empty: no class has a target."""
    tpot_target_ms: Natural = 0
    """While tokens take longer than this, one in 110 requests may wait up to 20 s to be placed, at
    most 8 at once: long prompts. 0: nobody waits for that."""
    growth_promise: str = "max_tokens"
    """Output tokens whose frames are promised at admission. `max_tokens`: all, so that no row ever
    parks. `percentile:90`: as many as 90% of the latest finished requests had, at most max_tokens.
    `tokens:64`: 64."""
    prefix_sharing: bool = True
    """Requests whose prompts begin alike share their full pages, as long as frames hold them."""
    offload_host_pages: Annotated[Natural, INTERNAL] = 0
    """Pages of each instance's memory outside frames, by kv_offload.host_gib."""
    offload_file_pages: Annotated[Natural, INTERNAL] = 0
    """Pages of each instance's file, by kv_offload.file_gib."""
    max_moving_pages: Natural = 1024
    """Most pages on their way between instances at a time (policies cost_aware and chaos)."""
    max_unfilled_tokens: Natural = 0
    """Most prompt tokens of placed requests with pages to come; one request is always allowed. 0:
    as many as the engines may have in flight (prefill.engines), or any number without engines."""
    max_overtake_us: Natural = 10_000_000
    """Time in which other requests may pass one that cannot be placed, after its deferral if any.
    """
    held_timeout_us: Annotated[Natural, INTERNAL] = 10_000_000
    """Time for front ends to submit their requests again after a loss."""
    max_queued_requests: Positive = 1024
    """Most requests in the waiting queue."""
    max_queued_tokens: Positive = 4_000_000
    """Most prompt tokens in the waiting queue."""
    chaos_seed: Annotated[Natural, INTERNAL] = 0
    """Seed of the chaos policy's draws."""
    chaos_period_windows: Annotated[Positive, INTERNAL] = 2
    """The chaos policy moves or extends a request in one of this many windows on average."""
    lanes: Annotated[str, Among(LANES)] = "off"
    """Rows in two lanes, one of which computes while the other awaits its peers
    (docs/develop/overlap.md). off: one lane. measured: as `lane_table` says for each window.
    always, or drawn for each window and row (random): for tests."""
    lane_table: Annotated[tuple[tuple[int, int, int, str], ...], PROFILED] = ()
    """(rows, links, percent, order): time of two lanes relative to one, for an instance of this
    size, from `nanocp profile --overlap`."""
    lane_gain_percent: Annotated[Natural, PROFILED] = 3
    """Two lanes run only where they save at least this percentage."""
    num_drafts: Natural = 0
    """Most drafts of a row in a step: tokens that the model's MTP layer guesses, and that the next
    step checks. 0: none. Tokens are the same."""
    drafting: Annotated[str, Among(DRAFTING)] = "always"
    """Number of drafts of a window, as far as rows leave room. measured: as many as give most
    tokens a second by `draft_table` and recent acceptance. always: num_drafts. Drawn for each
    window (random): for tests."""
    draft_table: Annotated[tuple[tuple[int, int, int, int], ...], PROFILED] = ()
    """(rows, KV tokens, drafts, percent): time of a step with drafts relative to one without, for
    an instance of this size."""
    costs: Annotated[CostConfig, PROFILED] = field(default_factory=CostConfig)

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            all(min(rows, drafts, percent) >= 1 for rows, _, drafts, percent in self.draft_table),
            f"draft_table is {self.draft_table}; it must be (rows, KV tokens, drafts, percent), "
            "each number but that of tokens from 1",
        )
        require(
            not self.num_drafts or self.drafting != "measured" or bool(self.draft_table),
            "drafting is measured and draft_table is empty; nanocp profile writes it, or take "
            "always",
        )
        reach = self.steps_per_window * (1 + self.num_drafts) + max(self.num_drafts - 1, 0)
        require(
            not self.num_drafts or reach <= PAGE_SIZE,
            f"num_drafts is {self.num_drafts} and steps_per_window {self.steps_per_window}: a row "
            f"may write {reach} tokens in a window; {PAGE_SIZE}, a page, are the most",
        )
        require(
            all(
                rows >= 1
                and links >= 0
                and percent >= 1
                and re.fullmatch(_LANE_ORDER.replace("N", r"\d+"), order)
                for rows, links, percent, order in self.lane_table
            ),
            f"lane_table is {self.lane_table}; it must be (rows, links, percent, order) with rows "
            f"and percent from 1, links from 0 and order one of {_LANE_ORDER}",
        )
        require(
            self.lanes != "measured" or bool(self.lane_table),
            "lanes is measured and lane_table is empty; nanocp profile --overlap writes it",
        )
        require(
            re.fullmatch(
                r"max_tokens|tokens:\d{1,9}|percentile:([1-9]\d?|100)", self.growth_promise
            )
            is not None,
            f"growth_promise is {self.growth_promise!r}; it must be max_tokens, percentile:N with "
            "N from 1 to 100, or tokens:N",
        )
        check_ttft_targets(self.ttft_targets)
        require(
            not self.ttft_targets or self.policy == "cost_aware",
            f"ttft_targets is {self.ttft_targets} and policy {self.policy}; only cost_aware goes "
            "by targets: take it, or no targets",
        )
        lengths = [length for length, _ in self.cp_degree_buckets]
        require(
            lengths == sorted(set(lengths))
            and all(length >= 1 and degree >= 1 for length, degree in self.cp_degree_buckets),
            f"cp_degree_buckets is {self.cp_degree_buckets}; it must be (length, degree) pairs of "
            "positive integers with ascending lengths",
        )

    @property
    def has_lanes(self) -> bool:
        """True if a window may run in two lanes: every instance has regions for both."""
        return self.lanes != "off"

    @property
    def lane_orders(self) -> tuple[str, ...]:
        """Orders of two lanes; the first has number 1."""
        return tuple(dict.fromkeys(order for *_, order in self.lane_table)) or ("behind_first",)

    def lane_order(self, num_rows: int, num_links: int) -> int:
        """The number for a window: of the smallest entry that holds it, else the largest; or 0."""
        if not self.lane_table:
            return 1
        holds = [p for p in self.lane_table if p[0] >= num_rows and p[1] >= num_links]
        *_, percent, order = min(holds) if holds else max(self.lane_table)
        pays = self.lanes == "always" or percent <= 100 - self.lane_gain_percent
        return 1 + self.lane_orders.index(order) if pays else 0
