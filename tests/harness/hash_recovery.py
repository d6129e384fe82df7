"""A hash cluster that loses instances and goes on, with the real scheduler and front end's streams.

Terms end, at any turn, with losses or without; some lost processes come back.

    PYTHONPATH=tests python -m harness.hash_recovery_seeds --seeds 1000              with losses
    PYTHONPATH=tests python -m harness.hash_recovery_seeds --regroups --seeds 1000   without
    PYTHONPATH=tests python -m harness.hash_recovery_seeds --seed N                  replays one

Each attempt samples under a seed of its own, and the judge goes on from what the client was given:
a token of an earlier attempt that slips through is a wrong token, and not the same one again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial

from control_plane.frontend.client_request import Origin
from control_plane.frontend.client_stream import Choice, ClientStream
from control_plane.frontend.controller_interface import Submission
from control_plane.frontend.streams import ClientStreams
from control_plane.observe.observer import Unobserved
from data_plane.fake.instance import region_layout
from data_plane.fake.local_pages import LocalPageRing, LocalPeerRings, local_peer_rings
from data_plane.fake.model import NUM_EXPERTS
from data_plane.instance.interface import TermEnds, TermStart
from data_plane.transport.local import LocalExchange
from harness.hash_cluster import HashCluster
from harness.hash_parts import Expected, Process
from nanocp.config.whole import Config
from nanocp.values.experts import fewest_seats, place_experts
from nanocp.values.plan import (
    AbortRequested,
    Event,
    FinishReason,
    InstanceLost,
    Plan,
    Regrouped,
    Resubmitted,
    SeatsWanted,
    TermEnded,
)
from nanocp.values.sampling import Token
from nanocp.values.table import InstanceTable


class Seat(Enum):
    """Where the process of a seat stands."""

    IN = "in the term that serves, or in the next one already"
    ASKED = "asked to leave"
    OUT = "has left"
    LOST = "waits for another process"


class ReseedingStreams(ClientStreams):
    """Every attempt of a request samples under another seed."""

    def _begin_attempt(self, stream: ClientStream, cause: str) -> None:
        stream.params = replace(stream.params, seed=stream.params.seed + 1)
        super()._begin_attempt(stream, cause)


class RecoveringCluster(HashCluster):
    """Plays one seed. Raises AssertionError as soon as something is wrong."""

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
        self.term = 1
        self.terms: dict[Process, int] = {}
        """The term that each process is in; a dead one stays in its last."""
        super().__init__(seed, num_requests, config)
        steps = self.config.scheduler.steps_per_window
        self.front_end = ReseedingStreams(
            "front-end:1",
            1 << 30,
            Unobserved(),
            steps_per_window=steps,
            hashes_output=self.config.scheduler.offload_host_pages > 0,
        )
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
        self.seats = [Seat.IN] * len(self.processes)
        self.ends: list[TermEnds] = []
        """By seat: what the next term is made with; empty until every process has left."""
        self.is_serving = True
        self.to_join: list[int] = []
        self.losses_left = max_losses
        self.regroups_left = max_regroups
        self.changes_left = max_changes
        self.change_share = self.random.choice([0.0003, 0.002, 0.01])
        self.hurries = False
        """Whether instances are no longer slow once nothing more is to be lost or changed."""
        self.num_terms = self.num_losses = self.num_kept = 0
        self.num_shrinks = 0
        self.num_changes = 0
        self.wanted: list[int] | None = None
        """Seats of the next term, while the scheduler prepares it."""
        self.keeps_rows = False
        """Whether the next term takes over the rows of the last."""
        self.redundant_experts = self.random.choice([0, NUM_EXPERTS])
        if max_changes:
            self.change_share, self.redundant_experts = 0.01, NUM_EXPERTS
        self.experts = None
        self.num_attempts = self.num_stale_tokens = self.num_stale_events = 0

    def _start_process(self, index: int, exchange: LocalExchange, moves: LocalPeerRings) -> Process:
        process = super()._start_process(index, exchange, moves)
        self.terms[process] = self.term
        return process

    # --- the controller, as the front end knows it

    def submit(self, submission: Submission) -> None:
        """See controller_interface.ControllerInterface."""
        request_id = submission.request_id
        self.events.append(submission.arrival(self.now_us))
        self.known_ids[request_id] = list(submission.prompt_ids)
        if submission.attempt:
            self.num_attempts += 1
            stream = self.streams[request_id]
            self.expected[request_id] = Expected(
                self.model, stream.prompt_ids, stream.params, stream.output_ids
            )

    def resubmitted(self) -> None:
        """See controller_interface.ControllerInterface."""
        self.events.append(Resubmitted())

    def abort(self, request_id: int) -> None:
        """See controller_interface.ControllerInterface."""
        self.events.append(AbortRequested(request_id))

    # --- turns

    def _turn(self) -> None:
        random = self.random
        draw = random.random()
        is_calm = self.is_serving and self.wanted is None
        wants = self.changes_left and is_calm and random.random() < 0.5
        if draw < self.change_share and self.losses_left and not wants:
            self._lose_some()
        elif draw < self.change_share and wants:
            self.changes_left -= 1
            self._want_seats()
        elif draw < self.change_share and self.regroups_left and is_calm:
            self.regroups_left -= 1
            self._end_term([TermEnded()])
        elif draw < self.change_share / 4 and self.wanted is not None:
            self.wanted = None  # It was thought better of.
            self._call_scheduler([SeatsWanted(tuple(self.serving))])
        elif draw < self.change_share and is_calm and Seat.LOST in self.seats:
            self._want_seats(range(len(self.seats)))
        elif draw < 0.15:
            self._deliver()
        elif draw < 0.19 and self.zombies:
            _, loop = random.choice(self.zombies)
            for _ in range(random.choice([1, 4, 30])):
                next(loop)
        else:
            super()._turn()
        if not self.is_serving:
            self._regroup()
        if self.hurries and not self._num_left():
            self.hurries = False
            self.speeds = [max(speed, 0.3) for speed in self.speeds]

    def _num_left(self) -> int:
        """How often something may be lost or changed yet."""
        return self.losses_left + self.regroups_left + self.changes_left

    def _run_some(self, index: int) -> None:
        if self.seats[index] in (Seat.IN, Seat.ASKED):
            super()._run_some(index)

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
        self.num_stale_tokens += token.attempt != stream.attempt
        self.front_end.deliver(instance, [token])
        self._check_given(stream)

    def _check_given(self, stream: ClientStream) -> None:
        given, expected = stream.output_ids, self.expected[stream.request_id]
        assert given == expected.begin(len(given)), (
            f"request {stream.request_id} was given {given}, not {expected.all()}"
        )

    def _arrive(self, prompt_len: int = 0, max_tokens: int = 0) -> None:
        prompt_ids, params = self._draw_request(prompt_len, max_tokens)
        request_id = len(self.streams) + 1
        self.expected[request_id] = Expected(self.model, prompt_ids, params)
        timeout_us = 20_000 if self.random.random() < self.deadline_share else None
        (self.streams[request_id],) = self.front_end.submit(
            f"client {request_id}",
            prompt_ids,
            [Choice(params)],
            Origin(self.random.choice([0, 0, 0, 1])),
            timeout_us,
        )

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
                assert stream.output_ids == expected, stream.request_id
                continue
            match stream.ended.reason:
                case FinishReason.FAILED:
                    assert self.num_failed_transfers, stream.ended
                case FinishReason.EXPIRED | FinishReason.INVALID:
                    assert not stream.output_ids, stream.ended
                case FinishReason.FATAL:
                    assert self.num_losses >= 3, stream.ended
                case FinishReason.REFUSED:
                    assert self.config.scheduler.max_queued_requests == 4, stream.ended
                case reason:
                    assert reason is FinishReason.ABORTED, stream.ended

    # --- processes

    def _take_polled(self, process: Process) -> None:
        polled = process.instance.poll()
        process.events.extend((self.terms[process], event) for event in polled.events)
        self.tokens[process].extend(polled.tokens)

    def _accepted(self, entry: Event | tuple[int, Event]) -> Event | None:
        """Reports of a term that is over are dropped."""
        if not isinstance(entry, tuple):
            return entry
        term, event = entry
        self.num_stale_events += term != self.term
        return event if term == self.term else None

    def _lose_some(self) -> None:
        """One instance is lost, or two, or all; what it had sent may be lost or late."""
        random = self.random
        living = [index for index, seat in enumerate(self.seats) if seat is not Seat.LOST]
        num = min(random.choice([1, 1, 1, 2, len(self.seats)]), len(living))
        self.losses_left -= 1
        for index in random.sample(living, num):
            process = self.processes[index]
            tokens = self.tokens[process]
            for _ in range(random.choice([0, len(tokens), random.randrange(len(tokens) + 1)])):
                tokens.pop()
            if random.random() < 0.5 and self.seats[index] is not Seat.OUT:
                self.zombies.append((process, self.loops[index]))
            self.seats[index] = Seat.LOST
            self.num_losses += 1
            self._end_term([InstanceLost(index)])

    # --- the controller's regroup

    def _end_term(self, events: list[Event]) -> None:
        self._call_scheduler(events)
        self.is_serving = self.keeps_rows = False
        self.wanted = None
        self.ends, self.to_join = [], []
        self.seats = [Seat.ASKED if seat is Seat.IN else seat for seat in self.seats]

    def _regroup(self) -> None:
        """What happens next on the way to the next term."""
        random = self.random
        if Seat.ASKED in self.seats:
            asked = [index for index, seat in enumerate(self.seats) if seat is Seat.ASKED]
            if random.random() < 0.1:
                self._leave(random.choice(asked))
        elif not self.ends:
            num = len(self.seats)
            self._choose_seats()
            layout = region_layout(self.config)
            exchanges = LocalExchange.create_all(num, layout, self.config.limits)
            self.ends = [
                TermEnds(exchange, [LocalPageRing()], moves)
                for exchange, moves in zip(exchanges, local_peer_rings(num), strict=True)
            ]
            self.to_join = random.sample(self.serving, len(self.serving))
        elif self.to_join:
            if random.random() < 0.3:
                self._join(self.to_join.pop())
        else:
            self._begin_term()

    def _choose_seats(self) -> None:
        """The next term has all seats, or goes on without some that were lost."""
        if self.wanted is not None:
            self._take_seats(self.wanted)
            return
        random, num = self.random, len(self.seats)
        lost = [index for index, seat in enumerate(self.seats) if seat is Seat.LOST]
        fewest = fewest_seats(NUM_EXPERTS, num, self.redundant_experts)
        left_out = random.sample(lost, random.randrange(min(len(lost), num - fewest) + 1))
        self.num_shrinks += len(left_out) > num - len(self.serving)
        self._take_seats([index for index in range(num) if index not in left_out])

    def _take_seats(self, seats: list[int]) -> None:
        num = len(self.seats)
        self.serving = seats
        self.experts = place_experts(
            NUM_EXPERTS, num, self.redundant_experts, self.serving, self.experts
        )

    def _want_seats(self, seats: Sequence[int] = ()) -> None:
        """Ask the scheduler to prepare a term of these seats, or of any."""
        num = len(self.seats)
        fewest = fewest_seats(NUM_EXPERTS, num, self.redundant_experts)
        number = self.random.randrange(fewest, num + 1)
        stays = self.random.choice(self.serving)
        wanted = list(seats) or sorted({stays, *self.random.sample(range(num), number)})
        self.wanted = wanted if wanted != self.serving else None
        self._call_scheduler([SeatsWanted(tuple(wanted))])

    def _settled(self) -> None:
        """The scheduler has prepared the next term: it begins without a loss."""
        assert not any(process.plans for process in self.processes)
        wanted = self.wanted
        self._end_term([TermEnded()])
        self.keeps_rows, self.wanted = True, wanted
        self.num_changes += 1

    def _leave(self, index: int) -> None:
        process = self.processes[index]
        self._take_polled(process)
        process.instance.leave()
        process.plans.clear()
        process.posts.clear()
        self.loops[index] = self._instance_loop(process)
        self.seats[index] = Seat.OUT

    def _join(self, index: int) -> None:
        ends = self.ends[index]
        if self.seats[index] is Seat.LOST:
            process = self._start_process(index, ends.exchange, ends.moves)
            self.processes[index] = process
            self.loops[index] = self._instance_loop(process)
            self.tokens[process] = deque()
        process = self.processes[index]
        process.instance.join(
            ends,
            TermStart(self.serving, self.experts, self.scheduler.newest_ticket, self.keeps_rows),
        )
        (process.ring,) = ends.rings
        self.terms[process] = self.term + 1
        self.seats[index] = Seat.IN

    def _begin_term(self) -> None:
        num = len(self.seats)
        for index in range(num):
            if index not in self.serving:
                self.seats[index] = Seat.LOST  # Until now its process could have gone on.
                self.processes[index].plans.clear()
                self.processes[index].posts.clear()
        self.is_serving, self.ends = True, []
        self.term += 1
        self.num_terms += 1
        self.shadows = [
            self.shadows[index]
            if self.keeps_rows and index in self.serving
            else InstanceTable(index, num)
            for index in range(num)
        ]
        keeps_rows, self.keeps_rows, self.wanted = self.keeps_rows, False, None
        self._serve(keeps_rows)

    def _serve(self, keeps_rows: bool) -> None:
        """The controller takes note that the term has begun."""
        self._call_scheduler([Regrouped(self.term, tuple(self.serving), keeps_rows)])
        self.num_kept += len(self.scheduler._held)
        if not keeps_rows:
            self.letters.append(self.front_end.interrupted)

    def _carry_out(self, plan: Plan) -> None:
        super()._carry_out(plan)
        if plan.is_settled:
            self._settled()

    def _tell_front_end(self, plan: Plan) -> None:
        for placement in plan.placements:
            self.letters.append(partial(self.front_end.placed, placement))
        for preempted in plan.preempted:
            self.num_preemptions += 1
            self.letters.append(partial(self.front_end.preempted, preempted))
        for ended in plan.ended:
            self.letters.append(partial(self.front_end.ended, ended))


def _is_over(stream: ClientStream) -> bool:
    return stream.finish_reason is not None or stream.ended is not None
