"""Real decode instances in the threads of one process, without gRPC and Ray.

The scheduler and the exchange are real. A story is a list of arrivals; `DecodeCluster.run` plays it
and returns every request's tokens.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from random import Random

import torch

from control_plane.coordinator.flights.transfers import fetched_pages
from control_plane.frontend.text.page_hashes import page_state
from control_plane.scheduler.invariants import check
from control_plane.scheduler.scheduler import Scheduler
from data_plane.instance.decode import DecodeInstance
from data_plane.instance.interface import TermStart
from data_plane.kv.carry_pool import CarryPool
from data_plane.kv.page_ring import PageRingWriter
from data_plane.model.config import ModelConfig
from data_plane.model.weights import load_weights
from data_plane.startup.instance import build_instance
from data_plane.startup.shared_parts import model_of, new_carry, torch_dtype, with_carry
from data_plane.transport import futex
from data_plane.transport.exchange import Term
from data_plane.transport.segments import Segments
from harness.exact.moved_experts import MovedExperts
from harness.exact.one_processor import one_processor
from harness.exact.reference_prefill import prefill_pages
from harness.hash_clusters.followed_tables import corrupted, follow, full
from nanocp.config.whole import Config
from nanocp.values.commands import ChangeExperts
from nanocp.values.experts import ExpertTable
from nanocp.values.members import ExpertLoad, ExpertsHere
from nanocp.values.offload import page_hashes
from nanocp.values.plan import (
    CARRY_PAGE,
    Arrival,
    Fence,
    Fetch,
    InstancePlan,
    Placement,
    Plan,
    Preempted,
    Stow,
    Transfer,
    WindowDone,
)
from nanocp.values.sampling import RowInput, SamplingParams, TokenLogprobs, penalized_prompt_ids
from nanocp.values.table import InstanceTable
from nanocp.wire.rows import encode_row_input

WAIT_S = 60
# Threads of one process share its GIL: a thread that spins takes it from the awaited one.
futex._NUM_YIELDS = 0


@dataclass
class Prompt:
    """One request of a story."""

    ids: list[int]
    params: SamplingParams
    arrives_at_window: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    num_preemptions: int = 0

    @property
    def known_ids(self) -> list[int]:
        """The tokens to prefill; after a preemption, those generated before it too."""
        return [*self.ids, *self.output]


Prefilled = tuple[list[tuple[int, torch.Tensor]], CarryPool | None]


@lru_cache(maxsize=4)
def known_prefill(
    checkpoint: Path, model: ModelConfig, dtype: torch.dtype, chunk_tokens: int
) -> Callable[[tuple[int, ...], int, CarryPool | None], Prefilled]:
    """A prefill that computes each prompt once, for all clusters that play it."""
    weights = load_weights(checkpoint, model, dtype, range(model.num_experts))
    known: dict[tuple[tuple[int, ...], int, int], Prefilled] = {}

    def prefilled(ids: tuple[int, ...], num_tokens: int, carry: CarryPool | None) -> Prefilled:
        key = ids, num_tokens, carry.depth if carry else 0
        if key not in known:
            pages = prefill_pages(weights, model, ids, num_tokens, chunk_tokens, carry=carry)
            known[key] = [*pages], carry
        return known[key]

    return prefilled


class DecodeCluster:
    """A context manager; `run` may be called again and again."""

    def __init__(
        self,
        config: Config,
        checkpoint: Path,
        lost_share: float = 0.0,
        experts: Callable[..., ExpertTable] | None = None,
    ) -> None:
        """lost_share: of the plans, the share that arrives corrupted. experts: makes a table."""
        self.config = config = with_carry(config, checkpoint)
        self._term = 1
        self.cluster_id = uuid.uuid4().hex[:8]
        self.scheduler = Scheduler(config.cluster, config.scheduler)
        self.plans: list[Plan] = []
        self.reports: list[WindowDone] = []
        self._checkpoint = checkpoint
        self._model = model_of(config, checkpoint)
        self._inboxes = [queue.Queue() for _ in range(config.cluster.num_instances)]
        self.moved: MovedExperts | None = None
        """Experts that move at random; None: they stay."""
        self._experts = experts and experts(self._model, config.cluster)
        if config.cluster.expert_load_mb_per_s:
            num_experts = self._model.num_experts
            self.moved = MovedExperts(config.cluster, num_experts, self._inboxes)
            self._experts = self.moved.table
        self._prefill_of = known_prefill(
            checkpoint, self._model, torch_dtype(config.data_plane), config.prefill.chunk_tokens
        )
        num = config.cluster.num_instances
        self._lost_share, self._random = lost_share, Random(0)
        self._shadows = [InstanceTable(index, num) for index in range(num)]
        self._full_plans: dict[tuple[int, int], InstancePlan] = {}
        self.num_resyncs = 0
        self.instances: dict[int, DecodeInstance] = {}
        """By index, once they run; to look at while nothing does."""
        self._next_id = 1
        self._num_windows = 0
        self.num_moves = self.num_whole_tickets = 0
        """Page moves, and tickets whose pages all came from slots."""
        self._done = [0] * num
        self._outbox: queue.Queue = queue.Queue()
        self._threads = [
            threading.Thread(target=self._run_instance, args=(index,), daemon=True)
            for index in range(num)
        ]

    def __enter__(self) -> DecodeCluster:
        with ExitStack() as stack:
            if self.config.data_plane.threads_per_instance == 1:
                stack.enter_context(one_processor())
            for thread in self._threads:
                thread.start()
            for _ in self._threads:
                self._take_outbox()
            self._leave = stack.pop_all().close
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join(WAIT_S)

    def regroup(self, experts: ExpertTable | None = None) -> None:
        """End the term and begin the next one, while nothing runs. experts: where they are then."""
        self._term += 1
        start = TermStart(tuple(range(len(self._inboxes))), experts, keeps_rows=True)
        for inbox in self._inboxes:
            inbox.put(start)
        for _ in self._inboxes:
            self._take_outbox()

    def checked_drafts(self) -> list[tuple[int, int]]:
        """(checked, accepted) by offset of all reports so far."""
        reports = [report.drafts for report in self.reports if report.drafts]
        return [
            tuple(
                sum(each[offset][which] for each in reports if len(each) > offset)
                for which in (0, 1)
            )
            for offset in range(self.config.scheduler.num_drafts)
        ]

    def run(self, prompts: list[Prompt]) -> list[Prompt]:
        """Play the story to its end; every frame must be free then."""
        by_id: dict[int, Prompt] = {}
        waiting = sorted(prompts, key=lambda prompt: prompt.arrives_at_window)
        first_window = self._num_windows
        events: list = []
        ended = 0
        while ended < len(prompts):
            windows = self._num_windows - first_window
            idle = self.scheduler.requests.num_running == 0
            while waiting and (idle or waiting[0].arrives_at_window <= windows):
                prompt = waiting.pop(0)
                events.append(self._arrival(prompt))
                by_id[self._next_id - 1] = prompt
                idle = False
            plan = self.scheduler.plan_window(events, time.monotonic_ns() // 1000)
            check(self.scheduler)
            self.plans.append(plan)
            self._num_windows += plan.window is not None
            assert not plan.ended, plan.ended
            for placement in plan.placements:
                by_id[placement.request_id].placements.append(placement)
            self._push(plan, by_id)
            events = [
                self._back(preempted, by_id[preempted.request_id]) for preempted in plan.preempted
            ]
            if events:
                continue
            if plan.window is None or self._in_flight() >= 2:
                events, tokens = self._take_outbox()
                for token in tokens:
                    prompt = by_id[token.request_id]
                    assert token.index == len(prompt.output), (
                        "tokens come in order from one thread's queue"
                    )
                    prompt.output.append(token.token_id)
                    prompt.logprobs.append(token.logprobs)
                    ended += token.finish_reason is not None
        self._drain(events)
        return prompts

    def _in_flight(self) -> int:
        return self._num_windows - min(self._done)

    def _drain(self, events: list) -> None:
        deadline = time.monotonic() + WAIT_S
        while True:
            plan = self.scheduler.plan_window(events, time.monotonic_ns() // 1000)
            check(self.scheduler)
            self.plans.append(plan)
            self._num_windows += plan.window is not None
            self._push(plan, {})
            # The last window may be under way though it holds no frame.
            if not self._in_flight() and all(
                load.frames_free == self.config.cluster.num_frames
                for load in self.scheduler.requests.loads()
            ):
                return
            assert time.monotonic() < deadline, self.scheduler.requests.loads()
            events, _ = self._take_outbox()

    def _arrival(self, prompt: Prompt) -> Arrival:
        row = RowInput(
            prompt.ids[-1], prompt.params, "test", (),
            penalized_prompt_ids(prompt.ids, prompt.params), 0, *self._page_state(prompt),
        )  # fmt: skip
        arrival = Arrival(
            self._next_id,
            len(prompt.ids),
            prompt.params.max_tokens,
            encode_row_input(row),
            page_hashes=page_hashes(prompt.ids),
        )
        self._next_id += 1
        return arrival

    def _back(self, preempted: Preempted, prompt: Prompt) -> Arrival:
        """The arrival that a preempted request comes back as, with all its tokens."""
        prompt.num_preemptions += 1
        assert preempted.num_tokens == len(prompt.known_ids), (
            "the scheduler knows the row's position"
        )
        penalized_ids = penalized_prompt_ids(prompt.ids, prompt.params)
        row = RowInput(
            prompt.known_ids[-1], prompt.params, "test", tuple(prompt.output), penalized_ids, 0,
            *self._page_state(prompt),
        )  # fmt: skip
        num_left = prompt.params.max_tokens - len(prompt.output)
        return Arrival(
            preempted.request_id, preempted.num_tokens, num_left, encode_row_input(row),
            resumes=True,
            page_hashes=page_hashes(prompt.known_ids) if self.config.has_slots else (),
        )  # fmt: skip

    def _page_state(self, prompt: Prompt) -> tuple:
        ids = prompt.known_ids
        return page_state(ids, page_hashes(ids)) if self.config.has_slots else ()

    def _push(self, plan: Plan, by_id: dict[int, Prompt]) -> None:
        num_fetched = fetched_pages(plan.fetches)
        for transfer in plan.transfers:
            for instance in transfer.receivers:
                self._inboxes[instance].put(transfer)
            if transfer.source is not None:
                self.num_moves += 1
                self._inboxes[transfer.source].put(transfer)
                continue
            if self.config.prefill.synthetic_kv:
                continue
            ids = by_id[transfer.request_id].known_ids
            job = transfer, ids, num_fetched.get(transfer.ticket, 0)
            self.num_whole_tickets += job[2] == len(transfer.instances())
            threading.Thread(target=self._prefill, args=job, daemon=True).start()
        for command in (*plan.fetches, *plan.stows):
            self._inboxes[command.instance].put(command)
        for fence in plan.fences:
            for instance in fence.instances:
                self._inboxes[instance].put(fence)
        if self.moved is not None:
            plan = self.moved.sent(plan)
        follow(self._shadows, plan.instances)
        for instance_plan in plan.instances:
            index = instance_plan.instance
            if self._random.random() < self._lost_share:
                whole = full(instance_plan, self._shadows[index])
                self._full_plans[index, instance_plan.window] = whole
                instance_plan = corrupted(instance_plan, self._random)
            self._inboxes[index].put(instance_plan)

    def _take_outbox(self) -> tuple[list, list]:
        polled = self._outbox.get(timeout=WAIT_S)
        if isinstance(polled, BaseException):
            raise polled
        for event in polled.events:
            if isinstance(event, WindowDone):
                self._done[event.instance] = event.window + 1
                self.reports.append(event)
            if self.moved is not None:
                self.moved.heard(event)
        of_experts = ExpertLoad, ExpertsHere
        events = [event for event in polled.events if not isinstance(event, of_experts)]
        return events, list(polled.tokens)

    _prefill_lock = threading.Lock()

    def _prefill(self, transfer: Transfer, ids: list[int], num_fetched: int) -> None:
        try:
            with self._prefill_lock:
                self._write_pages(transfer, ids, num_fetched)
        except BaseException as error:
            self._outbox.put(error)

    def _write_pages(self, transfer: Transfer, ids: list[int], num_fetched: int) -> None:
        instance_of = dict(list(transfer.instances().items())[num_fetched:])
        writers: dict[int, PageRingWriter] = {}
        carry = new_carry(self.config, self._model, 1)
        pages, carry = self._prefill_of(tuple(ids), transfer.num_tokens, carry)
        payloads = (
            (page, kv_LSD.contiguous().view(torch.uint8).numpy().reshape(-1))
            for page, kv_LSD in pages
        )
        states = (
            (page, carry.page(0, page - CARRY_PAGE)) for page in instance_of if page >= CARRY_PAGE
        )
        for page, payload in chain(payloads, states):
            if page not in instance_of:
                continue
            instance = instance_of[page]
            if instance not in writers:
                writers[instance] = PageRingWriter(
                    Segments(self.cluster_id, term=Term(self._term)), instance, self.config.limits
                )
            num_tokens = transfer.tokens_in(page)
            writers[instance].write(ticket=transfer.ticket, page=page, num_tokens=num_tokens,
                                    payload=payload, timeout_ms=WAIT_S * 1000)  # fmt: skip
        for writer in writers.values():
            writer.close()

    def _run_instance(self, index: int) -> None:
        try:
            self._instance_loop(index)
        except BaseException as error:
            self._outbox.put(error)

    def _instance_loop(self, index: int) -> None:
        segments = Segments(self.cluster_id)
        instance = build_instance(self.config, index, segments, self._checkpoint)
        self.instances[index] = instance
        if self._experts is not None:
            instance.experts.slots.place(self._experts)
        if self.moved is not None:
            instance.experts.report_s = 0.0
        instance.connect()
        self._outbox.put(instance.poll())
        try:
            while True:
                try:
                    message = self._inboxes[index].get(timeout=0.005)
                except queue.Empty:
                    message = ()
                if message is None:
                    return
                if isinstance(message, TermStart):
                    instance.leave()
                    segments.term.end(segments.term.number)
                    segments.term.number += 1
                    instance.enter(message)
                    self._outbox.put(instance.poll())
                elif isinstance(message, InstancePlan):
                    needed = instance.begin(message)
                    if needed is not None:
                        self.num_resyncs += 1
                        whole = self._full_plans[index, needed.window]
                        assert instance.begin(whole) is None, "the full table was refused"
                    for _ in range(message.num_steps):
                        instance.pages.copy_arrived_pages()
                        instance.pages.send_pages()
                        instance.run_step()
                elif isinstance(message, ChangeExperts):
                    instance.experts.change(message.number, message.table)
                elif isinstance(message, Transfer) and message.source == index:
                    instance.pages.send(message)
                elif isinstance(message, Transfer):
                    instance.pages.expect(message)
                elif isinstance(message, Fence):
                    instance.pages.fence(message.ticket)
                elif isinstance(message, Stow):
                    instance.pages.stow(message)
                elif isinstance(message, Fetch):
                    instance.pages.fetch(message)
                instance.pages.copy_arrived_pages()
                instance.pages.send_pages()
                polled = instance.poll()
                if polled.events or polled.tokens:
                    self._outbox.put(polled)
        finally:
            instance.close()
