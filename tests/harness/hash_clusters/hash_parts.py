"""What a hash cluster is made of: drawn configurations, requests, instances and their messages."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from random import Random
from tempfile import gettempdir
from typing import Any
from unittest.mock import patch

import numpy as np

from control_plane.frontend.access.token_owners import TokenOwners
from control_plane.frontend.text.page_hashes import page_state
from control_plane.scheduler.policies import relevel_nodes
from harness.hash_clusters.hash_instance import HashInstance
from harness.hash_clusters.hash_model import HashModel
from harness.transports.local_pages import LocalPageRing
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.cost import CostConfig
from nanocp.config.kv_offload import KvOffloadConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config
from nanocp.values.commands import ChangeExperts, ExpectPages, RefusePages, SendPages
from nanocp.values.members import Member, Said
from nanocp.values.offload import page_hashes
from nanocp.values.plan import (
    Event,
    Fetch,
    FinishReason,
    InstanceLost,
    InstancePlan,
    Regrouped,
    SeatsWanted,
    Stow,
    TermEnded,
    TookOver,
    Transfer,
)
from nanocp.values.sampling import RowInput, SamplingParams, penalized_prompt_ids
from nanocp.wire.rows import encode_row_input

small_moves_between_nodes = patch.multiple(relevel_nodes, MIN_PAGES=1, LEAST_PAGES=1)
"""A context in which one page is worth a move to another node: small clusters have few frames."""


@dataclass
class Story:
    """One request: what it asks, what it must get, what it got."""

    request_id: int
    prompt_ids: list[int]
    params: SamplingParams
    expected: list[int]
    known_ids: list[int]
    """The prompt, and what was generated before it was last submitted."""
    priority: int = 0
    attempt: int = 0
    is_unsent: bool = False
    """Whether it is under way to the controller."""
    owners: TokenOwners | None = None
    """Which instance generates each token, as the front end knows it."""
    cp_degree: int = 0
    output: dict[int, int] = field(default_factory=dict)
    reason: FinishReason | None = None
    is_aborted: bool = False
    is_settled: bool = False
    num_preemptions: int = 0

    def know_output(self) -> None:
        """Go on from all tokens that are there."""
        self.known_ids = [*self.prompt_ids, *(self.output[i] for i in range(len(self.output)))]
        if self.owners is not None:
            self.owners.begin_attempt(len(self.output))


class Expected:
    """What a request must generate, which the model computes as far as it is looked at."""

    def __init__(
        self,
        model: HashModel,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        known_ids: Sequence[int] = (),
    ) -> None:
        """known_ids: tokens that the client was given, and that it goes on from."""
        self._token_ids = list(known_ids)
        self._rest = model.tokens(prompt_ids, params, tuple(known_ids))

    def begin(self, num_tokens: int) -> list[int]:
        """The first tokens, fewer if there are not as many."""
        self._token_ids += islice(self._rest, max(num_tokens - len(self._token_ids), 0))
        return self._token_ids[:num_tokens]

    def all(self) -> list[int]:
        """Every token."""
        self._token_ids += self._rest
        return self._token_ids


@dataclass
class Job:
    """A transfer that the prefill works on."""

    transfer: Transfer
    kv: dict[int, np.ndarray]
    """By page."""
    pages: list[int]
    term: int
    is_cancelled: bool = False


class Process:
    """An instance, and everything under way to it and from it."""

    def __init__(self, index: int, instance: HashInstance, ring: LocalPageRing) -> None:
        self.index = index
        self.member = Member("instance", index)
        self.instance = instance
        self.ring = ring
        self.term = 1
        """The term that it is in; a dead one stays in its last."""
        self.plans: deque[InstancePlan] = deque()
        self.full_plan: InstancePlan | None = None
        """What it asked for in place of a plan that it refused."""
        self.posts: deque[Callable[[], None]] = deque()
        """Calls of the instance about tickets, in order."""
        self.events: deque[tuple[Member, int, Said]] = deque()
        """To the controller, in order, each with its term."""

    def forget(self) -> None:
        """Drop what is under way to it: its term is over."""
        self.plans.clear()
        self.posts.clear()
        self.full_plan = None

    def take(self, message: Any) -> None:
        """Keep a message about a ticket, for the call that takes it."""
        instance = self.instance
        match message:
            case ChangeExperts(number, table):
                instance.experts.change(number, table)  # in order with the plans
            case ExpectPages(transfer):
                self.posts.append(partial(instance.pages.expect, transfer))
            case SendPages(transfer):
                self.posts.append(partial(instance.pages.send, transfer))
            case Fetch():
                self.posts.append(partial(instance.pages.fetch, message))
            case Stow():
                self.posts.append(partial(instance.pages.stow, message))
            case RefusePages(ticket):
                self.posts.append(partial(instance.pages.fence, ticket))


def row_start(config: Config, story: Story) -> bytes:
    """What the row of a request starts from, as the front end makes it."""
    known_ids, params = story.known_ids, story.params
    is_hashed = config.scheduler.offload_host_pages > 0
    state = page_state(known_ids, page_hashes(known_ids)) if is_hashed else ()
    output_ids = tuple(known_ids[len(story.prompt_ids) :])
    penalized = penalized_prompt_ids(story.prompt_ids, params)
    origin = "front-end:1", output_ids, penalized, story.attempt
    return encode_row_input(RowInput(known_ids[-1], params, *origin, *state))


def changes_term(batch: Sequence[Event]) -> bool:
    """Whether one of the events ends a term or begins one, or comes between the two."""
    of_terms = (InstanceLost, Regrouped, TookOver, SeatsWanted, TermEnded)
    return any(isinstance(event, of_terms) for event in batch)


FREE_LINKS = CostConfig(0, 0, 0, 0, 1)
"""With them cost_aware splits what it can, and moves pages all the time."""


def draw_config(random: Random) -> Config:
    """A small cluster with tight bounds, so that every bound is reached."""
    num_instances = random.choice([1, 2, 2, 3, 4, 4, 5])
    max_rows = random.choice([2, 4, 8])
    bounds = BoundsConfig(
        max_rows=max_rows,
        max_links=random.choice([1, 2, 4]),
        max_attention_rows=max_rows + random.choice([0, 2, 8]),
        max_partials=random.choice([1, 2, 8]),
        max_hand_offs=random.choice([1, 2, 4]),
    )
    cluster = ClusterConfig(
        num_instances=num_instances,
        instances_per_node=random.choice([1, 2, 4, 8]),
        num_frames=random.choice([4, 6, 10, 20]),
        max_model_len=1024,
        bounds=bounds,
    )
    scheduler = SchedulerConfig(
        policy=random.choice(
            ["chaos", "chaos", "chaos", "dual_balanced", "fixed_degree:2", "cost_aware"]
        ),
        steps_per_window=random.choice([1, 1, 4]),
        cp_degree_buckets=((100, 1), (250, 2)),
        cp_degree_max=4,
        costs=FREE_LINKS,
        prefix_sharing=random.random() < 0.9,
        growth_promise=random.choice(
            ["max_tokens", "max_tokens", "tokens:0", "tokens:20", "tokens:80"]
        ),
        max_overtake_us=random.choice([0, 1000, 100_000]),
        max_queued_requests=random.choice([4, 1024]),
        chaos_seed=(chaos_seed := random.randrange(1 << 32)),
        chaos_period_windows=random.choice([1, 2, 5]),
        lanes=Random(chaos_seed).choice(["off", "off", "always", "random", "random"]),
    )
    return Config(cluster=cluster, scheduler=scheduler)


def crowded(config: Config) -> Config:
    """Few frames, none of which is promised."""
    bounds = replace(config.cluster.bounds, max_rows=8, max_attention_rows=8)
    cluster = replace(config.cluster, num_instances=2, num_frames=6, bounds=bounds)
    scheduler = replace(config.scheduler, growth_promise="tokens:0", max_queued_requests=1024)
    return replace(config, cluster=cluster, scheduler=scheduler)


def with_drafts(config: Config, random: Random) -> Config:
    """This configuration with drafts, and often room for them: bounds count step rows."""
    num_drafts, width = random.choice([1, 1, 2, 3]), random.choice([1, 2, 4])
    bounds = config.cluster.bounds
    names = ("max_rows", "max_links", "max_attention_rows", "max_partials")
    wider = replace(bounds, **{name: width * getattr(bounds, name) for name in names})
    drafting = random.choice(["always", "always", "random"])
    scheduler = replace(config.scheduler, num_drafts=num_drafts, drafting=drafting)
    cluster = replace(config.cluster, bounds=wider)
    return replace(config, cluster=cluster, scheduler=scheduler)


def with_states(config: Config, random: Random) -> Config:
    """This configuration for rows with states, of one page or some."""
    cluster = replace(config.cluster, carry_pages=random.choice([1, 1, 2, 3]))
    return replace(config, cluster=cluster)


def offloading_config(seed: int) -> Config:
    """Few frames, and slots in memory, and in half of the clusters in a file."""
    config = draw_config(random := Random(seed))
    cluster = replace(config.cluster, num_frames=random.choice([6, 10, 20]))
    scheduler = replace(
        config.scheduler,
        policy=random.choice(["chaos", "chaos", "dual_balanced", "fixed_degree:4"]),
        prefix_sharing=True,
        offload_host_pages=random.choice([2, 8, 30]),
        offload_file_pages=(num_file_pages := random.choice([0, 0, 2, 40])),
        max_queued_requests=1024,
    )
    in_file = KvOffloadConfig(1.0, 1.0, gettempdir())
    kv_offload = in_file if num_file_pages else KvOffloadConfig()
    return replace(config, cluster=cluster, scheduler=scheduler, kv_offload=kv_offload)


def levelling_config(seed: int) -> Config:
    """cost_aware, with long requests, room and no price on links: pages move all the time."""
    config = draw_config(random := Random(seed))
    cluster = replace(
        config.cluster,
        num_instances=max(config.cluster.num_instances, 2),
        instances_per_node=random.choice([2, 4]),
        num_frames=20,
        bounds=BoundsConfig(
            max_rows=8, max_links=4, max_attention_rows=16, max_partials=8, max_hand_offs=2
        ),
    )
    scheduler = replace(
        config.scheduler,
        policy="cost_aware",
        cp_degree_buckets=((64, 1), (128, 2)),
        max_queued_requests=1024,
    )
    return replace(config, cluster=cluster, scheduler=scheduler)


class Unobserved:
    """An observer of front ends that does nothing."""

    def on_request(self, *_: object) -> None:
        pass

    on_submitted = on_first_token = on_token = on_finished = on_request_over = on_request
    http_responded = on_request
