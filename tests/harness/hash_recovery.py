"""A hash cluster that loses instances and goes on, with the real scheduler and front end's streams.

Terms end, at any turn, with losses or without; some lost processes come back.

    PYTHONPATH=tests python -m harness.hash_recovery --seeds 1000              with losses
    PYTHONPATH=tests python -m harness.hash_recovery --regroups --seeds 1000   without
    PYTHONPATH=tests python -m harness.hash_recovery --seed N                  replays one

Each attempt samples under a seed of its own, and the judge goes on from what the client was given:
a token of an earlier attempt that slips through is a wrong token, and not the same one again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Generator
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
from data_plane.instance.interface import TermEnds
from data_plane.transport.local import LocalExchange
from harness.hash_cluster import HashCluster
from harness.hash_parts import Process
from nanocp.config import Config
from nanocp.plan import (
    AbortRequested,
    Event,
    FinishReason,
    InstanceLost,
    Plan,
    Regrouped,
    Resubmitted,
    TermEnded,
)
from nanocp.sampling import Token
from nanocp.table import InstanceTable


class Seat(Enum):
    """Where the process of a seat stands."""

    IN = "in the term that serves, or in the next one already"
    ASKED = "asked to leave"
    OUT = "has left"
    LOST = "waits for another process"


class ReseedingStreams(ClientStreams):
    """Every attempt of a request samples under another seed."""

    def _begin_attempt(self, stream: ClientStream) -> None:
        stream.params = replace(stream.params, seed=stream.params.seed + 1)
        super()._begin_attempt(stream)


class RecoveringCluster(HashCluster):
    """Plays one seed. Raises AssertionError as soon as something is wrong."""

    def __init__(
        self,
        seed: int,
        max_losses: int,
        max_regroups: int = 0,
        num_requests: int = 16,
        config: Config | None = None,
    ) -> None:
        """Draw a cluster and its requests.

        max_losses: at most this often some instances are lost. max_regroups: at most this often a
        term ends though none is.
        """
        self.term = 1
        self.terms: dict[Process, int] = {}
        """The term that each process is in; a dead one stays in its last."""
        super().__init__(seed, num_requests, config)
        steps = self.config.scheduler.steps_per_window
        self.front_end = ReseedingStreams(
            "front-end:1", 1 << 30, Unobserved(), steps_per_window=steps
        )
        self.front_end.connect(self)
        self.streams: dict[int, ClientStream] = {}
        self.expected: dict[int, list[int]] = {}
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
        self.change_share = self.random.choice([0.0003, 0.002, 0.01])
        self.num_terms = self.num_losses = self.num_kept = 0
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
            self.expected[request_id] = self.model.generate(
                stream.prompt_ids, stream.params, stream.output_ids
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
        if draw < self.change_share and self.losses_left:
            self._lose_some()
        elif draw < self.change_share and self.regroups_left and self.is_serving:
            self.regroups_left -= 1
            self._end_term([TermEnded()])
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
        given, expected = stream.output_ids, self.expected[token.request_id]
        assert given == expected[: len(given)], (
            f"request {token.request_id} was given {given}, not {expected}"
        )

    def _arrive(self, prompt_len: int = 0, max_tokens: int = 0) -> None:
        prompt_ids, params = self._draw_request(prompt_len, max_tokens)
        request_id = len(self.streams) + 1
        self.expected[request_id] = self.model.generate(prompt_ids, params)
        timeout_us = 20_000 if self.random.random() < self.deadline_share else None
        (self.streams[request_id],) = self.front_end.submit(
            f"client {request_id}",
            prompt_ids,
            [Choice(params)],
            Origin(self.random.choice([0, 0, 0, 1])),
            timeout_us,
        )

    def _known_prompts(self) -> list[list[int]]:
        return list(self.known_ids.values())

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
                assert stream.output_ids == self.expected[stream.request_id], stream.request_id
                continue
            match stream.ended.reason:
                case FinishReason.FAILED:
                    assert self.num_failed_transfers, stream.ended
                case FinishReason.EXPIRED | FinishReason.INVALID:
                    assert not stream.output_ids, stream.ended
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
        self.is_serving = False
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
            layout = region_layout(self.config)
            exchanges = LocalExchange.create_all(num, layout, self.config.limits)
            self.ends = [
                TermEnds(exchange, [LocalPageRing()], moves)
                for exchange, moves in zip(exchanges, local_peer_rings(num), strict=True)
            ]
            self.to_join = random.sample(range(num), num)
        elif self.to_join:
            if random.random() < 0.3:
                self._join(self.to_join.pop())
        else:
            self._begin_term()

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
        process.instance.join(ends, self.scheduler.newest_ticket)
        (process.ring,) = ends.rings
        self.terms[process] = self.term + 1
        self.seats[index] = Seat.IN

    def _begin_term(self) -> None:
        num = len(self.seats)
        self.is_serving, self.ends = True, []
        self.term += 1
        self.num_terms += 1
        self.shadows = [InstanceTable(index, num) for index in range(num)]
        self._call_scheduler([Regrouped(self.term)])
        self.num_kept += len(self.scheduler._held)
        self.letters.append(self.front_end.interrupted)

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


def play(seed: int, max_losses: int = 6, max_regroups: int = 0) -> RecoveringCluster:
    """Play one seed to its end; a failure names the seed."""
    cluster = RecoveringCluster(seed, max_losses, max_regroups)
    try:
        cluster.play()
    except Exception as error:
        how = "" if max_losses else "--regroups "
        error.add_note(
            f"replay: PYTHONPATH=tests python -m harness.hash_recovery {how}--seed {seed}   "
            f"({cluster.config})"
        )
        raise
    return cluster


def main() -> None:
    """Play seeds from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1000, help="play seeds FIRST .. + SEEDS - 1")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="play this one only")
    parser.add_argument("--regroups", action="store_true", help="terms end, and nothing is lost")
    arguments = parser.parse_args()
    first, count = arguments.first, arguments.seeds
    seeds = range(first, first + count) if arguments.seed is None else [arguments.seed]
    begin = time.monotonic()
    names = ("num_terms", "num_losses", "num_kept", "num_attempts", "num_stale_tokens")
    names += ("num_stale_events", "num_windows", "num_preemptions", "num_moves", "num_hand_offs")
    totals = dict.fromkeys(names, 0)
    num_tokens = 0
    for seed in seeds:
        cluster = play(seed, 0, 20) if arguments.regroups else play(seed)
        for name in names:
            totals[name] += getattr(cluster, name)
        num_tokens += sum(len(stream.output_ids) for stream in cluster.streams.values())
    told = ", ".join(f"{name.removeprefix('num_')} {number}" for name, number in totals.items())
    took_s = time.monotonic() - begin
    print(f"{len(seeds)} seeds in {took_s:.1f} s: tokens {num_tokens}, {told}", file=sys.stdout)


if __name__ == "__main__":
    main()
