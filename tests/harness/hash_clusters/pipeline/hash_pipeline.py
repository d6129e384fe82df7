"""A whole pipeline in one thread, from one seed: the real coordinator and hash stages.

Everything that happens is drawn from the seed: the configuration, arrivals, aborts, stops, which
stage goes on next, how long messages are under way.

    PYTHONPATH=tests python -m harness.seed_campaign --kind pipeline --seeds 1000
"""

from collections import Counter, deque
from collections.abc import Generator
from random import Random
from typing import Any

from control_plane.scheduler.pipeline.layer_places import runs_of
from control_plane.scheduler.pipeline.pipeline_scheduler import PipelineScheduler
from data_plane.instance.interface import PageMover
from data_plane.transport.stage_links import StageLinks
from harness.hash_clusters.hash_model import HashModel
from harness.hash_clusters.hash_play import HashPlay, played
from harness.hash_clusters.pipeline.hash_stage import hash_stage
from harness.hash_clusters.pipeline.pipeline_setups import (
    PipelineSetup,
    chaos_setup,
    crowded,
    draw_setup,
)
from harness.transports.local_pages import local_peer_rings
from harness.transports.local_stage_links import LocalStageLinks
from nanocp.values.commands import StagePrompt
from nanocp.values.members import Envelope, Member, Said
from nanocp.values.passes import (
    WAIT_CAUSES,
    LayerMoves,
    LayersMoved,
    PassDone,
    PassesPlan,
    PassPlan,
    ServiceEvent,
)
from nanocp.values.plan import Finished, Plan, WindowDone
from nanocp.values.sampling import SamplingParams


class StageProcess:
    """A stage, and everything under way to it and from it."""

    def __init__(self, index: int, stage: Any) -> None:
        self.index = index
        self.member = Member("instance", index)
        self.term = 1
        """The term that it is in."""
        self.stage = stage
        self.items: deque[PassPlan | LayerMoves | StagePrompt] = deque()
        self.events: deque[tuple[Member, int, Said]] = deque()
        """To the controller, in order, each with its term."""
        self.waits_for = ""

    def forget(self) -> None:
        """Drop what is under way to it: its term is over."""
        self.items.clear()


class HashPipeline(HashPlay):
    """Plays one seed. Raises as soon as something is wrong."""

    longest_prompt = 600
    scheduler: PipelineScheduler

    def __init__(
        self, seed: int, num_requests: int = 12, setup: PipelineSetup | None = None
    ) -> None:
        random = Random(seed)
        self.setup = setup = setup or draw_setup(random)
        super().__init__(random, setup.config, num_requests)
        self.num_layers = setup.pipeline.num_layers
        self.processes = [
            StageProcess(index, stage)
            for index, stage in enumerate(self._make_stages(self._new_ends()))
        ]
        self.loops = [self._loop(process) for process in self.processes]
        self.speeds = [random.choice([1, 1, 0.3, 0.03]) for _ in self.processes]
        self.abort_share = random.choice([0, 0.1, 0.3])
        self.prefix_share = random.choice([0, 0.5, 0.9])
        self.counts: Counter[str] = Counter()
        self._start_cluster()

    # --- the model

    def _new_ends(self) -> list[tuple[StageLinks, PageMover]]:
        """What the stages of a term are connected by."""
        num_stages = self.setup.pipeline.num_stages
        links, movers = LocalStageLinks.create_all(num_stages), local_peer_rings(num_stages)
        return list(zip(links, movers, strict=True))

    def _make_stages(self, ends: list[tuple[StageLinks, PageMover]]) -> list[Any]:
        """Make the stages of these ends, in order."""
        pipeline, num_frames = self.setup.pipeline, self.setup.cluster.num_frames
        num_dense_layers = self.random.randrange(pipeline.num_layers + 1)
        self.model = HashModel(pipeline.num_layers, num_dense_layers)
        return [
            hash_stage(stage, pipeline, num_frames, self.model, *own)
            for stage, own in enumerate(ends)
        ]

    @property
    def vocab_size(self) -> int:
        """Tokens of the model."""
        return self.model.vocab_size

    def _expected(self, prompt_ids: list[int], params: SamplingParams) -> list[int]:
        return self.model.generate(prompt_ids, params)

    def _kv_of(self, stage: Any, layer: int) -> Any:
        """The KV of one layer at a stage, by frame."""
        return stage.model.kv[stage.layers.place_of[layer]]

    # --- the play

    def _check_end(self) -> None:
        self._check_copies()
        self.counts["changes"] = self.scheduler.layouts.num_changes
        assert self.scheduler.load.frames_free == self.setup.cluster.num_frames

    def _turn(self) -> None:
        random = self.random
        self.now_us += random.randrange(200)
        draw = random.random()
        if draw < 0.02:
            self._arrive_or_abort()
        elif draw < 0.25:
            self._plan()
        else:
            self._run_some(random.randrange(len(self.processes)))

    def _run_some(self, index: int) -> None:
        if self.random.random() < self.speeds[index]:
            for _ in range(self.random.choice([1, 1, 4])):
                if next(self.loops[index]):
                    break

    def _is_over(self) -> bool:
        return (
            self._is_answered()
            and not (self.events or any(p.events or p.items for p in self.processes))
            and self.scheduler.load.frames_free == self.setup.cluster.num_frames
            and not self.scheduler.num_in_flight
            and not self.scheduler.layouts.is_moving
        )

    def arrive_together(self) -> None:
        """Let all requests arrive now, each with an output that needs a second frame.

        None is aborted: nobody would be left to outgrow anything.
        """
        self.abort_share = 0
        while len(self.stories) < self.num_requests:
            self._arrive(self.random.randrange(40, 65), self.random.randrange(26, 60))

    # --- what the coordinator sends

    def _check_plan(self, batch: list[ServiceEvent], plan: Plan) -> None:
        self.counts["preemptions"] += len(plan.preempted)
        moves = plan.layer_moves if isinstance(plan, PassesPlan) else None
        if moves is not None:
            is_mark = moves.split is not None
            self.counts["marks under chunks"] += is_mark and bool(self.scheduler._prompts_in)
            name = "sent at the mark" if is_mark else "sent ahead"
            for move in moves.moves:
                self.counts["moved layers"] += is_mark
                self.counts[name] += sum(count for _, count in move.frames)
        if isinstance(plan, PassesPlan) and plan.pass_plan is not None:
            self._check_pass(plan.pass_plan)

    def _call_scheduler(self, batch: list[ServiceEvent]) -> None:
        super()._call_scheduler(batch)
        if not self.scheduler._term.is_over:
            self.coordinator.flights.check()

    def _check_pass(self, plan: PassPlan) -> None:
        """What the design asks of every pass."""
        pipeline = self.setup.pipeline
        assert plan.number == self.counts["passes"]
        self.counts["passes"] += 1
        num_tokens = sum(span.num_tokens for span in plan.spans)
        assert 1 <= num_tokens <= pipeline.max_pass_tokens, plan
        assert plan.number - pipeline.num_stages <= plan.after < plan.number, plan
        ids = [span.request_id for span in plan.spans]
        assert len(set(ids)) == len(ids), f"a request is twice in one pass: {plan}"
        self.counts["chunks"] += sum(not span.samples for span in plan.spans)

    def _take_work(self, member: Member, envelope: Envelope) -> bool:
        self.processes[member.instance or 0].items.append(envelope.message)
        return True

    # --- stages

    def _loop(self, process: StageProcess) -> Generator[bool, None, None]:
        """Play one stage; yields whether it has to wait for something."""
        while True:
            while process.items and isinstance(process.items[0], StagePrompt):
                prompt = process.items.popleft()
                process.stage.requests.take_prompt(prompt.request_id, list(prompt.token_ids))
            if process.items:
                item = process.items.popleft()
                for waits_for in process.stage.run(item):
                    process.waits_for = waits_for
                    yield True
                finished = self._take_polled(process)
                if isinstance(item, PassPlan):
                    waits_us = (0,) * len(WAIT_CAUSES)
                    done = WindowDone(process.index, item.number, finished, waits_us=waits_us)
                    self._say(process, [done])
            elif self.random.random() < 0.5:
                process.stage.progress()
                self._take_polled(process)
            process.waits_for = ""
            yield not process.items

    def _take_polled(self, process: StageProcess) -> tuple[Finished, ...]:
        """Take what the stage has reported; returns the rows that its pass has ended."""
        polled, finished = process.stage.poll(), ()
        for event in polled.events:
            if isinstance(event, PassDone):
                finished = event.finished
            else:
                self._say(process, [LayersMoved(process.index, event.number)])
        for token in polled.tokens:
            if token.attempt != self.stories[token.request_id].attempt:
                self.counts["tokens of ended attempts"] += 1
            else:
                self._take_token(process, token)
                self.counts["tokens"] += 1
        return finished

    # --- verdict

    def _check_copies(self) -> None:
        """Nothing is under way, and what the scheduler takes for a good copy is the same KV."""
        places = self.scheduler.layouts.places
        full, _ = self.scheduler._full_and_live()  # pages that nobody has are compared with nothing
        stages = [process.stage for process in self.processes]
        for process in self.processes:
            layers = process.stage.layers
            assert not layers.coming and not layers.num_missing
        for (stage, layer), good in places.good.items():
            (owner,) = (s for s in range(len(stages)) if layer in stages[s].layers.own)
            kv = [self._kv_of(stages[s], layer) for s in (stage, owner)]
            for first, count in runs_of(good & full):
                frames = slice(first, first + count)
                assert (kv[0][frames] == kv[1][frames]).all(), (stage, layer, frames)
                self.counts["good copies"] += count

    def _describe(self) -> str:
        return f"{super()._describe()}, {[process.waits_for for process in self.processes]}"


def play(seed: int, is_chaos: bool = False) -> HashPipeline:
    """Play one seed to its end; a failure names the seed.

    is_chaos: layers move up to once a pass; with every fourth seed rows outgrow the frames too.
    """
    is_crowd = is_chaos and seed % 4 == 3
    setup = chaos_setup(seed) if is_chaos else None
    pipeline = HashPipeline(seed, setup=crowded(setup) if setup and is_crowd else setup)
    if is_crowd:
        pipeline.arrive_together()
    return played(pipeline, f"pipeline{'-chaos' * is_chaos} --seed {seed}")
