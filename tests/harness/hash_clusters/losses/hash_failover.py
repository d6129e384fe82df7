"""A hash cluster that also loses its controller and its front ends, at any turn.

The scheduler of the controller that follows knows no request, only what pages the instances have
kept. Its terms are later, and every front end submits what is open. A lost front end takes its
streams with it: each of its clients resumes its answer at any front end, with the tokens that it
was given.

    PYTHONPATH=tests python -m harness.seed_campaign --kind failovers --seeds 1000
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from control_plane.frontend.client_stream import Choice, ClientStream
from control_plane.frontend.remote.attendance import Attendance
from control_plane.ports.controller_interface import ControllerEvents, Submission
from control_plane.scheduler.state.request import Request
from harness.hash_clusters.hash_parts import Expected
from harness.hash_clusters.hash_recovery import RecoveringCluster
from harness.hash_clusters.losses.hash_front_ends import (
    NUM_FRONT_ENDS,
    Caller,
    FrontEndProcess,
    PortOfAll,
)
from nanocp.config.whole import Config
from nanocp.values.commands import Join
from nanocp.values.plan import FinishReason
from nanocp.values.sampling import Token
from nanocp.values.table import InstanceTable
from nanocp.wire.rows import decode_row_input

_TERMS_OF_A_CONTROLLER = 1000
_SEEDS_OF_A_CALL = 1 << 20
"""More than the attempts of one call: each samples under a seed of its own."""


class FailoverCluster(RecoveringCluster):
    """Plays one seed. Raises AssertionError as soon as something is wrong."""

    def __init__(
        self,
        seed: int,
        max_losses: int = 2,
        max_failovers: int = 3,
        max_front_ends_lost: int = 4,
        config: Config | None = None,
    ) -> None:
        """max_failovers: at most this often the controller is lost."""
        self.is_opened = True
        """Whether this controller has had a term, and so takes front ends."""
        super().__init__(seed, max_losses, config=config)
        self.attendance = Attendance(NUM_FRONT_ENDS)
        self.living: list[FrontEndProcess | None] = [
            FrontEndProcess(index, self) for index in range(NUM_FRONT_ENDS)
        ]
        """The process of each front end; None until another is started."""
        self.attached: list[FrontEndProcess | None] = [None] * NUM_FRONT_ENDS
        self.callers: list[Caller] = []
        self.numbers: dict[int, str] = {}
        """By request that a controller has known: whose it is. No number is used twice."""
        self.gone: list[tuple[FrontEndProcess, ClientStream]] = []
        """Connections that are cut, which their front ends have yet to notice."""
        self.left: list[dict[int, str]] = []
        """Requests of lost front ends, which run on for a while."""
        self.failovers_left, self.front_ends_left = max_failovers, max_front_ends_lost
        self.num_failovers = self.num_front_ends_lost = self.num_resumed = self.num_cut = 0
        self.num_adopted = 0

    # --- the controller's port for front ends

    def _front_end_events(self) -> ControllerEvents:
        return PortOfAll(self)

    def submitted(self, submission: Submission) -> None:
        """A front end's submission has come."""
        name = submission.arrival.client_id
        client_id = self.numbers.setdefault(submission.request_id, name)
        assert client_id == name, f"{submission} has a number of {client_id}"
        for request_id in self.attendance.submitted(submission.request_id, name):
            self.abort(request_id)
        self._submit(submission)

    def answered(self, process: FrontEndProcess) -> None:
        """A front end has submitted all that is open, because it was asked to or unasked."""
        if process.num_owed:
            process.num_owed -= 1
            self.resubmitted()

    def _attach(self, process: FrontEndProcess) -> None:
        index = process.index
        if (before := self.attached[index]) is not None:
            self._stream_ended(before)
        process.up.clear()
        process.down.clear()
        process.is_attached, process.num_owed = True, 0
        self.attached[index] = process
        if process.newest_id:
            self.attendance.used(process.newest_id)
        process.down.append(partial(process.opened, self.attendance.first_ids[index]))

    def _stream_ended(self, process: FrontEndProcess) -> None:
        if self.attached[process.index] is not process:
            return
        self.attached[process.index] = None
        for _ in range(process.num_owed):
            self.resubmitted()
        if requests := self.attendance.lost(process.index):
            self.left.append(dict(requests))

    # --- front ends and their clients

    def expect(self, submission: Submission) -> None:
        """The judge: an attempt goes on from what its client was given."""
        request_id, row = (submission.request_id, decode_row_input(submission.arrival.row_start))
        known_ids = list(submission.prompt_ids)
        self.known_ids[request_id] = known_ids
        prompt_ids = known_ids[: len(known_ids) - len(row.output_ids)]
        self.expected[request_id] = Expected(self.model, prompt_ids, row.params, row.output_ids)
        self.num_attempts += submission.arrival.attempt > 0

    def _arrive(self, prompt_len: int = 0, max_tokens: int = 0) -> None:
        prompt_ids, params = self._draw_request(prompt_len, max_tokens)
        self.callers.append(Caller(f"client {len(self.callers)}", prompt_ids, params))
        self._call(self.callers[-1])

    def _call(self, caller: Caller) -> None:
        """Begin the answer, or resume it, at any front end that takes requests."""
        is_open = [each for each in self.living if each is not None and each.is_open]
        if not is_open:
            return
        process = self.random.choice(is_open)
        seed = caller.params.seed + _SEEDS_OF_A_CALL * caller.attempt
        choice = Choice(
            replace(caller.params, seed=seed),
            output_ids=tuple(caller.given),
            attempt=caller.attempt,
        )
        is_first = not caller.attempt
        timeout_us = 20_000 if is_first and self.random.random() < self.deadline_share else None
        (caller.stream,) = process.streams.submit(
            caller.client_id, caller.prompt_ids, [choice], self._origin(caller.prompt_ids),
            timeout_us,
        )  # fmt: skip
        caller.process = process
        self.streams[caller.stream.request_id] = caller.stream
        self.num_resumed += not is_first

    def _read(self, caller: Caller) -> None:
        """The client gets what is there."""
        stream = caller.stream
        assert stream is not None
        caller.given += stream.take_new()
        self._check_given(stream)
        assert caller.given == stream.output.ids
        caller.is_over = stream.output.finish_reason is not None or stream.ended is not None
        if stream.output.finish_reason is not None:
            assert caller.given == self.expected[stream.request_id].all(), caller
        elif stream.ended is not None and stream.choice.attempt:
            refused = (FinishReason.REFUSED, FinishReason.EXPIRED)
            assert stream.ended.reason not in refused, f"it was admitted before: {stream.ended}"

    def _break(self, caller: Caller) -> None:
        """The client's call breaks; it has not read what was under way."""
        caller.process = caller.stream = None
        caller.attempt += 1

    def _deliver_token(self, instance: int, token: Token) -> None:
        process = self.living[self.attendance.owner(token.request_id)]
        if process is None:
            return
        stream = self.streams[token.request_id]
        self.num_stale_tokens += token.attempt != stream.attempts.number
        process.streams.deliver(instance, [token])
        self._check_given(stream)

    def _arrive_or_abort(self) -> None:
        reading = [each for each in self.callers if each.stream is not None and not each.is_over]
        if reading and self.random.random() < self.abort_share:
            caller = self.random.choice(reading)
            assert caller.process is not None
            caller.process.streams.abort(caller.client_id)
        elif len(self.callers) < self.num_requests:
            self._arrive()

    # --- turns

    def _turn(self) -> None:
        draw = self.random.random()
        if draw < self.change_share / 2 and self.failovers_left:
            self._lose_controller()
        elif draw < self.change_share and self.front_ends_left:
            self._lose_front_end()
        else:
            super()._turn()

    def _num_left(self) -> int:
        return super()._num_left() + self.failovers_left + self.front_ends_left

    def _deliver(self) -> None:
        """Some of what is under way arrives; clients read, and resume what broke."""
        random = self.random
        for index, process in enumerate(self.living):
            if process is None:
                if random.random() < 0.1:
                    self.living[index] = FrontEndProcess(index, self)
                continue
            if self.is_opened and not process.is_attached and random.random() < 0.3:
                self._attach(process)
            self._move(process.down)
            if process.is_attached:
                self._move(process.up)
        for process in self.attached:
            if process is not None and process is not self.living[process.index]:
                self._move(process.up)
                if not process.up:
                    self._stream_ended(process)
        for sender, tokens in self.tokens.items():
            for _ in range(min(len(tokens), random.choice([0, 1, 2, 100]))):
                self._deliver_token(sender.index, tokens.popleft())
        if self.left and random.random() < 0.02:
            for request_id in self.attendance.released(self.left.pop(0)):
                self.abort(request_id)
        self._clients_go_on()

    def _move(self, queue: deque[Callable[[], None]]) -> None:
        for _ in range(min(len(queue), self.random.choice([0, 1, 5]))):
            queue.popleft()()

    def _clients_go_on(self) -> None:
        random = self.random
        for caller in self.callers:
            if caller.is_over:
                continue
            if caller.stream is None:
                if random.random() < 0.2:
                    self._call(caller)
            elif random.random() < 0.3:
                self._read(caller)
            elif self.front_ends_left and random.random() < 0.001:
                self.gone.append((caller.process, caller.stream))
                self._break(caller)
                self.num_cut += 1
        if self.gone and random.random() < 0.1:
            process, stream = self.gone.pop(0)
            if process is self.living[process.index]:
                process.streams.client_gone([stream])

    def _is_answered(self) -> bool:
        if not (self.is_serving and self.is_opened and len(self.callers) == self.num_requests):
            return False
        return (
            all(caller.is_over for caller in self.callers)
            and not any(each is None or each.up or each.down for each in self.attached)
            and not (self.left or self.gone)
        )

    def _check_answers(self) -> None:
        assert not self.attendance.unattended
        ended = [each.stream for each in self.callers if each.stream and each.stream.ended]
        self.streams = {stream.request_id: stream for stream in ended}
        super()._check_answers()
        self.streams = {each.stream.request_id: each.stream for each in self.callers if each.stream}

    # --- losses

    def _lose_front_end(self) -> None:
        """A process is gone with its streams; the last that it had sent may be lost."""
        random = self.random
        there = [each for each in self.living if each is not None]
        if not there:
            return
        process = random.choice(there)
        for _ in range(random.randrange(len(process.up) + 1)):
            process.up.pop()
        self.living[process.index] = None
        self.front_ends_left -= 1
        self.num_front_ends_lost += 1
        for caller in self.callers:
            if caller.process is process and not caller.is_over:
                if random.random() < 0.5:
                    self._read(caller)
                if not caller.is_over:
                    self._break(caller)

    def _lose_controller(self) -> None:
        """Another controller begins: it knows nothing, and asks every process."""
        self.failovers_left -= 1
        self.num_failovers += 1
        num = len(self.processes)
        self.shadows = [InstanceTable(index, num) for index in range(num)]
        self.attendance = Attendance(NUM_FRONT_ENDS, 1 + self.num_failovers)
        self.attached = [None] * NUM_FRONT_ENDS
        for process in self.living:
            if process is not None:
                process.is_attached = False
                for _ in range(self.random.randrange(len(process.down) + 1)):
                    process.down.pop()
        for queue in (self.events, self.letters, self.left):
            queue.clear()
        self.num_windows = 0
        self.is_opened = self.is_serving = False
        self._begin_controller(self.num_failovers * _TERMS_OF_A_CONTROLLER)
        self._count_adopted()

    def _count_adopted(self) -> None:
        adoption = self.scheduler.held._adoption
        adopt = adoption._adopted

        def counted(*arguments: Any) -> Request | None:
            adopted = adopt(*arguments)
            self.num_adopted += adopted is not None
            return adopted

        adoption._adopted = counted

    def _let_join(self, index: int, term: int, join: Join) -> None:
        if not self.is_opened:
            # The prefill attaches to the rings of its controller's terms only.
            self.jobs.clear()
        super()._let_join(index, term, join)

    def _term_began(self, keeps_rows: bool) -> None:
        super()._term_began(keeps_rows)
        self.is_opened = True
