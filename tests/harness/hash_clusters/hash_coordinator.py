"""The real coordinator, around a hash cluster: what leaves it is kept until it is due.

It has no loop, no clock and no thread: a seed says when time passes, when a process reads what it
was sent, and when another one dials.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from control_plane.coordinator.coordinator import Coordinator
from control_plane.coordinator.flights.decode import DecodeFlights
from control_plane.coordinator.flights.flights import Flights
from control_plane.coordinator.flights.pipeline import PipelineFlights
from control_plane.coordinator.members.members import Members
from control_plane.coordinator.members.output import KillProcess, MembersEvent, StartProcess
from control_plane.observe.metrics.registry import Metrics
from control_plane.ports.controller_interface import ControllerEvents
from control_plane.shell.controller import members_of
from harness.hash_clusters.hash_model import NUM_EXPERTS
from nanocp.config.whole import Config
from nanocp.values.commands import Join, Leave, Shutdown
from nanocp.values.members import Beat, Envelope, Hello, Member, Peer, Ready, Said
from nanocp.wire.members import TO_INSTANCE, TO_PREFILL

_STEPS = (Leave, Join, Shutdown)
"""What a process does late; all else that it is sent is work, of which it has a queue."""


class HashCoordinator(Coordinator):
    """A coordinator, and what was sent to each process and not read. Seats are instances."""

    def __init__(
        self,
        config: Config,
        front_end: ControllerEvents,
        take_work: Callable[[Member, Envelope], bool],
        first_term: int = 0,
        num_layers: int = 0,
    ) -> None:
        """take_work: gets what a member is to do; False if its stream is full, and holds no more.

        first_term: the one before the first, of a controller that takes the place of a lost one.
        num_layers: of a pipeline, all of whose stages must serve; 0: of instances.
        """
        metrics = Metrics(config.cluster, config.scheduler)

        def make_flights(members: Members) -> Flights:
            if num_layers:
                return PipelineFlights(config, members, num_layers, metrics.stages)
            return DecodeFlights(config.cluster, config.scheduler, members, metrics)

        num_experts = None if num_layers else NUM_EXPERTS
        make_members = partial(members_of, config, metrics.recovery, num_experts)
        super().__init__(config.limits, front_end, metrics, make_members, make_flights)
        self._take_work = take_work
        self.members.takes_over = first_term > 0
        self.members.terms.number = first_term
        self.clock_us = 0
        num = config.cluster.num_instances
        self.inboxes: list[deque[Any]] = [deque() for _ in range(num)]
        """By seat: which steps of terms its process has yet to take; None is the end of its stream.
        """
        self.attached: set[int] = set()
        """Seats whose process has a stream."""
        self.coming = set(range(num))
        """Seats whose latest process has yet to dial."""
        self.numbers = [0] * num
        """By seat: the number of its latest process."""
        self.to_start: list[StartProcess] = []
        self.to_kill: list[int] = []
        self.changes: deque[MembersEvent] = deque()
        """What became of members and terms, to be taken up."""
        self._exits: deque[tuple[Member, int, str]] = deque()
        self.writers: dict[Member, int] = {}
        """The number of the process that is to dial: the prefill's and the puller's."""
        self._writer_numbers: dict[Member, int] = {}
        self.members.begin()
        for member in self.members.expected[num:]:
            self.dial_writer(member)

    @property
    def has_windows(self) -> bool:
        """See Facts: a short term, unless it would be the last that is recovered from."""
        return len(self.members._short_terms._seats) < 3

    # --- what a seed lets happen

    def settle(self) -> None:
        """Carry out what the members want; processes to kill and to start are the cluster's."""
        while True:
            self.members.deadlines.tick(self.clock_us)
            output = self.members.output.take()
            full = [member for member, message in output.sends if not self._down(member, message)]
            for command in output.processes:
                if isinstance(command, KillProcess):
                    self.to_kill += (
                        [] if command.member.instance is None else [command.member.instance]
                    )
                    self.members.replacements.done(command, None)
                else:
                    self.to_start.append(command)
            self.changes += output.events
            for member in dict.fromkeys(full):
                self.members.lose(member, f"{member} left 1 messages unread", "unread")
            if self._exits:
                self.members.exited(*self._exits.popleft())
            elif not output:
                return

    def _down(self, member: Member, envelope: Envelope | None) -> bool:
        """A message leaves for a member, encoded; returns False if its stream holds no more."""
        if envelope is not None:
            codec = TO_PREFILL if member.instance is None else TO_INSTANCE
            envelope = codec.open(codec.seal(envelope))
            if not isinstance(envelope.message, _STEPS):
                is_gone = member.instance is not None and member.instance not in self.attached
                return is_gone or self._take_work(member, envelope)
        if member.instance in self.attached:
            self.inboxes[member.instance].append(envelope)
        return True

    def started(self, command: StartProcess, error: str | None) -> None:
        """A process was started, and will dial; or could not be."""
        if command.member.instance is None:
            self.writers[command.member] = command.number
        elif error is None:
            seat = command.member.instance or 0
            self.numbers[seat] = command.number
            self.coming.add(seat)
        self.members.replacements.done(command, error)

    def die(self, seat: int, how: str, is_seen: bool = True) -> None:
        """The latest process of the seat ends. is_seen: the controller hears of that too."""
        was_there = seat in self.coming or seat in self.attached
        self.coming.discard(seat)
        self.attached.discard(seat)
        self.inboxes[seat].clear()
        member = Member("instance", seat)
        if was_there and is_seen:
            self._exits.append((member, self.numbers[seat], how))
        elif was_there:
            self.members.failed(member, f"{member}: {how}")

    def dial(
        self, seat: int, kept: Any = None, restarts: Any = (), experts: tuple[bytes, ...] = ()
    ) -> None:
        """The process that comes has loaded its weights, or has lost its controller."""
        self.coming.discard(seat)
        self.attached.add(seat)
        try:
            self.members.attach(
                Member("instance", seat), Hello(seat, Peer(), kept, restarts, experts)
            )
        except ValueError as error:
            self.die(seat, str(error))

    def living_writers(self) -> list[Member]:
        """The prefill and the puller, if their process lives and has dialled."""
        return [each for each in self._writer_numbers if each in self.members.attached]

    def lose_writer(self, member: Member) -> None:
        """The process of the prefill or of the puller ends."""
        self.members.exited(member, self._writer_numbers[member], "it was ended by SIGKILL")

    def dial_writer(self, member: Member) -> None:
        """The process of the prefill or of the puller dials, and is ready."""
        self._writer_numbers[member] = self.writers.pop(member, 0)
        self.members.attach(member)
        for said in (Ready(), Beat()):
            self.members.heard(member, said, self.members.terms.number)

    def heard(self, member: Member, said: Said, term: int) -> bool:
        """A process says something; returns whether it was a report of the present term."""
        is_report = self.members.heard(member, said, term)
        if is_report:
            self.reported(member, said)
        return is_report

    def may_go_on(self) -> list[int]:
        """Seats whose process has something to read, or may dial."""
        return [seat for seat, inbox in enumerate(self.inboxes) if inbox or seat in self.coming]
