"""A whole cluster in one thread, from one seed: the real coordinator, HashInstances, a prefill.

The coordinator calls the scheduler and carries its plans out; here are streams and clocks.
Everything that happens is drawn from the seed: the configuration, arrivals, aborts, stops, prefill
failures, which instance goes on next, how long messages are under way.

    PYTHONPATH=tests python -m harness.seed_campaign --kind plain --seeds 1000
"""

from collections.abc import Generator
from random import Random
from typing import Any, TypeVar

from control_plane.frontend.access.token_owners import TokenOwners
from control_plane.scheduler.invariants import check
from control_plane.scheduler.policies import relevel
from data_plane.instance.interface import TermEnds
from data_plane.instance.rows import Row
from harness.hash_clusters.followed_tables import corrupted, follow
from harness.hash_clusters.hash_instance import HashInstance, region_layout
from harness.hash_clusters.hash_model import HashModel
from harness.hash_clusters.hash_parts import (
    Job,
    Process,
    Story,
    changes_term,
    crowded,
    draw_config,
    with_drafts,
    with_states,
)
from harness.hash_clusters.hash_play import HashPlay
from harness.hash_clusters.hash_state_pool import MAX_DEPTH, pages_of
from harness.transports.local_exchange import LocalExchange
from harness.transports.local_pages import LocalPageRing, local_peer_rings
from nanocp.config.whole import Config
from nanocp.values.commands import CancelPrefill, PrefillRequest
from nanocp.values.experts import ExpertTable
from nanocp.values.members import PREFILL, Envelope, Member, Resync
from nanocp.values.plan import (
    CARRY_PAGE,
    Event,
    InstancePlan,
    Placement,
    Plan,
    TransferFailed,
    WindowDone,
)
from nanocp.values.sampling import SamplingParams
from nanocp.values.table import InstanceTable

# Small clusters have few pages to level.
relevel.MIN_PAGES = 1


class HashCluster(HashPlay):
    """Plays one seed. Raises AssertionError as soon as something is wrong."""

    has_drafts = has_states = has_moves = False
    draft_percent = 60
    """How many drafts of 100 are right."""
    depth = 1
    """Newest tokens of a row that are never folded into its state."""
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
        random = Random(seed)
        config = config or draw_config(random)
        if self.has_drafts:
            config = with_drafts(config, of_drafts := Random(seed + 1))
            self.draft_percent = of_drafts.choice([0, 30, 60, 90, 95])
        if self.has_states:
            config = with_states(config, of_states := Random(seed + 2))
        super().__init__(random, config, num_requests)
        num = config.cluster.num_instances
        num_dense_layers = random.choice([0, 0, 1, 2, 3])
        num_moe_layers = random.choice([1, 1, 2])
        if not has_experts:
            num_dense_layers, num_moe_layers = num_dense_layers + num_moe_layers, 0
        linear: list[int] = []
        if self.has_states:
            num_dense_layers += 1
            num_layers = num_dense_layers + num_moe_layers
            linear = of_states.sample(range(num_layers), of_states.randrange(1, num_layers))
            self.depth = of_states.choice([1, 1, MAX_DEPTH])
        self.model = HashModel(
            num_layers=num_dense_layers + num_moe_layers,
            num_dense_layers=num_dense_layers,
            linear_layers=tuple(sorted(linear)),
        )
        self.vocab_size = self.model.vocab_size
        ends = enumerate(self._new_ends())
        self.processes = [self._start_process(index, own) for index, own in ends]
        self.serving = list(range(num))
        """Instances of the term."""
        self.loops = [self._loop(process) for process in self.processes]
        self.shadows = [InstanceTable(index, num) for index in range(num)]
        self.speeds = [random.choice([1, 1, 0.3, 0.03]) for _ in range(num)]
        self.prefill_share = random.choice([0.02, 0.13])
        self.prefill_pages_per_turn = random.choice([1, 3, 30])
        self.copies = [0, 1, 3]
        self.abort_share = random.choice([0, 0.1, 0.3])
        self.deadline_share = random.choice([0, 0, 0.3])
        self.prefix_share = random.choice([0, 0.5, 0.9])
        self.jobs: list[Job] = []
        self.num_windows = self.num_calls = self.num_hand_offs = self.num_extensions = 0
        self.num_moves = self.num_moves_between_nodes = self.num_lane_windows = 0
        self.num_resyncs = self.num_preemptions = 0
        self.num_calls_with_parked_rows = 0
        self.num_drafted = self.num_accepted = self.num_judged = self.num_narrow_windows = 0
        self.widths: set[int] = set()
        """Drafts of a row in the windows that were issued."""
        self._start_cluster()

    def place_experts(self, table: ExpertTable) -> None:
        """Put the experts where the table says; nothing has run yet."""
        for process in self.processes:
            process.instance.slots.place(table)

    def _new_ends(self) -> list[TermEnds]:
        num, layout = self.config.cluster.num_instances, region_layout(self.config)
        exchanges = LocalExchange.create_all(num, layout, self.config.limits)
        return [
            TermEnds(exchange, [LocalPageRing()], moves)
            for exchange, moves in zip(exchanges, local_peer_rings(num), strict=True)
        ]

    def _start_process(self, index: int, ends: TermEnds) -> Process:
        instance = HashInstance(self.config, self.model, ends.exchange, ends.rings, ends.moves)
        if self.has_moves:
            instance.experts.report_s = 0.0
            instance.slots.failure_share = 0.003
        instance.token_after, instance.draft_percent = self._token_after, self.draft_percent
        if instance._frames.states is not None:
            instance._frames.states.depth = self.depth
        return Process(index, instance, ends.rings[0])

    def _token_after(self, row: Row) -> int:
        """What the row samples after its drafts, if they are right; 0 after its last token."""
        story, number = self.stories[row.request_id], len(row.output_ids) + len(row.drafts)
        return story.expected[number] if number < len(story.expected) else 0

    # --- the play

    def _check_end(self) -> None:
        check(self.scheduler, self.shadows)
        assert self._all_frames_are_free(), self._describe()
        transfers = self.coordinator.transfers
        assert not (transfers.num_prefilling or transfers.num_pages_awaited), "a ticket is open"
        if self.judges_drafts:
            for process in self.processes:
                self._check_drafts(process.instance)

    @property
    def judges_drafts(self) -> bool:
        """Whether each draft depends on all KV of the MTP layer before it."""
        config, drafts = self.config.scheduler, self.scheduler._rows.drafts
        has_all = config.drafting == "always" and not self.num_narrow_windows
        return bool(drafts.most) and has_all and not config.prefix_sharing

    def _check_drafts(self, instance: HashInstance) -> None:
        """The MTP layer had all KV before each draft, wherever pages went and rows were."""
        for request_id, num_tokens, hidden in instance.drafted:
            story = self.stories[request_id]
            known = [*story.prompt_ids, *story.expected[:num_tokens]]
            name = f"a draft of request {request_id} after {num_tokens} tokens"
            assert hidden == self.model.mtp_hidden(known), f"{name} lacks KV"
            self.num_judged += 1

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
        free = [load.frames_free for load in self.scheduler.requests.loads() if load.num_frames]
        return [self.config.cluster.num_frames] * len(self.scheduler._state.open) == free

    # --- requests

    def _expected(self, prompt_ids: list[int], params: SamplingParams) -> list[int]:
        return self.model.generate(prompt_ids, params)

    def ask(self, prompt_ids: list[int], *asked: Any) -> Story:
        """Let a request arrive; see HashPlay."""
        story = super().ask(prompt_ids, *asked)
        story.owners = TokenOwners(len(prompt_ids), self.config.scheduler.steps_per_window)
        return story

    def placed(self, placement: Placement, num_cached: int | None = None) -> None:
        """See ControllerEvents."""
        story = self.stories[placement.request_id]
        self.num_extensions += 0 < story.cp_degree < placement.cp_degree
        story.cp_degree = placement.cp_degree
        story.owners.placed(placement)

    # --- what the coordinator sends

    def _check_plan(self, batch: list[Event], plan: Plan) -> None:
        follow(self.shadows, plan.instances)
        self.num_calls += 1
        for event in batch:
            if isinstance(event, WindowDone):
                self.num_drafted += sum(checked for checked, _ in event.drafts)
                self.num_accepted += sum(accepted for _, accepted in event.drafts)
        if changes_term(batch) or self.num_calls % self.check_every == 0:
            check(self.scheduler, self.shadows)
        self._count(plan)

    def _count(self, plan: Plan) -> None:
        self.num_hand_offs += sum(len(each.hand_offs_out) for each in plan.instances)
        self.num_calls_with_parked_rows += bool(self.scheduler._rows.parked)
        self.num_preemptions += len(plan.preempted)
        for transfer in plan.transfers:
            if transfer.source is not None:
                self.num_moves += 1
                nodes = map(self.config.cluster.node_of, (transfer.source, *transfer.receivers))
                self.num_moves_between_nodes += len(set(nodes)) > 1
        if plan.window is not None:
            assert plan.window == self.num_windows
            self.num_windows += 1
            self.num_lane_windows += any(each.two_lanes for each in plan.instances)
            (num_drafts,) = {each.num_drafts for each in plan.instances}
            self.widths.add(num_drafts)
            has_most = num_drafts == self.config.scheduler.num_drafts
            self.num_narrow_windows += not has_most

    def _take_work(self, member: Member, envelope: Envelope) -> bool:
        """What a member is to do comes to it; see HashCoordinator."""
        if member == PREFILL:
            self._take_prompt(envelope)
            return True
        process = self.processes[member.instance or 0]
        plan = envelope.message
        if not isinstance(plan, InstancePlan):
            process.take(plan)
        elif plan.is_full:
            process.full_plan = plan
        else:
            is_lost = self.random.random() < 0.02
            process.plans.append(corrupted(plan, self.random) if is_lost else plan)
        return True

    # --- prefill

    def _take_prompt(self, envelope: Envelope) -> None:
        match envelope.message:
            case PrefillRequest(transfer, token_ids):
                has_mtp = self.config.scheduler.num_drafts > 0
                kv = dict(
                    enumerate(self.model.prefill(list(token_ids), transfer.num_tokens, has_mtp))
                )
                if num := self.config.cluster.carry_pages:
                    states = self.model.states(token_ids[: transfer.num_tokens])
                    of_states = pages_of(self.model, states, transfer.num_tokens, num)
                    kv |= {CARRY_PAGE + number: page for number, page in enumerate(of_states)}
                pages = list(transfer.instances())
                pages = self.random.sample(pages, len(pages))
                self.jobs.append(Job(transfer, kv, pages, envelope.term))
            case CancelPrefill(ticket):
                for job in self.jobs:
                    job.is_cancelled |= job.transfer.ticket == ticket

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
            failed = TransferFailed(job.transfer.ticket, "prefill gave up")
            self.events.append((PREFILL, job.term, failed))
        else:
            page = job.pages.pop()
            ring = self.processes[job.transfer.instances()[page]].ring
            ring.put(job.transfer.ticket, page, job.kv[page])

    # --- instances

    def _loop(self, process: Process) -> Generator[bool, None, None]:
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
            self._take((process.member, process.term, Resync(plan.window, resync.reason)))
            while process.full_plan is None:
                yield True
            plan, process.full_plan = process.full_plan, None
        else:
            raise AssertionError("the full table was refused")
        for _ in range(plan.num_steps):
            for awaited in instance.step():
                yield True
                while not any(instance._exchange.arrived(*put) for put in awaited):
                    yield True
            self._between_steps(process)
            yield False

    def _between_steps(self, process: Process) -> None:
        """What may be done between two steps."""
        instance, posts = process.instance, process.posts
        if instance.pages.copier is not None:
            for _ in range(self.random.choice(self.copies)):
                instance.pages.copier.run_one()
        for _ in range(min(len(posts), self.random.choice([0, 1, 2, 9]))):
            posts.popleft()()
        instance.pages.copy_arrived_pages()
        if self.random.random() < 0.5:
            instance.pages.send_pages()
        self._take_polled(process)

    def _take_polled(self, process: Process) -> None:
        polled = process.instance.poll()
        self._say(process, polled.events)
        for token in polled.tokens:
            self._take_token(process, token)


Kind = TypeVar("Kind", bound=HashCluster)


def of_kind(kind: type[Kind], **traits: bool) -> type[Kind]:
    """This kind of clusters with some more traits."""
    return type(kind.__name__, (kind,), traits)


def crowd(cluster: Kind) -> Kind:
    """Rows that are promised no frame outgrow the cluster together."""
    for _ in range(12):
        cluster._arrive(cluster.random.randrange(30, 64), cluster.random.randrange(60, 150))
    cluster.abort_share /= 10
    return cluster


def crowd_of(kind: type[Kind], seed: int) -> Kind:
    """A crowd in a cluster of a seed."""
    cluster = crowd(kind(seed, config=crowded(draw_config(Random(seed)))))
    cluster.speeds = [max(speed, 0.3) for speed in cluster.speeds]
    return cluster
