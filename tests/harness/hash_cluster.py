"""A whole cluster in one thread, from one seed: the real scheduler, HashInstances, a prefill.

Everything that happens is drawn from the seed: the configuration, arrivals, aborts, stops, prefill
failures, which instance goes on next, how long messages are under way. `python
tests/harness/hash_seeds.py --seeds 1000` plays many seeds, `--seed N` replays one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from random import Random
from typing import Any

from control_plane.coordinator.flights.transfers import fetched_pages
from control_plane.frontend.page_hashes import page_hashes
from control_plane.frontend.token_owners import TokenOwners
from control_plane.scheduler.invariants import check, follow
from control_plane.scheduler.policies import relevel
from control_plane.scheduler.scheduler import Scheduler
from data_plane.instance.interface import PageMover
from harness.hash_instance import HashInstance, region_layout
from harness.hash_model import HashModel
from harness.hash_parts import Job, Process, Story, changes_term, draw_config, row_start
from harness.local_exchange import LocalExchange
from harness.local_pages import LocalPageRing, local_peer_rings
from harness.lost_changes import corrupted, full
from nanocp.config.whole import Config
from nanocp.values.experts import ExpertTable
from nanocp.values.members import Resync
from nanocp.values.plan import (
    AbortRequested,
    Arrival,
    Event,
    FinishReason,
    InstancePlan,
    Plan,
    Preempted,
    TransferFailed,
)
from nanocp.values.sampling import SamplingParams
from nanocp.values.table import InstanceTable

# Small clusters have few pages to level.
relevel.MIN_PAGES = 1

MAX_TURNS = 1_500_000


class HashCluster:
    """Plays one seed. Raises AssertionError as soon as something is wrong."""

    check_every = 8
    """Calls of the scheduler from one check of it to the next, which costs more than all the rest.
    What is wrong in a count or a table stays wrong.
    """

    def __init__(
        self,
        seed: int,
        num_requests: int = 16,
        config: Config | None = None,
        has_experts: bool = True,
    ) -> None:
        """has_experts: False for a model whose layers are all dense."""
        self.random = random = Random(seed)
        self.config = config = config or draw_config(random)
        num = config.cluster.num_instances
        num_dense_layers = random.choice([0, 0, 1, 2, 3])
        num_moe_layers = random.choice([1, 1, 2])
        if not has_experts:
            num_dense_layers, num_moe_layers = num_dense_layers + num_moe_layers, 0
        self.model = HashModel(
            num_layers=num_dense_layers + num_moe_layers, num_dense_layers=num_dense_layers
        )
        self.scheduler = Scheduler(config.cluster, config.scheduler)
        exchanges = LocalExchange.create_all(num, region_layout(config), config.limits)
        self.processes = [
            self._start_process(index, exchange, moves)
            for index, (exchange, moves) in enumerate(
                zip(exchanges, local_peer_rings(num), strict=True)
            )
        ]
        self.serving = list(range(num))
        """Instances of the term."""
        self.loops = [self._instance_loop(process) for process in self.processes]
        self.events: deque[Event] = deque()
        """Under way from the shell to the scheduler, in order."""
        self.shadows = [InstanceTable(index, num) for index in range(num)]
        self.full_plans: dict[tuple[int, int], InstancePlan] = {}
        self.speeds = [random.choice([1, 1, 0.3, 0.03]) for _ in range(num)]
        self.prefill_share = random.choice([0.02, 0.13])
        self.prefill_pages_per_turn = random.choice([1, 3, 30])
        self.copies = [0, 1, 3]
        self.abort_share = random.choice([0, 0.1, 0.3])
        self.deadline_share = random.choice([0, 0, 0.3])
        self.prefix_share = random.choice([0, 0.5, 0.9])
        self.jobs: list[Job] = []
        self.stories: dict[int, Story] = {}
        self.num_requests = num_requests
        self.now_us = 0
        self.num_windows = self.num_calls = self.num_hand_offs = self.num_extensions = 0
        self.num_resyncs = self.num_failed_transfers = 0
        self.num_moves = self.num_moves_between_nodes = 0
        self.num_preemptions = self.num_missed = 0
        self.num_calls_with_parked_rows = 0

    def place_experts(self, table: ExpertTable) -> None:
        """Put the experts where the table says; nothing has run yet."""
        for process in self.processes:
            process.instance.place_experts(table)

    def _start_process(self, index: int, exchange: LocalExchange, moves: PageMover) -> Process:
        ring = LocalPageRing()
        instance = HashInstance(self.config, self.model, exchange, [ring], moves)
        return Process(index, instance, ring)

    # --- the play

    def play(self) -> None:
        """Until every request is settled and every frame is free."""
        for _ in range(MAX_TURNS):
            self._turn()
            if self._is_over():
                break
        else:
            raise AssertionError(f"not over after {MAX_TURNS} turns: {self._describe()}")
        check(self.scheduler, self.shadows)
        assert self._all_frames_are_free(), self._describe()
        assert not any(load.kv_tokens or load.num_rows for load in self.scheduler.loads())
        self._check_answers()

    def _check_answers(self) -> None:
        for story in self.stories.values():
            self._check_story(story)

    def _turn(self) -> None:
        random = self.random
        self.now_us += random.randrange(200)
        draw = random.random()
        if draw < 0.02:
            self._arrive_or_abort()
        elif draw < 0.02 + self.prefill_share:
            for _ in range(self.prefill_pages_per_turn):
                self._prefill()
        elif draw < 0.30:
            self._plan()
        else:
            self._run_some(random.randrange(len(self.processes)))

    def _run_some(self, index: int) -> None:
        if self.random.random() < self.speeds[index]:
            for _ in range(self.random.choice([1, 1, 4, 30])):
                if next(self.loops[index]):
                    break

    def _is_over(self) -> bool:
        if not self._is_answered():
            return False
        self.now_us += 10_000  # Pages that are held for nobody wait for time alone.
        if self.events or self.jobs or any(p.events or p.plans or p.posts for p in self.processes):
            return False
        return self._all_frames_are_free()

    def _all_frames_are_free(self) -> bool:
        free = [load.frames_free for load in self.scheduler.loads() if load.num_frames]
        return [self.config.cluster.num_frames] * len(self.scheduler._state.open) == free

    def _is_answered(self) -> bool:
        stories = self.stories.values()
        return len(stories) == self.num_requests and all(each.is_settled for each in stories)

    def _arrive_or_abort(self) -> None:
        random = self.random
        if self.stories and random.random() < self.abort_share:
            running = [story for story in self.stories.values() if not story.is_settled]
            story = random.choice(running or list(self.stories.values()))
            story.is_aborted = True
            self.events.append(AbortRequested(story.request_id))
        elif len(self.stories) < self.num_requests:
            for _ in range(random.choice([1, 1, 1, 5])):
                if len(self.stories) < self.num_requests:
                    self._arrive()

    def _arrive(self, prompt_len: int = 0, max_tokens: int = 0) -> None:
        """A request of these lengths, or of any."""
        random = self.random
        request_id = len(self.stories) + 1
        prompt_ids, params = self._draw_request(prompt_len, max_tokens)
        expected = self.model.generate(prompt_ids, params)
        owners = TokenOwners(len(prompt_ids), self.config.scheduler.steps_per_window)
        self.stories[request_id] = Story(
            request_id, prompt_ids, params, expected, prompt_ids, owners
        )
        row = row_start(self.config, prompt_ids, params)
        deadline_us = self.now_us + 20_000 if random.random() < self.deadline_share else None
        arrival = Arrival(
            request_id,
            len(prompt_ids),
            params.max_tokens,
            row,
            priority=random.choice([0, 0, 0, 1]),
            deadline_us=deadline_us,
            page_hashes=page_hashes(prompt_ids),
        )
        self.events.append(arrival)

    def _draw_request(self, prompt_len: int, max_tokens: int) -> tuple[list[int], SamplingParams]:
        """A prompt and its parameters, of these lengths or of any."""
        random = self.random
        any_prompt_len = random.choice(
            [1, 2, 63, 64, 65, random.randrange(1, 130), random.randrange(1, 700)]
        )
        prompt_len = prompt_len or any_prompt_len
        prompt_ids = [random.randrange(self.model.vocab_size) for _ in range(prompt_len)]
        if (earlier := self._known_prompts()) and random.random() < self.prefix_share:
            common = random.choice([*earlier.values()])
            common = common[: random.choice([len(common), random.randrange(len(common) + 1)])]
            prompt_ids = [*common, *prompt_ids][:700]
        any_max_tokens = random.choice([1, 3, 20, random.randrange(1, 150)])
        max_tokens = max_tokens or any_max_tokens
        num_stop_ids = random.choice([0, 0, 1, 3])
        params = SamplingParams(
            temperature=1.0,
            max_tokens=max_tokens,
            min_tokens=random.randrange(max_tokens + 1) if num_stop_ids else 0,
            seed=random.randrange(1 << 32),
            stop_token_ids=tuple(
                random.randrange(self.model.vocab_size) for _ in range(num_stop_ids)
            ),
        )
        return prompt_ids, params

    def _known_prompts(self) -> dict[int, list[int]]:
        """By request id: what it was last submitted with."""
        return {story.request_id: story.known_ids for story in self.stories.values()}

    def _resume(self, preempted: Preempted) -> None:
        """Submit a preempted request again, as the front end does.

        The front end has every token by now: an event comes after the tokens of its step.
        """
        story = self.stories[preempted.request_id]
        story.num_preemptions += 1
        num_generated = preempted.num_tokens - len(story.prompt_ids)
        output_ids = tuple(story.output[index] for index in range(num_generated))
        assert len(story.output) == num_generated, "the scheduler knows the row's position"
        story.known_ids = [*story.prompt_ids, *output_ids]
        story.owners.begin_attempt(num_generated)
        row = row_start(self.config, story.known_ids, story.params, output_ids)
        max_tokens = story.params.max_tokens - num_generated
        hashes = page_hashes(story.known_ids)
        known = preempted.request_id, preempted.num_tokens, max_tokens, row
        self.events.append(Arrival(*known, resumes=True, page_hashes=hashes))

    # --- controller

    def _plan(self) -> None:
        batch: list[Event] = []
        sources = [*(process.events for process in self.processes), self.events]
        for source in self.random.sample(sources, len(sources)):
            for _ in range(min(len(source), self.random.choice([0, 1, 100]))):
                if (event := self._accepted(source.popleft())) is not None:
                    batch.append(event)
        if batch or self.random.random() >= 0.9:
            self._call_scheduler(batch)

    def _accepted(self, entry: Event) -> Event | None:
        return entry

    def _call_scheduler(self, batch: list[Event]) -> None:
        plan = self.scheduler.plan_window(batch, self.now_us)
        follow(self.shadows, plan.instances)
        self.num_calls += 1
        if changes_term(batch) or self.num_calls % self.check_every == 0:
            check(self.scheduler, self.shadows)
        self._carry_out(plan)

    def _carry_out(self, plan: Plan) -> None:
        self.num_hand_offs += sum(len(each.hand_offs_out) for each in plan.instances)
        self.num_calls_with_parked_rows += bool(self.scheduler._rows.parked)
        self._tell_front_end(plan)
        num_fetched = fetched_pages(plan.fetches)
        for transfer in plan.transfers:
            for instance in transfer.receivers:
                self._post(instance, HashInstance.expect, transfer)
            if transfer.source is not None:
                self.num_moves += 1
                nodes = map(self.config.cluster.node_of, (transfer.source, *transfer.receivers))
                self.num_moves_between_nodes += len(set(nodes)) > 1
                self._post(transfer.source, HashInstance.send, transfer)
                continue
            known_ids = self._known_prompts()[transfer.request_id]
            pages = list(transfer.instances())[num_fetched.get(transfer.ticket, 0) :]
            kv = self.model.prefill(known_ids, transfer.num_tokens)
            self.jobs.append(Job(transfer, kv, self.random.sample(pages, len(pages))))
        for fetch in plan.fetches:
            self._post(fetch.instance, HashInstance.fetch, fetch)
        for stow in plan.stows:
            self._post(stow.instance, HashInstance.stow, stow)
        for fence in plan.fences:
            for instance in fence.instances:
                self._post(instance, HashInstance.fence, fence.ticket)
            for job in self.jobs:
                job.is_cancelled |= job.transfer.ticket == fence.ticket
        if plan.window is not None:
            assert [each.instance for each in plan.instances] == self.serving
            assert plan.window == self.num_windows
            self.num_windows += 1
        for instance_plan in plan.instances:
            self._send(instance_plan)

    def _post(self, index: int, call: Callable[[HashInstance, Any], None], what: Any) -> None:
        process = self.processes[index]
        process.posts.append(partial(call, process.instance, what))

    def _tell_front_end(self, plan: Plan) -> None:
        for placement in plan.placements:
            degree = self.stories[placement.request_id].cp_degree
            self.num_extensions += degree is not None and placement.cp_degree > degree
            self.stories[placement.request_id].cp_degree = placement.cp_degree
            self.stories[placement.request_id].owners.placed(placement)
        for ended in plan.ended:
            story = self.stories[ended.request_id]
            story.reason = ended.reason
            story.is_settled = True
        for preempted in plan.preempted:
            self.num_preemptions += 1
            self._resume(preempted)

    def _send(self, plan: InstancePlan) -> None:
        if self.random.random() < 0.02:
            shadow = self.shadows[plan.instance]
            self.full_plans[plan.instance, plan.window] = full(plan, shadow)
            plan = corrupted(plan, self.random)
        self.processes[plan.instance].plans.append(plan)

    # --- prefill

    def _prefill(self) -> None:
        if not self.jobs:
            return
        random = self.random
        job = random.choice(self.jobs)
        if not job.pages or (job.is_cancelled and random.random() < 0.1):
            self.jobs.remove(job)
        elif random.random() < 0.01:
            self.jobs.remove(job)
            self.num_failed_transfers += 1
            self.events.append(TransferFailed(job.transfer.ticket, "prefill gave up"))
        else:
            page = job.pages.pop()
            ring = self.processes[job.transfer.instances()[page]].ring
            ring.put(job.transfer.ticket, page, job.kv[page])

    # --- instances

    def _instance_loop(self, process: Process) -> Generator[bool, None, None]:
        """Play one instance; yields whether it has to wait for something."""
        while True:
            self._between_steps(process)
            if process.plans:
                yield from self._run_window(process, process.plans.popleft())
            else:
                yield True

    def _run_window(self, process: Process, plan: InstancePlan) -> Generator[bool, None, None]:
        instance = process.instance
        for _ in range(2):
            steps = instance.begin_steps(plan)
            while True:
                try:
                    next(steps)
                except StopIteration as stop:
                    resync = stop.value
                    break
                yield True
            if resync is None:
                break
            assert resync == Resync(plan.window, resync.reason)
            self.num_resyncs += 1
            plan = self.full_plans[process.index, plan.window]
        else:
            raise AssertionError("the full table was refused")
        for _ in range(plan.num_steps):
            for _ in instance.step():
                yield True
            self._between_steps(process)
            yield False

    def _between_steps(self, process: Process) -> None:
        """What may be done between two steps.

        Transfers do not wait for the windows that were sent before them; some are still under way.
        """
        instance, posts = process.instance, process.posts
        if instance.copier is not None:
            for _ in range(self.random.choice(self.copies)):
                instance.copier.run_one()
        for _ in range(min(len(posts), self.random.choice([0, 1, 2, 9]))):
            posts.popleft()()
        instance.copy_arrived_pages()
        if self.random.random() < 0.5:
            instance.send_pages()
        self._take_polled(process)

    def _take_polled(self, process: Process) -> None:
        polled = process.instance.poll()
        process.events.extend(polled.events)
        for token in polled.tokens:
            story = self.stories[token.request_id]
            name = f"token {token.index} of request {token.request_id}"
            assert token.index not in story.output, f"{name} came twice"
            owner = story.owners.of(token.index)
            assert owner == process.index, (
                f"{name} comes from instance {process.index}, and the front end would refuse it: "
                f"instance {owner} generates it"
            )
            story.output[token.index] = token.token_id
            expected = story.expected[token.index] if token.index < len(story.expected) else None
            assert token.token_id == expected, f"{name} is {token.token_id}, not {expected}"
            if token.finish_reason is not None:
                assert token.index == len(story.expected) - 1
                story.is_settled = True

    # --- verdict

    def _check_story(self, story: Story) -> None:
        num_tokens = len(story.output)
        assert sorted(story.output) == list(range(num_tokens)), story
        if story.reason is None:
            assert num_tokens == len(story.expected), story
        elif story.reason is FinishReason.ABORTED:
            assert story.is_aborted, story
        elif story.reason is FinishReason.FAILED:
            assert self.num_failed_transfers and (story.num_preemptions or not num_tokens), story
        elif story.reason is FinishReason.EXPIRED:
            assert not num_tokens, story
        elif story.reason is FinishReason.REFUSED:
            assert self.config.scheduler.max_queued_requests == 4, story
        assert story.num_preemptions <= 1 + self.num_missed, story

    def _describe(self) -> str:
        unsettled = [story.request_id for story in self.stories.values() if not story.is_settled]
        return (
            f"requests {unsettled} are not settled, {self.scheduler.num_waiting} wait, "
            f"{self.scheduler.num_running} run, {self.num_windows} windows, "
            f"loads {self.scheduler.loads()}"
        )
