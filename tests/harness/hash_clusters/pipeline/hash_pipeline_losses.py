"""A pipeline of hash stages that loses some and goes on, at any turn, from one seed.

    PYTHONPATH=tests python -m harness.seed_campaign --kind pipeline-losses --seeds 1000

All requests that are open begin another attempt, with what their clients were given. Terms also end
without a loss. Within a term single requests begin another attempt too, as front ends do when
tokens were lost on their way to them.
"""

from functools import partial
from typing import Any

from harness.hash_clusters.hash_parts import Story
from harness.hash_clusters.hash_play import played
from harness.hash_clusters.hash_terms import RegroupingPlay
from harness.hash_clusters.pipeline.hash_pipeline import HashPipeline, StageProcess
from harness.hash_clusters.pipeline.hash_stage import hash_stage
from harness.hash_clusters.pipeline.pipeline_setups import chaos_setup
from nanocp.values.commands import Join
from nanocp.values.plan import FinishReason, Preempted


class LosingPipeline(RegroupingPlay, HashPipeline):
    """Plays one seed. Raises as soon as something is wrong."""

    def __init__(self, seed: int, is_chaos: bool = False, max_losses: int = 4) -> None:
        super().__init__(seed, setup=chaos_setup(seed) if is_chaos else None)
        self._draw_terms()
        self.losses_left = max_losses
        self.loss_share = self.random.choice([0.0003, 0.002, 0.01])
        self.retry_share = self.random.choice([0, 0.0005, 0.005])
        self.retries_left = 12
        self._begin_cluster()

    def _turn(self) -> None:
        random = self.random
        self._pass_time()
        may_lose = self.losses_left and self.stories and self.is_serving and self._may_lose()
        if may_lose and random.random() < self.loss_share:
            self._lose_some()
        if self.retries_left and random.random() < self.retry_share:
            self._retry()
        seats = self.coordinator.may_go_on()
        if seats and random.random() < (0.06 if self.is_serving else 0.5):
            self._go_on(random.choice(seats))
        else:
            super()._turn()

    def _lose_some(self) -> None:
        """Some stages are lost, or none and the term ends all the same."""
        random, num = self.random, len(self.processes)
        self.losses_left -= 1
        lost = random.sample(range(num), random.choice([0, 1, 1, num]))
        self.counts["lost stages"] += len(lost)
        for index in lost:
            self._die(index, "it was ended by SIGKILL", random.random() < 0.7)
        if not lost:
            self._end_term()
        self._settle()

    # --- requests

    def preempted(self, preempted: Preempted) -> None:
        """See ControllerEvents."""
        if not self.stories[preempted.request_id].is_unsent:  # else its next attempt is under way
            super().preempted(preempted)

    def interrupted(self) -> int:
        """See ControllerEvents."""
        for story in self.stories.values():
            if not story.is_settled and not story.is_unsent:
                self._begin_attempt(story)
        self.events.append(partial(self.coordinator.owe, -1))
        return 1

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
        return not (story.is_settled or story.is_aborted or story.is_unsent)

    def _begin_attempt(self, story: Story) -> None:
        story.attempt += 1
        self.counts["attempts"] += 1
        story.know_output()
        self._submit_story(story, resumes=story.num_preemptions > 0)

    def _check_story(self, story: Story) -> None:
        if story.reason is FinishReason.FATAL:
            assert story.attempt >= 3, story
            story.reason = FinishReason.ABORTED
            story.is_aborted = True
        if story.reason is FinishReason.EXPIRED and story.attempt:
            return  # it has waited in the queue, with what it had
        super()._check_story(story)

    # --- stages and terms

    def _leave_term(self, process: StageProcess) -> None:
        process.stage.leave()

    def _join_term(self, index: int, ends: Any, join: Join) -> StageProcess:
        process = self.processes[index]
        if index in self.lost:
            setup = self.setup
            frames = setup.cluster.num_frames
            stage = hash_stage(index, setup.pipeline, frames, self.model, *ends)
            return StageProcess(index, stage)
        process.stage.enter(*ends)
        return process

    def _term_began(self, keeps_rows: bool) -> None:
        super()._term_began(keeps_rows)
        self.counts["terms"] += 1
        self.counts["passes of ended terms"] += self.counts.pop("passes", 0)


def play(seed: int, is_chaos: bool = False) -> LosingPipeline:
    """Play one seed to its end; a failure names the seed."""
    how = f"pipeline-losses{'-chaos' * is_chaos} --seed {seed}"
    return played(LosingPipeline(seed, is_chaos), how)
