"""Requests of a play, from one seed: how they arrive, what they must get, who carries plans out.

The coordinator is the real one: it calls the scheduler and carries its plans out. A play has the
streams, the clock and the processes, and draws when anything on its way comes.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from functools import partial
from random import Random
from typing import Any, TypeVar

from control_plane.ports.controller_interface import ControllerEvents, Submission
from harness.hash_clusters.hash_coordinator import HashCoordinator
from harness.hash_clusters.hash_parts import Story, row_start
from nanocp.config.whole import Config
from nanocp.values.members import Member, Ready, Said
from nanocp.values.offload import page_hashes
from nanocp.values.plan import AbortRequested, Arrival, Ended, FinishReason, Placement, Preempted
from nanocp.values.sampling import SamplingParams, Token

MAX_TURNS = 1_500_000


def below(random: Random, number: int) -> int:
    """What `random.randrange(number)` draws, in less time."""
    num_bits = number.bit_length()
    while (drawn := random.getrandbits(num_bits)) >= number:
        pass
    return drawn


class HashPlay:
    """Plays one seed. Raises AssertionError as soon as something is wrong.

    Heirs have processes, and what happens at a turn: `_new_ends` connects the processes of a term,
    `_loop` is what one does in it (it yields whether it has to wait), `_take_work` gives it a
    message. `_expected` are the tokens that a request must get; `_check_plan` and `_check_end` are
    for what else must be right.
    """

    coordinator: HashCoordinator
    loops: list[Generator[bool, None, None]]
    processes: list[Any]
    """By seat: instances or stages, with what is under way from each in `events`."""
    vocab_size: int
    longest_prompt = 700
    num_layers = 0
    """Layers of a pipeline; 0: of instances."""

    def __init__(self, random: Random, config: Config, num_requests: int) -> None:
        self.random, self.config = random, config
        self.events: deque[Callable[[], None] | tuple[Member, int, Said]] = deque()
        """Under way to the coordinator, in order: calls of it, and what members say in a term."""
        self.stories: dict[int, Story] = {}
        self.num_requests = num_requests
        self.now_us = 0
        self.deadline_share = 0.1
        self.num_stale_events = self.num_failed_transfers = self.num_missed = 0
        self._awaited: Story | None = None
        """One that was not settled when it was last looked at."""

    def _start_cluster(self) -> None:
        """The first term begins."""
        self._new_coordinator(self.config)
        for seat in range(len(self.processes)):
            self.coordinator.dial(seat)
        self._settle()
        for process, inbox in zip(self.processes, self.coordinator.inboxes, strict=True):
            inbox.clear()
            self.coordinator.heard(process.member, Ready(), 1)
        self._settle()

    def _new_coordinator(self, config: Config, first_term: int = 0) -> None:
        events, take_work = self._front_end_events(), self._take_work
        self.coordinator = HashCoordinator(config, events, take_work, first_term, self.num_layers)

    def _front_end_events(self) -> ControllerEvents:
        """The front end, as the controller sees it."""
        return self

    @property
    def scheduler(self) -> Any:
        """The scheduler of the present controller."""
        return self.coordinator.scheduler

    # --- the play

    def play(self) -> None:
        """Until every request is settled and every frame is free."""
        for _ in range(MAX_TURNS):
            self._turn()
            if self._is_over():
                break
        else:
            raise AssertionError(f"not over after {MAX_TURNS} turns: {self._describe()}")
        self._check_end()
        assert not any(load.kv_tokens or load.num_rows for load in self.scheduler.requests.loads())
        self._check_answers()

    def _check_answers(self) -> None:
        for story in self.stories.values():
            self._check_story(story)

    def _is_answered(self) -> bool:
        if len(self.stories) != self.num_requests:
            return False
        if self._awaited is None or self._awaited.is_settled:
            stories = self.stories.values()
            self._awaited = next((each for each in stories if not each.is_settled), None)
        return self._awaited is None

    # --- requests and their front end

    def _arrive_or_abort(self) -> None:
        random = self.random
        if self.stories and random.random() < self.abort_share:
            running = [story for story in self.stories.values() if not story.is_settled]
            story = random.choice(running or list(self.stories.values()))
            story.is_aborted = True
            self._abort(story.request_id)
        elif len(self.stories) < self.num_requests:
            for _ in range(random.choice([1, 1, 1, 5])):
                if len(self.stories) < self.num_requests:
                    self._arrive()

    def _arrive(self, prompt_len: int = 0, max_tokens: int = 0) -> None:
        """A request of these lengths, or of any."""
        prompt_ids, params = self._draw_request(prompt_len, max_tokens)
        timeout_us = 20_000 if self.random.random() < self.deadline_share else None
        self.ask(prompt_ids, params, self.random.choice([0, 0, 0, 1]), timeout_us)

    def ask(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        priority: int = 0,
        timeout_us: int | None = None,
    ) -> Story:
        """Let a request arrive."""
        request_id = len(self.stories) + 1
        expected = self._expected(prompt_ids, params)
        story = Story(request_id, prompt_ids, params, expected, prompt_ids, priority)
        self.stories[request_id] = story
        self._submit_story(story, timeout_us)
        return story

    def _submit_story(
        self, story: Story, timeout_us: int | None = None, resumes: bool = False
    ) -> None:
        known, num_generated = story.known_ids, len(story.known_ids) - len(story.prompt_ids)
        story.is_unsent = True
        arrival = Arrival(
            story.request_id, len(known), story.params.max_tokens - num_generated,
            row_start(self.config, story), priority=story.priority, resumes=resumes,
            attempt=story.attempt, page_hashes=page_hashes(known),
        )  # fmt: skip
        submission = Submission(arrival, known, timeout_us)
        self.events.append(partial(self._submitted, story, submission, self.now_us))

    def _submitted(self, story: Story, submission: Submission, now_us: int) -> None:
        story.is_unsent = False
        self.coordinator.submitted(submission, now_us)

    def _abort(self, request_id: int) -> None:
        self.events.append(partial(self.coordinator.happened, AbortRequested(request_id)))

    def _draw_request(self, prompt_len: int, max_tokens: int) -> tuple[list[int], SamplingParams]:
        """A prompt and its parameters, of these lengths or of any."""
        random, longest = self.random, self.longest_prompt
        any_prompt_len = random.choice(
            [1, 2, 63, 64, 65, random.randrange(1, 130), random.randrange(1, longest)]
        )
        longest = (self.num_layers and prompt_len) or longest
        prompt_len = prompt_len or any_prompt_len
        prompt_ids = [below(random, self.vocab_size) for _ in range(prompt_len)]
        if (earlier := self._known_prompts()) and random.random() < self.prefix_share:
            common = random.choice([*earlier.values()])
            common = common[: random.choice([len(common), random.randrange(len(common) + 1)])]
            prompt_ids = [*common, *prompt_ids][:longest]
        any_max_tokens = random.choice([1, 3, 20, random.randrange(1, 150)])
        return prompt_ids, self._draw_params(max_tokens or any_max_tokens)

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

    def _known_prompts(self) -> dict[int, list[int]]:
        """By request id: what it was last submitted with."""
        return {story.request_id: story.known_ids for story in self.stories.values()}

    # --- controller_interface.ControllerEvents

    def placed(self, placement: Placement, num_cached: int | None = None) -> None:
        """See ControllerEvents."""

    def preempted(self, preempted: Preempted) -> None:
        """Submit it again; see ControllerEvents.

        The front end has every token by now: an event comes after the tokens of its step.
        """
        story = self.stories[preempted.request_id]
        story.num_preemptions += 1
        num_generated = preempted.num_tokens - len(story.prompt_ids)
        assert len(story.output) == num_generated, "the scheduler knows the row's position"
        story.know_output()
        story.priority = 0
        self._submit_story(story, resumes=True)

    def ended(self, ended: Ended) -> None:
        """See ControllerEvents."""
        story = self.stories[ended.request_id]
        story.reason, story.is_settled = ended.reason, True

    # --- the way to the coordinator and back

    def _plan(self) -> None:
        sources = [*(process.events for process in self.processes), self.events]
        for source in self.random.sample(sources, len(sources)):
            for _ in range(min(len(source), (0, 1, 100)[below(self.random, 3)])):
                self._take(source.popleft())
        batch = self.coordinator.take_events()
        if batch or self.random.random() >= 0.9:
            self._call_scheduler(batch)

    def _take(self, entry: Callable[[], None] | tuple[Member, int, Said]) -> None:
        """What was under way to the coordinator has come."""
        if not isinstance(entry, tuple):
            entry()
            return
        member, term, said = entry
        self.num_stale_events += not self.coordinator.heard(member, said, term)
        if self.coordinator.members.output:
            self._settle()

    def _call_scheduler(self, batch: list[Any]) -> None:
        plan = self.coordinator.flights.plan(batch, self.now_us)
        self._check_plan(batch, plan)
        self.coordinator.carry_out(plan, self.now_us)
        if (experts := self.coordinator.flights.experts) is not None:
            experts.advance(lambda: False)
        self._settle()

    def _settle(self) -> None:
        """Carry out what leaves the coordinator."""
        self.coordinator.settle()

    def _say(self, process: Any, events: Iterable[Said]) -> None:
        process.events.extend((process.member, process.term, event) for event in events)

    # --- the judge

    def _take_token(self, process: Any, token: Token) -> None:
        story = self.stories[token.request_id]
        name = f"token {token.index} of request {token.request_id}"
        assert token.index not in story.output, f"{name} came twice"
        if story.owners is not None:
            assert story.owners.may_generate(token.index, process.index), (
                f"{name} comes from instance {process.index}, and the front end would refuse it: "
                f"{story.owners._bindings}"
            )
        story.output[token.index] = token.token_id
        self._check_token(story, token, name)
        story.is_settled |= token.finish_reason is not None

    def _check_token(self, story: Story, token: Token, name: str) -> None:
        expected = story.expected[token.index] if token.index < len(story.expected) else None
        assert token.token_id == expected, f"{name} is {token.token_id}, not {expected}"
        is_last = token.index == len(story.expected) - 1
        assert is_last or token.finish_reason is None, f"{name} is not the last"

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
            f"requests {unsettled} are not settled, {self.scheduler.requests.num_waiting} wait, "
            f"{self.scheduler.requests.num_running} run, loads {self.scheduler.requests.loads()}"
        )


Play = TypeVar("Play", bound=HashPlay)


def played(play: Play, how: str) -> Play:
    """Play to the end; a failure says how to play it again. how: kind and seed."""
    try:
        play.play()
    except Exception as error:
        command = f"PYTHONPATH=tests python -m harness.seed_campaign --kind {how}"
        error.add_note(f"replay: {command}   ({play.config})")
        raise
    return play
