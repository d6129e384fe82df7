"""A pipeline of HashStages that loses some and goes on, at any turn, from one seed.

    PYTHONPATH=tests python -m harness.hash_pipeline_losses --seeds 1000
    PYTHONPATH=tests python -m harness.hash_pipeline_losses --seed N          replays one

All requests that are open begin another attempt, with what their clients were given. Terms also end
without a loss. Within a term single requests begin another attempt too, as front ends do when
tokens were lost on their way to them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from control_plane.frontend.page_hashes import page_hashes
from data_plane.fake.local_pages import local_peer_rings
from data_plane.fake.stage import HashStage
from data_plane.transport.stage_links import LocalStageLinks
from harness.hash_parts import Story
from harness.hash_pipeline import HashPipeline, StageProcess
from harness.pipeline_setups import chaos_setup
from nanocp.values.plan import (
    Arrival,
    FinishReason,
    InstanceLost,
    Preempted,
    Regrouped,
    Resubmitted,
    TermEnded,
)
from nanocp.values.sampling import RowInput, SamplingParams, penalized_prompt_ids
from nanocp.values.table import InstanceTable
from nanocp.wire.convert import encode_row_input


class LosingPipeline(HashPipeline):
    """Plays one seed. Raises as soon as something is wrong."""

    def __init__(self, seed: int, is_chaos: bool = False, max_losses: int = 4) -> None:
        super().__init__(seed, setup=chaos_setup(seed) if is_chaos else None)
        self.losses_left = max_losses
        self.loss_share = self.random.choice([0.0003, 0.002, 0.01])
        self.retry_share = self.random.choice([0, 0.0005, 0.005])
        self.retries_left = 12
        self.priorities: dict[int, int] = {}

    def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        priority: int = 0,
        deadline_us: int | None = None,
    ) -> Story:
        """Let a request arrive, whose class all its attempts have."""
        story = super().submit(prompt_ids, params, priority, deadline_us)
        self.priorities[story.request_id] = priority
        return story

    def _resume(self, preempted: Preempted) -> None:
        if self._is_unsent(self.stories[preempted.request_id]):
            return  # its next attempt is under way already
        super()._resume(preempted)
        self.priorities[preempted.request_id] = 0

    def _turn(self) -> None:
        if self.losses_left and self.stories and self.random.random() < self.loss_share:
            self.losses_left -= 1
            self._regroup()
        if self.retries_left and self.random.random() < self.retry_share:
            self._retry()
        super()._turn()

    def _retry(self) -> None:
        """The last tokens of a request do not come to its front end; it submits the rest again."""
        stories = [story for story in self.stories.values() if self._is_open(story)]
        if stories:
            story = self.random.choice(stories)
            for _ in range(self.random.choice([0, 1, 3])):
                if story.output:
                    story.output.popitem()
            self.retries_left -= 1
            self.counts["retries"] += 1
            self._begin_attempt(story)

    def _is_open(self, story: Story) -> bool:
        return not (story.is_settled or story.is_aborted or self._is_unsent(story))

    def _regroup(self) -> None:
        """A term ends; some stages are new in the next one."""
        random, pipeline = self.random, self.setup.pipeline
        num = pipeline.num_stages
        lost = random.sample(range(num), random.choice([0, 1, 1, num]))
        ends = [InstanceLost(stage) for stage in lost] or [TermEnded()]
        self._carry_out(self.scheduler.plan_pass(ends, self.now_us))
        for process in self.processes:
            process.items.clear()
            process.events.clear()
        for _ in range(random.choice([0, 1, 5])):  # clients come and go meanwhile
            self._arrive_or_abort()
            self._plan()
        links, movers = LocalStageLinks.create_all(num), local_peer_rings(num)
        for index, process in enumerate(self.processes):
            if index in lost:
                frames = self.setup.cluster.num_frames
                stage = HashStage(index, pipeline, frames, self.model, links[index], movers[index])
                process = self.processes[index] = StageProcess(stage)
            else:
                process.stage.leave()
                process.stage.enter(links[index], movers[index])
            self.loops[index] = self._stage_loop(process)
        self.table = InstanceTable(0, 1)
        self.counts["terms"] += 1
        self.counts["lost stages"] += len(lost)
        self.counts["passes of ended terms"] += self.counts.pop("passes", 0)
        regrouped = Regrouped(1 + self.counts["terms"], tuple(range(num)))
        self._carry_out(self.scheduler.plan_pass([regrouped], self.now_us))
        for story in self.stories.values():
            if not story.is_settled and not self._is_unsent(story):
                self._begin_attempt(story)
        self.events.append(Resubmitted())

    def _is_unsent(self, story: Story) -> bool:
        """Whether the controller has not taken the request's first submission."""
        ids = [event.request_id for event in self.events if isinstance(event, Arrival)]
        return story.request_id in ids

    def _begin_attempt(self, story: Story) -> None:
        self.attempts[story.request_id] += 1
        self.counts["attempts"] += 1
        attempt, output_ids = self.attempts[story.request_id], tuple(story.output.values())
        story.known_ids = [*story.prompt_ids, *output_ids]
        penalized = penalized_prompt_ids(story.prompt_ids, story.params)
        row = RowInput(
            story.known_ids[-1], story.params, "front-end:1", output_ids, penalized, attempt
        )
        self.events.append(
            Arrival(
                story.request_id,
                len(story.known_ids),
                story.params.max_tokens - len(output_ids),
                encode_row_input(row),
                priority=self.priorities[story.request_id],
                resumes=story.num_preemptions > 0,
                page_hashes=page_hashes(story.known_ids),
                attempt=attempt,
            )
        )

    def _check_story(self, story: Story) -> None:
        if story.reason is FinishReason.FATAL:
            assert self.attempts[story.request_id] >= 3, story
            story.reason = FinishReason.ABORTED
            story.is_aborted = True
        if story.reason is FinishReason.EXPIRED and self.attempts[story.request_id]:
            return  # it has waited in the queue, with what it had
        super()._check_story(story)


def play(seed: int, is_chaos: bool = False) -> LosingPipeline:
    """Play one seed to its end; a failure names the seed."""
    pipeline = LosingPipeline(seed, is_chaos)
    try:
        pipeline.play()
    except Exception as error:
        error.add_note(f"seed {seed}, is_chaos {is_chaos}: {pipeline.setup}")
        raise
    return pipeline


def main() -> None:
    """Play seeds from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--chaos", action="store_true", help="layers move up to once a pass")
    arguments = parser.parse_args()
    seeds = range(arguments.seeds) if arguments.seed is None else [arguments.seed]
    begin, totals = time.monotonic(), Counter[str]()
    for seed in seeds:
        totals += play(seed, arguments.chaos).counts
    seconds = time.monotonic() - begin
    print(f"{len(seeds)} seeds in {seconds:.1f} s: {dict(totals)}", file=sys.stdout)


if __name__ == "__main__":
    main()
