"""A whole pipeline in one thread, from one seed: the real scheduler and HashStages.

Everything that happens is drawn from the seed: the configuration, arrivals, aborts, stops, which
stage goes on next, how long messages are under way. `PYTHONPATH=tests python -m
harness.hash_pipeline [--chaos] --seeds 1000` plays many seeds, `--seed N` replays one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

from control_plane.frontend.page_hashes import page_hashes
from control_plane.scheduler.pipeline.invariants import check_pipeline
from control_plane.scheduler.pipeline.layer_places import runs_of
from control_plane.scheduler.pipeline.pipeline_scheduler import PipelineEvent, PipelineScheduler
from data_plane.instance.interface import PageMover
from data_plane.transport.stage_links import LocalStageLinks, StageLinks
from harness.hash_model import HashModel
from harness.hash_parts import Story
from harness.hash_stage import HashStage
from harness.local_pages import local_peer_rings
from harness.pipeline_setups import PipelineSetup, chaos_setup, crowded, draw_setup
from nanocp.values.passes import LayerMoves, PassPlan, PipelinePlan
from nanocp.values.plan import AbortRequested, Arrival, FinishReason, Preempted
from nanocp.values.sampling import RowInput, SamplingParams, Token, penalized_prompt_ids
from nanocp.values.table import InstanceTable
from nanocp.wire.convert import encode_row_input

MAX_TURNS = 1_500_000


class Prompt(NamedTuple):
    """What the first stage gets before the pass in which a request starts."""

    request_id: int
    known_ids: list[int]


class StageProcess:
    """A stage, and everything under way to it and from it."""

    def __init__(self, stage: Any) -> None:
        self.stage = stage
        self.items: deque[PassPlan | LayerMoves | Prompt] = deque()
        self.events: deque[PipelineEvent] = deque()
        self.waits_for = ""


class HashPipeline:
    """Plays one seed. Raises as soon as something is wrong."""

    def __init__(
        self, seed: int, num_requests: int = 12, setup: PipelineSetup | None = None
    ) -> None:
        self.random = random = Random(seed)
        self.setup = setup = setup or draw_setup(random)
        pipeline = setup.pipeline
        self.scheduler = PipelineScheduler(*setup)
        links = LocalStageLinks.create_all(pipeline.num_stages)
        movers = local_peer_rings(pipeline.num_stages)
        ends = list(zip(links, movers, strict=True))
        self.processes = [StageProcess(stage) for stage in self._make_stages(ends)]
        self.loops = [self._stage_loop(process) for process in self.processes]
        self.events: deque[PipelineEvent] = deque()
        self.table = InstanceTable(0, 1)
        self.speeds = [random.choice([1, 1, 0.3, 0.03]) for _ in self.processes]
        self.abort_share = random.choice([0, 0.1, 0.3])
        self.prefix_share = random.choice([0, 0.5, 0.9])
        self.stories: dict[int, Story] = {}
        self.attempts: Counter[int] = Counter()
        """Request -> its present attempt."""
        self.num_requests = num_requests
        self.now_us = 0
        self.counts: Counter[str] = Counter()
        self.num_reported = 0

    # --- the model

    def _make_stages(self, ends: list[tuple[StageLinks, PageMover]]) -> list[Any]:
        """Make the stages of these ends, in order."""
        pipeline, num_frames = self.setup.pipeline, self.setup.cluster.num_frames
        num_dense_layers = self.random.randrange(pipeline.num_layers + 1)
        self.model = HashModel(pipeline.num_layers, num_dense_layers)
        return [
            HashStage(stage, pipeline, num_frames, self.model, *own)
            for stage, own in enumerate(ends)
        ]

    @property
    def vocab_size(self) -> int:
        """Tokens of the model."""
        return self.model.vocab_size

    def _draw_params(self, max_tokens: int) -> SamplingParams:
        random = self.random
        num_stop_ids = random.choice([0, 0, 1, 3])
        return SamplingParams(
            temperature=1.0,
            max_tokens=max_tokens,
            min_tokens=random.randrange(max_tokens + 1) if num_stop_ids else 0,
            seed=random.randrange(1 << 32),
            stop_token_ids=tuple(random.randrange(self.vocab_size) for _ in range(num_stop_ids)),
        )

    def _expected(self, prompt_ids: list[int], params: SamplingParams) -> list[int]:
        return self.model.generate(prompt_ids, params)

    def _kv_of(self, stage: Any, layer: int) -> Any:
        """The KV of one layer at a stage, by frame."""
        return stage._kv[stage._place_of[layer]]

    # --- the play

    def play(self) -> None:
        """Until every request is settled and every frame is free."""
        for _ in range(MAX_TURNS):
            self._turn()
            if self._is_over():
                break
        else:
            raise AssertionError(f"not over after {MAX_TURNS} turns: {self._describe()}")
        self._check_copies()
        self.counts["changes"] = self.scheduler.layouts.num_changes
        load, num_frames = self.scheduler.load, self.setup.cluster.num_frames
        assert (load.frames_free, load.kv_tokens, load.num_rows) == (num_frames, 0, 0), load
        for story in self.stories.values():
            self._check_story(story)

    def _turn(self) -> None:
        random = self.random
        self.now_us += random.randrange(200)
        draw = random.random()
        if draw < 0.02:
            self._arrive_or_abort()
        elif draw < 0.25:
            self._plan()
        else:
            index = random.randrange(len(self.processes))
            if random.random() < self.speeds[index]:
                for _ in range(random.choice([1, 1, 4])):
                    if next(self.loops[index]):
                        break

    def _is_over(self) -> bool:
        settled = [story.is_settled for story in self.stories.values()]
        return (
            len(settled) == self.num_requests
            and all(settled)
            and not (self.events or any(p.events or p.items for p in self.processes))
            and self.scheduler.load.frames_free == self.setup.cluster.num_frames
            and self._is_quiet()
        )

    def _is_quiet(self) -> bool:
        return not self.scheduler.num_in_flight and not self.scheduler.layouts.is_moving

    def _arrive_or_abort(self) -> None:
        random = self.random
        if self.stories and random.random() < self.abort_share:
            running = [story for story in self.stories.values() if not story.is_settled]
            story = random.choice(running or list(self.stories.values()))
            story.is_aborted = True
            self.events.append(AbortRequested(story.request_id))
        else:
            for _ in range(random.choice([1, 1, 1, 5])):
                if len(self.stories) < self.num_requests:
                    self._arrive()

    def arrive_together(self) -> None:
        """Let all requests arrive now, each with an output that needs a second frame.

        Few are aborted: nobody would be left to outgrow anything.
        """
        self.abort_share /= 10
        while len(self.stories) < self.num_requests:
            self._arrive(self.random.randrange(40, 65), self.random.randrange(26, 60))

    def _arrive(self, prompt_len: int = 0, max_tokens: int = 0) -> None:
        random, vocab_size, longest = self.random, self.vocab_size, prompt_len or 600
        any_prompt_len = random.choice(
            [1, 2, 63, 64, 65, random.randrange(1, 130), random.randrange(1, 400)]
        )
        prompt_len = prompt_len or any_prompt_len
        prompt_ids = [random.randrange(vocab_size) for _ in range(prompt_len)]
        if self.stories and random.random() < self.prefix_share:
            common = random.choice([story.known_ids for story in self.stories.values()])
            common = common[: random.choice([len(common), random.randrange(len(common) + 1)])]
            prompt_ids = [*common, *prompt_ids][:longest]
        max_tokens = max_tokens or random.choice([1, 3, 20, random.randrange(1, 150)])
        params = self._draw_params(max_tokens)
        priority = random.choice([0, 0, 0, 1])
        deadline_us = self.now_us + 20_000 if random.random() < 0.1 else None
        self.submit(prompt_ids, params, priority, deadline_us)

    def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        priority: int = 0,
        deadline_us: int | None = None,
    ) -> Story:
        """Let a request arrive."""
        request_id = len(self.stories) + 1
        expected = self._expected(prompt_ids, params)
        story = Story(request_id, prompt_ids, params, expected, prompt_ids, owners=None)
        self.stories[request_id] = story
        penalized = penalized_prompt_ids(prompt_ids, params)
        row = RowInput(prompt_ids[-1], params, "front-end:1", (), penalized)
        self.events.append(
            Arrival(
                request_id,
                len(prompt_ids),
                params.max_tokens,
                encode_row_input(row),
                priority=priority,
                deadline_us=deadline_us,
                page_hashes=page_hashes(prompt_ids),
            )
        )
        return story

    def _resume(self, preempted: Preempted) -> None:
        """Submit a preempted request again, as the front end does once it has every token."""
        story = self.stories[preempted.request_id]
        story.num_preemptions += 1
        num_generated = preempted.num_tokens - len(story.prompt_ids)
        assert len(story.output) == num_generated, "the scheduler knows how many tokens there are"
        output_ids = tuple(story.output[index] for index in range(num_generated))
        story.known_ids = [*story.prompt_ids, *output_ids]
        penalized = penalized_prompt_ids(story.prompt_ids, story.params)
        attempt, last_id = self.attempts[story.request_id], story.known_ids[-1]
        row = RowInput(last_id, story.params, "front-end:1", output_ids, penalized, attempt)
        self.events.append(
            Arrival(
                preempted.request_id,
                preempted.num_tokens,
                story.params.max_tokens - num_generated,
                encode_row_input(row),
                resumes=True,
                page_hashes=page_hashes(story.known_ids),
                attempt=attempt,
            )
        )

    # --- controller

    def _plan(self) -> None:
        batch: list[PipelineEvent] = []
        sources = [*(process.events for process in self.processes), self.events]
        for source in self.random.sample(sources, len(sources)):
            for _ in range(min(len(source), self.random.choice([0, 1, 100]))):
                batch.append(source.popleft())
        if batch or self.random.random() >= 0.9:
            plan = self.scheduler.plan_pass(batch, self.now_us)
            self._carry_out(plan)

    def _carry_out(self, plan: PipelinePlan) -> None:
        if plan.layer_moves is not None:
            is_mark = plan.layer_moves.split is not None
            self.counts["marks under chunks"] += is_mark and bool(self.scheduler._prompts_in)
            name = "sent at the mark" if is_mark else "sent ahead"
            for move in plan.layer_moves.moves:
                self.counts["moved layers"] += is_mark
                self.counts[name] += sum(count for _, count in move.frames)
            self._send(plan.layer_moves)
        if plan.pass_plan is not None:
            self._check_pass(plan.pass_plan)
            for start in plan.pass_plan.table.starts:
                known_ids = self.stories[start.request_id].known_ids
                self.processes[0].items.append(Prompt(start.request_id, known_ids))
            self._send(plan.pass_plan)
        check_pipeline(self.scheduler, self.table)
        for ended in plan.ended:
            story = self.stories[ended.request_id]
            story.reason, story.is_settled = ended.reason, True
        for preempted in plan.preempted:
            self.counts["preemptions"] += 1
            self._resume(preempted)

    def _send(self, item: PassPlan | LayerMoves) -> None:
        for process in self.processes:
            process.items.append(item)

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
        self.table.apply(plan.table.changes)

    # --- stages

    def _stage_loop(self, process: StageProcess) -> Iterator[bool]:
        """Play one stage; yields whether it has to wait for something."""
        while True:
            while process.items and isinstance(process.items[0], Prompt):
                process.stage.take_prompt(*process.items.popleft())
            if process.items:
                for waits_for in process.stage.run(process.items.popleft()):
                    process.waits_for = waits_for
                    self._take_polled(process)
                    yield True
            elif self.random.random() < 0.5:
                process.stage.progress()
            process.waits_for = ""
            self._take_polled(process)
            yield not process.items

    def _take_polled(self, process: StageProcess) -> None:
        polled = process.stage.poll()
        process.events.extend(polled.events)
        for token in polled.tokens:
            if token.attempt != self.attempts[token.request_id]:
                self.counts["tokens of ended attempts"] += 1
                continue
            story = self.stories[token.request_id]
            name = f"token {token.index} of request {token.request_id}"
            assert token.index not in story.output, f"{name} came twice"
            story.output[token.index] = token.token_id
            self._check_token(story, token, name)
            self.counts["tokens"] += 1
            story.is_settled |= token.finish_reason is not None

    def _check_token(self, story: Story, token: Token, name: str) -> None:
        expected = story.expected[token.index] if token.index < len(story.expected) else None
        assert token.token_id == expected, f"{name} is {token.token_id}, not {expected}"
        is_last = token.index == len(story.expected) - 1
        assert is_last or token.finish_reason is None, f"{name} is not the last"

    # --- verdict

    def _check_copies(self) -> None:
        """Nothing is under way, and what the scheduler takes for a good copy is the same KV."""
        places = self.scheduler.layouts.places
        full, _ = self.scheduler._full_and_live()  # pages that nobody has are compared with nothing
        stages = [process.stage for process in self.processes]
        for process in self.processes:
            assert not process.stage._coming and not process.stage._num_missing
        for (stage, layer), good in places.good.items():
            (owner,) = (s for s in range(len(stages)) if layer in stages[s]._layers)
            kv = [self._kv_of(stages[s], layer) for s in (stage, owner)]
            for first, count in runs_of(good & full):
                frames = slice(first, first + count)
                assert (kv[0][frames] == kv[1][frames]).all(), (stage, layer, frames)
                self.counts["good copies"] += count

    def _check_story(self, story: Story) -> None:
        num_tokens = len(story.output)
        assert sorted(story.output) == list(range(num_tokens)), story
        if story.reason is None:
            assert num_tokens == len(story.expected), story
        elif story.reason is FinishReason.ABORTED:
            assert story.is_aborted, story
        elif story.reason is FinishReason.EXPIRED:
            assert not num_tokens, story
        else:
            assert story.reason is FinishReason.REFUSED, story
            assert self.setup.scheduler.max_queued_requests == 4, story
        assert story.num_preemptions <= 1, story

    def _describe(self) -> str:
        unsettled = [story.request_id for story in self.stories.values() if not story.is_settled]
        return (
            f"requests {unsettled} are not settled, {self.scheduler.num_waiting} wait, "
            f"{self.scheduler.num_running} run, {self.scheduler.load}, "
            f"{[process.waits_for for process in self.processes]}"
        )


def play(seed: int, is_chaos: bool = False) -> HashPipeline:
    """Play one seed to its end; a failure names the seed.

    is_chaos: layers move up to once a pass; with every fourth seed rows outgrow the frames too.
    """
    is_crowd = is_chaos and seed % 4 == 3
    setup = chaos_setup(seed) if is_chaos else None
    pipeline = HashPipeline(seed, setup=crowded(setup) if setup and is_crowd else setup)
    if is_crowd:
        pipeline.arrive_together()
    try:
        pipeline.play()
    except Exception as error:
        arguments = f"{'--chaos ' * is_chaos}--seed {seed}"
        error.add_note(
            f"replay: PYTHONPATH=tests python -m harness.hash_pipeline {arguments}   "
            f"({pipeline.setup})"
        )
        raise
    return pipeline


def main() -> None:
    """Play seeds from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=1000, help="play seeds FIRST .. FIRST + SEEDS - 1"
    )
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="play this one only")
    parser.add_argument("--chaos", action="store_true", help="layers move up to once a pass")
    arguments = parser.parse_args()
    first = arguments.first
    seeds = range(first, first + arguments.seeds) if arguments.seed is None else [arguments.seed]
    begin, totals = time.monotonic(), Counter[str]()
    for seed in seeds:
        pipeline = play(seed, arguments.chaos)
        totals += pipeline.counts
        totals["shared tokens"] += pipeline.scheduler.prefix_sharing.num_hit_tokens
        for story in pipeline.stories.values():
            totals[story.reason.value if story.reason else "complete"] += 1
    seconds = time.monotonic() - begin
    print(f"{len(seeds)} seeds in {seconds:.1f} s: {dict(totals)}", file=sys.stdout)


if __name__ == "__main__":
    main()
