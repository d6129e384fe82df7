"""A hash cluster that loses instances and goes on, by the real coordinator of members.

The scheduler and the front end's streams are real too. Terms end at any turn, with losses or
without, and some lost processes live on. In some seeds a stream is full in the middle of a plan.

    PYTHONPATH=tests python -m harness.seed_campaign --kind losses --seeds 1000     with losses
    PYTHONPATH=tests python -m harness.seed_campaign --kind regroups --seeds 1000   without

Each attempt samples under a seed of its own, and the judge goes on from what the client was given:
a token of an earlier attempt that slips through is a wrong token, and not the same one again.
"""

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial

from control_plane.frontend.client_request import Origin
from control_plane.frontend.client_stream import Choice, ClientStream
from control_plane.frontend.streams import ClientStreams
from control_plane.ports.controller_interface import Submission
from data_plane.instance.rows import Row
from harness.hash_clusters.hash_model import NUM_EXPERTS
from harness.hash_clusters.hash_parts import Expected, Process, Unobserved
from harness.hash_clusters.hash_terms import RegroupingCluster
from nanocp.config.whole import Config
from nanocp.values.commands import Join
from nanocp.values.members import PREFILL, Member
from nanocp.values.plan import Ended, FinishReason, Placement, Preempted
from nanocp.values.sampling import Token


class ReseedingStreams(ClientStreams):
    """Every attempt of a request samples under another seed."""

    def _begin_attempt(self, stream: ClientStream, cause: str) -> None:
        params = stream.choice.params
        stream.choice = replace(stream.choice, params=replace(params, seed=params.seed + 1))
        super()._begin_attempt(stream, cause)


class RecoveringCluster(RegroupingCluster):
    """Plays one seed. Raises AssertionError as soon as something is wrong."""

    prefill_loss_share = 0.25
    """How many of the losses are those of the prefill."""

    def __init__(
        self,
        seed: int,
        max_losses: int,
        max_regroups: int = 0,
        max_changes: int = 0,
        num_requests: int = 16,
        config: Config | None = None,
    ) -> None:
        """Draw a cluster and its requests.

        max_losses: at most this often some instances are lost. max_regroups: at most this often a
        term ends though none is. max_changes: at most this often other seats are wanted.
        """
        super().__init__(seed, num_requests, config)
        self._draw_terms()
        steps = self.config.scheduler.steps_per_window
        self.front_end = ReseedingStreams(
            "front-end:1", 1 << 30, Unobserved(), steps_per_window=steps,
            hashes_output=self.config.scheduler.offload_host_pages > 0,
        )  # fmt: skip
        self.front_end.connect(self)
        self.streams: dict[int, ClientStream] = {}
        self.expected: dict[int, Expected] = {}
        """By request: all that it must generate by its latest attempt."""
        self.known_ids: dict[int, list[int]] = {}
        """By request: the prompt of its latest submission."""
        self.letters: deque[Callable[[], None]] = deque()
        """Under way from the controller to the front end, in order."""
        self.tokens: dict[Process, deque[Token]] = {p: deque() for p in self.processes}
        """Under way from each process to the front end, in order; from the dead ones too."""
        self.zombies: list[tuple[Process, Generator[bool, None, None]]] = []
        """Lost processes that go on all the same."""
        self.losses_left = max_losses
        self.regroups_left = max_regroups
        self.changes_left = max_changes
        self.change_share = self.random.choice([0.0003, 0.002, 0.01])
        self.hurries = False
        """Whether instances are no longer slow once nothing more is to be lost or changed."""
        if max_changes:
            self.change_share, self.redundant_experts = 0.01, NUM_EXPERTS
        self.num_attempts = self.num_stale_tokens = self.num_prefills_lost = 0
        self._begin_cluster()

    # --- the controller, as the front end knows it

    def submit(self, submission: Submission) -> None:
        """See controller_interface.ControllerInterface."""
        request_id = submission.request_id
        self._submit(submission)
        self.known_ids[request_id] = list(submission.prompt_ids)
        if submission.arrival.attempt:
            self.num_attempts += 1
            stream = self.streams[request_id]
            self.expected[request_id] = Expected(
                self.model, stream.prompt_ids, stream.choice.params, stream.output.ids
            )

    def resubmitted(self) -> None:
        """See controller_interface.ControllerInterface."""
        self.events.append(partial(self.coordinator.owe, -1))

    def _submit(self, submission: Submission) -> None:
        """A submission is under way to the coordinator, which counts its time from now on."""
        self.events.append(partial(self.coordinator.submitted, submission, self.now_us))

    def abort(self, request_id: int) -> None:
        """See controller_interface.ControllerInterface."""
        self._abort(request_id)

    # --- turns

    def _turn(self) -> None:
        random = self.random
        self._pass_time()
        draw = random.random()
        is_calm = self.is_serving and (self.change is None or self.change.done())
        wants = self.changes_left and is_calm and random.random() < 0.5
        # What may not be lost now may be so until another seat is back.
        if draw < self.change_share and self.losses_left and self._may_lose() and not wants:
            self._lose_some()
        elif draw < self.change_share and wants:
            self.changes_left -= 1
            self._want_seats()
        elif draw < self.change_share and self.regroups_left and is_calm:
            self.regroups_left -= 1
            self._end_term()
        elif draw < self.change_share / 20 and self.is_serving and not is_calm:
            self.members.changes.undo()  # It was thought better of.
            self._settle()
        elif draw < self.change_share and is_calm and len(self.serving) < len(self.processes):
            self._want_seats(range(len(self.processes)))
        elif draw < 0.15:
            self._deliver()
        elif draw < 0.19 and self.zombies:
            _, loop = random.choice(self.zombies)
            for _ in range(random.choice([1, 4, 30])):
                next(loop)
        elif draw < 0.2 and (coming := self.coordinator.writers):
            self._dial_writer(next(iter(coming)))
        elif draw < (0.25 if self.is_serving else 0.5) and (seats := self.coordinator.may_go_on()):
            self._go_on(random.choice(seats))
        else:
            super()._turn()
        if self.hurries and not self._num_left():
            self.hurries = False
            self.speeds = [max(speed, 0.3) for speed in self.speeds]

    def _num_left(self) -> int:
        """How often something may be lost or changed yet."""
        return self.losses_left + self.regroups_left + self.changes_left

    def _deliver(self) -> None:
        """Some of what is under way reaches the front end."""
        random = self.random
        if random.random() < 0.3:
            for _ in range(min(len(self.letters), random.choice([1, 5]))):
                self.letters.popleft()()
            return
        # A placement reaches the front end before its plan leaves the controller.
        while self.letters:
            self.letters.popleft()()
        for process, tokens in self.tokens.items():
            for _ in range(min(len(tokens), random.choice([0, 1, 2, 100]))):
                self._deliver_token(process.index, tokens.popleft())

    def _deliver_token(self, instance: int, token: Token) -> None:
        stream = self.streams[token.request_id]
        self.num_stale_tokens += token.attempt != stream.attempts.number
        self.front_end.deliver(instance, [token])
        self._check_given(stream)

    def _check_given(self, stream: ClientStream) -> None:
        given, expected = stream.output.ids, self.expected[stream.request_id]
        assert given == expected.begin(len(given)), (
            f"request {stream.request_id} was given {given}, not {expected.all()}"
        )

    def _arrive(self, prompt_len: int = 0, max_tokens: int = 0) -> None:
        prompt_ids, params = self._draw_request(prompt_len, max_tokens)
        request_id = len(self.streams) + 1
        self.expected[request_id] = Expected(self.model, prompt_ids, params)
        timeout_us = 20_000 if self.random.random() < self.deadline_share else None
        (self.streams[request_id],) = self.front_end.submit(
            f"client {request_id}", prompt_ids, [Choice(params)],
            self._origin(prompt_ids), timeout_us,
        )  # fmt: skip

    def _origin(self, prompt_ids: list[int]) -> Origin:
        return Origin(self.random.choice([0, 0, 0, 1]))

    def _known_prompts(self) -> dict[int, list[int]]:
        return self.known_ids

    def _arrive_or_abort(self) -> None:
        open_streams = [stream for stream in self.streams.values() if not _is_over(stream)]
        if open_streams and self.random.random() < self.abort_share:
            self.front_end.abort(self.random.choice(open_streams).client_id)
        elif len(self.streams) < self.num_requests:
            self._arrive()

    def _is_answered(self) -> bool:
        return (
            self.is_serving
            and len(self.streams) == self.num_requests
            and all(map(_is_over, self.streams.values()))
        )

    def _check_answers(self) -> None:
        for stream in self.streams.values():
            if stream.ended is None:
                expected = self.expected[stream.request_id].all()
                assert stream.output.ids == expected, stream.request_id
                continue
            match stream.ended.reason:
                case FinishReason.FAILED:
                    assert self.num_failed_transfers, stream.ended
                case FinishReason.EXPIRED | FinishReason.INVALID:
                    assert not stream.output.ids, stream.ended
                case FinishReason.FATAL:
                    assert self.num_losses >= 3, stream.ended
                case FinishReason.REFUSED:
                    assert self.config.scheduler.max_queued_requests == 4, stream.ended
                case reason:
                    assert reason is FinishReason.ABORTED, stream.ended

    # --- processes

    judges_drafts = False

    def _token_after(self, row: Row) -> int:
        number = len(row.output_ids) + len(row.drafts)
        expected = self.expected[row.request_id].begin(number + 1)
        return expected[number] if number < len(expected) else 0

    def _take_polled(self, process: Process) -> None:
        polled = process.instance.poll()
        self._say(process, polled.events)
        self.tokens[process].extend(polled.tokens)

    def _lose_some(self) -> None:
        """One instance is lost, or two, or all; what it had sent may be lost or late."""
        random = self.random
        living = sorted(self.coordinator.attached)
        if not living or not self._may_lose():
            return
        writers = self.coordinator.living_writers()
        if writers and random.random() < self.prefill_loss_share:
            self.losses_left -= 1
            self.num_prefills_lost += 1
            self._lose_writer(random.choice(writers) if len(writers) > 1 else writers[0])
            return
        num = min(random.choice([1, 1, 1, 2, len(self.processes)]), len(living))
        self.losses_left -= 1
        for index in random.sample(living, num):
            self._lose(index)

    def _lose_writer(self, member: Member) -> None:
        if member == PREFILL:
            self.jobs.clear()
        self.coordinator.lose_writer(member)
        self._settle()

    def _dial_writer(self, member: Member) -> None:
        self.coordinator.dial_writer(member)
        self._settle()

    def _lose(self, index: int) -> None:
        random, process = self.random, self.processes[index]
        tokens = self.tokens[process]
        for _ in range(random.choice([0, len(tokens), random.randrange(len(tokens) + 1)])):
            tokens.pop()
        is_seen = True
        if random.random() < 0.5 and index in self.running:
            self.zombies.append((process, self.loops[index]))
            is_seen = random.random() < 0.7
        self.num_losses += 1
        self._die(index, "it was ended by SIGKILL", is_seen)
        self._settle()

    def _let_join(self, index: int, term: int, join: Join) -> None:
        super()._let_join(index, term, join)
        self.tokens.setdefault(self.processes[index], deque())

    # --- controller_interface.ControllerEvents

    def placed(self, placement: Placement, num_cached: int | None = None) -> None:
        """See ControllerEvents."""
        self.letters.append(partial(self.front_end.placed, placement, num_cached))

    def preempted(self, preempted: Preempted) -> None:
        """See ControllerEvents."""
        self.letters.append(partial(self.front_end.preempted, preempted))

    def ended(self, ended: Ended) -> None:
        """See ControllerEvents."""
        self.letters.append(partial(self.front_end.ended, ended))

    def interrupted(self) -> int:
        """See ControllerEvents."""
        self.letters.append(self.front_end.interrupted)
        return 1

    def tokens_lost(self, request_id: int, sentence: str) -> None:
        """See ControllerEvents."""
        self.letters.append(partial(self.front_end.tokens_lost, request_id, sentence))


def _is_over(stream: ClientStream) -> bool:
    return stream.output.finish_reason is not None or stream.ended is not None
