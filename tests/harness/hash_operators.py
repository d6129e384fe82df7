"""A hash cluster whose terms are led by the real Members: operators change its seats at any turn.

Operators drain, scale, upgrade, ask for what is already so, and undo; meanwhile processes fail and
are lost, and so is the controller. Each change must end, and none may stop the next one: at the end
a last operator asks for all seats, and must get them.

    make seeds KIND=operators SEEDS=1000
    PYTHONPATH=tests python -m harness.seed_campaign --kind operators --seed N
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from dataclasses import replace
from random import Random
from typing import Any

from prometheus_client import CollectorRegistry

from control_plane.coordinator.members.members import Members
from control_plane.observe.recovery_metrics import RecoveryMetrics
from control_plane.ports.member_streams import MemberStream
from data_plane.fake.instance import region_layout
from data_plane.fake.local_pages import LocalPageRing, local_peer_rings
from data_plane.fake.model import NUM_EXPERTS
from data_plane.instance.interface import TermEnds
from data_plane.transport.local import LocalExchange
from harness.hash_failover import FailoverCluster, kept_runs
from harness.hash_parts import draw_config
from harness.hash_recovery import Seat
from harness.turn_loop import TurnLoop
from nanocp.config.limits import LimitsConfig
from nanocp.config.prefill import PrefillConfig
from nanocp.config.whole import Config
from nanocp.values.experts import ExpertTable
from nanocp.values.members import Hello, Left, Member, Peer, Ready
from nanocp.values.plan import (
    Event,
    InstanceLost,
    Plan,
    SeatsWanted,
    TargetRun,
    TermEnded,
    TookOver,
)
from nanocp.wire.v1 import cluster_pb2 as pb

_TURN_S = 0.002
"""Time of the controller's loop for each turn: every deadline is many turns away."""
_TICKETS_OF_A_CONTROLLER = 1_000_000


class OperatedCluster(FailoverCluster):
    """Plays one seed. Raises AssertionError as soon as something is wrong."""

    def __init__(self, seed: int, config: Config | None = None) -> None:
        """Draw a cluster, its requests and its operators."""
        random = Random(seed + (1 << 32))
        config = config or draw_config(Random(seed))
        self.redundant = random.choice([0, 1, 2, NUM_EXPERTS, NUM_EXPERTS])
        cluster = replace(config.cluster, redundant_experts=self.redundant)
        limits = LimitsConfig(
            start_timeout_ms=random.choice([500, 5_000, 120_000]),
            drain_timeout_ms=1,
            suspect_ms=1_000_000_000,
            recovery_timeout_ms=300_000,
        )
        prefill = PrefillConfig(synthetic_kv=True)
        config = replace(config, cluster=cluster, limits=limits, prefill=prefill)
        self.loop: TurnLoop | None = None
        super().__init__(seed, 6, random.choice([0, 1, 2]), 1, config)
        num = len(self.processes)
        self.change_share = max(self.change_share, 0.002)
        self.operators_left = random.choice([4, 12])
        self.failures_left = random.choice([0, 2, 6])
        self.ill_seat = random.choice([None, None, random.randrange(num)])
        """A seat that is lost rather than others."""
        self.operators: list[asyncio.Task[Any]] = []
        self.last: asyncio.Task[Any] | None = None
        self.last_seats: tuple[int, ...] | None = None
        """What the supervisor knows of changes."""
        self.num_asked = self.num_refused = self.num_failed = self.num_overdue = 0
        self.num_undone = self.num_unstarted = 0
        self._begin_controller()
        for seat in range(num):
            self._dial(seat)
        while not self.members.start.has_succeeded:
            self._obey(self.random.randrange(num))
        self.members.start.wait()

    # --- the controller

    def _begin_controller(self) -> None:
        if self.loop is not None:
            self.loop.end()
        self.loop = TurnLoop()
        num = len(self.processes)
        self.pending: deque[Event | int] = deque()
        """Events of members for the scheduler, and numbers of terms that began, in order."""
        self.ends_of: dict[int, list[TermEnds]] = {}
        self.orders: list[deque[Any]] = [deque() for _ in range(num)]
        """By seat: what its process has yet to read of its stream."""
        self.streams_of: list[MemberStream | None] = [None] * num
        self.process_numbers = [0] * num
        """By seat: the number of its latest process."""
        self.coming = set(range(num))
        """Seats whose latest process has yet to dial."""
        metrics = RecoveryMetrics(CollectorRegistry())
        self.members = Members(self.config, self, self, metrics, NUM_EXPERTS)
        self.members.takes_over = self.num_failovers > 0
        self.members.terms.number = self.term if self.num_failovers else 0
        self.operators.clear()
        self.loop.create_task(self.members.watch_heartbeats())
        self.loop.run_what_is_due()

    def _lose_controller(self) -> None:
        self.kept = {}
        super()._lose_controller()
        if self.last_seats is not None:
            self._operate(self._want(self.last_seats))

    def _settle(self) -> None:
        self.loop.run_what_is_due()
        while self.pending:
            if isinstance(event := self.pending.popleft(), int):
                self._begin(event)
            else:
                self._call_scheduler([event])
            self.loop.run_what_is_due()
        self._read_streams()
        assert not self.members.failure.done(), self.members.failure.result()

    def _read_streams(self) -> None:
        for seat, stream in enumerate(self.streams_of):
            if stream is not None:
                self.orders[seat] += stream.take()

    def _begin(self, number: int) -> None:
        self.serving = self.members.seats
        self.term = number - 1
        self.keeps_rows = self.members.terms.keeps_rows
        self.num_shrinks += len(self.serving) < len(self.processes)
        self.num_changes += self.keeps_rows
        self._begin_term()

    def _carry_out(self, plan: Plan) -> None:
        super(FailoverCluster, self)._carry_out(plan)
        self._post_letters()

    def _settled(self) -> None:
        assert not any(process.plans for process in self.processes)
        self.loop.within(self.members.changes.settled)
        self._settle()

    # --- members.MemberEvents

    has_prefill = False

    @property
    def newest_ticket(self) -> int:
        """See MemberEvents."""
        return self.scheduler.newest_ticket

    @property
    def has_windows(self) -> bool:
        """See MemberEvents: a short term, unless it would be the last that is recovered from."""
        return len(self.members._short_terms._seats) < 3

    def took_over(self, kept: tuple[tuple[int, tuple[TargetRun, ...]], ...]) -> None:
        """See MemberEvents."""
        self.pending.append(TookOver(self.num_failovers * _TICKETS_OF_A_CONTROLLER, kept))

    def instance_lost(self, instance: int) -> None:
        """See MemberEvents."""
        self.pending.append(InstanceLost(instance))

    def seats_wanted(self, seats: tuple[int, ...]) -> None:
        """See MemberEvents."""
        self.pending.append(SeatsWanted(seats))

    def term_ended(self) -> None:
        """See MemberEvents."""
        self.is_serving = False
        self.pending.append(TermEnded())

    def term_began(self, term: int) -> None:
        """See MemberEvents."""
        self.pending.append(term)

    def cluster_lost(self, message: str) -> None:
        """See MemberEvents."""
        raise AssertionError(message)

    # --- replacements.Processes
    obstacle_to_more = staticmethod(lambda num_instances: "")  # See Processes.

    def kill(self, member: Member) -> None:
        """See Processes."""
        self._die(member.instance, "it was killed")

    def start(self, member: Member, number: int, term: int) -> None:
        """See Processes."""
        seat = member.instance
        is_awaited = member in self.members.terms.seats  # A term without it ends the cluster.
        if self.failures_left and not is_awaited and self.random.random() < 0.2:
            self.failures_left -= 1
            self.num_unstarted += 1
            raise OSError("no more processes")
        self.process_numbers[seat] = number
        self.coming.add(seat)

    # --- processes

    def _die(self, seat: int, how: str) -> None:
        """The latest process of the seat ends, and the controller hears of it, in this order."""
        was_there = seat in self.coming or self.streams_of[seat] is not None
        self.coming.discard(seat)
        self.orders[seat].clear()
        self.streams_of[seat] = None
        self.kept.pop(seat, None)
        if self.seats[seat] is not Seat.LOST:
            self.seats[seat] = Seat.LOST
        if was_there:
            number = self.process_numbers[seat]
            member = Member("instance", seat)
            self.loop.call_soon(self.members.exited, member, number, how)

    def _dial(self, seat: int) -> None:
        """The process that comes has loaded its weights, or has lost its controller."""
        self.coming.discard(seat)
        kept = None
        if self.seats[seat] is Seat.IN:
            self._leave(seat)
        if seat in self.kept and self.seats[seat] is Seat.OUT:
            kept = kept_runs(seat, self.kept[seat])
        member = Member("instance", seat)
        try:
            self.streams_of[seat] = self.loop.within(
                self.members.attach, member, Hello(seat, Peer(), kept)
            )
        except ValueError as error:
            self._die(seat, str(error))
        self._settle()

    def _obey(self, seat: int) -> None:
        """A process does what it was last asked to."""
        if not self.orders[seat]:
            return
        order = self.orders[seat].popleft()
        kind = "end" if order is None else order.WhichOneof("message")
        member = Member("instance", seat)
        if kind in ("end", "shutdown"):
            self._die(seat, "it was asked to")
        elif kind == "leave":
            if self.seats[seat] is Seat.IN:
                self._leave(seat)
            self.loop.within(self.members.received, member, Left(), order.term)
        elif kind == "join":
            self._join_term(seat, order.term, order.join)
            self.loop.within(self.members.received, member, Ready(), order.term)
            if self.members.terms.is_serving and not self.is_serving and not self.pending:
                self.pending.append(order.term)  # The first of a controller.
        self._settle()

    def _join_term(self, seat: int, term: int, join: pb.Join) -> None:
        num = len(self.processes)
        if term not in self.ends_of:
            exchanges = LocalExchange.create_all(
                num, region_layout(self.config), self.config.limits
            )
            self.ends_of[term] = [
                TermEnds(exchange, [LocalPageRing()], moves)
                for exchange, moves in zip(exchanges, local_peer_rings(num), strict=True)
            ]
        self.ends = self.ends_of[term]
        self.experts = ExpertTable(tuple(join.expert_seats), tuple(join.expert_slots))
        self.term, before = term - 1, self.term
        serving, self.serving = self.serving, list(join.seats)
        self.keeps_rows = join.keeps_rows
        self._join(seat)
        self.term, self.serving = before, serving

    def _end_term(self, events: list[Event]) -> None:
        """What RecoveringCluster and FailoverCluster do with a loss is for the members."""
        if not events:
            self.is_serving = False
            self._begin_controller()
            return
        for event in events:
            if isinstance(event, InstanceLost):
                self._die(event.instance, "it was ended by SIGKILL")
            else:
                self.loop.within(self.members.terms.end)
        self._settle()

    def _regroup(self) -> None:
        """The members do."""

    # --- operators

    def _turn(self) -> None:
        random, seat = self.random, self.random.randrange(len(self.processes))
        self.loop.now_s += _TURN_S
        self.loop.run_what_is_due()
        if self.pending:
            self._settle()
        draw = random.random()
        is_calm = self.is_serving and all(task.done() for task in self.operators)
        if draw < self.change_share and self.operators_left and (is_calm or random.random() < 0.2):
            self.operators_left -= 1
            self._operate(self._draw_operator())
        elif draw < self.change_share and is_calm and not self._num_left():
            # Some requests are too large for fewer.
            self._operate(self._want(range(len(self.processes))))
        elif draw < 0.05:
            self._obey(seat)
        elif draw < 0.06 and seat in self.coming:
            self._dial(seat)
        elif draw < 0.0603 and self.failures_left and self.seats[seat] is Seat.LOST:
            self.failures_left -= 1
            self._die(seat, "it failed")
            self._settle()
        elif draw < 0.061 and self.ill_seat is not None and self.losses_left:
            self.losses_left -= 1
            self._end_term([InstanceLost(self.ill_seat)])
        elif draw < 0.0612 and not is_calm and self.operators_left:
            self._operate(self._undo())
        elif draw < 0.0616 and not is_calm and self.losses_left:
            self._lose_some()
        else:
            super()._turn()

    def _num_left(self) -> int:
        return super()._num_left() + self.operators_left + self.failures_left

    def _want_seats(self, seats: Any = ()) -> None:
        """Operators do."""

    def _operate(self, operator: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self.operators.append(task := self.loop.create_task(operator))
        self._settle()
        return task

    def _draw_operator(self) -> Coroutine[Any, Any, Any]:
        random, num = self.random, len(self.processes)
        serving, fewest = self.members.seats, self.members._seats.fewest
        match random.randrange(6):
            case 0:
                return self._want(serving)
            case 1 | 2:
                return self._want({*serving} - {random.choice(serving)})
            case 3:
                number = random.randrange(fewest, num + 1)
                free = [seat for seat in range(num) if seat not in serving]
                return self._want([*serving[:number], *free[: max(0, number - len(serving))]])
            case 4:
                return self._want(random.sample(range(num), random.randrange(fewest, num + 1)))
            case _:
                return self._upgrade(serving)

    async def _want(self, seats: Any) -> bool:
        """One operator, whose wait ends whatever happens; as Service.want_seats."""
        seats = tuple(sorted(seats))
        self.num_asked += 1
        try:
            now = await self.members.want(seats, "an operator")
        except ValueError:
            self.num_refused += 1
        except RuntimeError:
            self.num_failed += 1
        except TimeoutError:
            self.num_overdue += 1
            self.last_seats = seats
        else:
            assert now.serving == seats, f"{now} is not {seats}"
            self.last_seats = seats
            return True
        return False

    async def _upgrade(self, serving: list[int]) -> None:
        for seat in serving:
            if await self._want({*serving} - {seat}):
                await self._want(serving)

    async def _undo(self) -> None:
        try:
            self.last_seats = (await self.members.undo()).wanted
            self.num_undone += 1
        except ValueError:
            self.num_refused += 1

    def _is_over(self) -> bool:
        """When all is done, and a last operator has got all seats."""
        if not super()._is_over() or not all(task.done() for task in self.operators):
            return False
        for task in self.operators:
            task.result()
        everywhere = tuple(range(len(self.processes)))
        if self.last is None or self.last not in self.operators:
            if self._num_left():
                self.operators_left = self.losses_left = self.failures_left = 0
                self.failovers_left = self.front_ends_left = 0
            self.last = self._operate(self._get_all(everywhere))
            return False
        self.loop.end()
        return True

    async def _get_all(self, seats: tuple[int, ...]) -> None:
        # With the longest deadline, so that it is the change that must end.
        self.members._limits = replace(self.members._limits, start_timeout_ms=600_000)
        now = await self.members.want(seats, "the last operator")
        assert (now.serving, now.asked_by) == (seats, ""), now
