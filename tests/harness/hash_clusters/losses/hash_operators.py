"""A hash cluster whose terms are led by the real Members: operators change its seats at any turn.

Operators drain, scale, upgrade, ask for what is already so, and undo; meanwhile processes fail and
are lost, and so is the controller. Each change must end, and none may stop the next one: at the end
a last operator asks for all seats, and must get them.

    make seeds KIND=operators SEEDS=1000
    PYTHONPATH=tests python -m harness.seed_campaign --kind operators --seed N
"""

from collections.abc import Generator
from dataclasses import replace
from random import Random
from typing import Any

from control_plane.coordinator.members.output import StartProcess
from harness.hash_clusters.hash_model import NUM_EXPERTS
from harness.hash_clusters.hash_parts import draw_config
from harness.hash_clusters.losses.hash_failover import FailoverCluster
from nanocp.config.whole import Config
from nanocp.values.members import PREFILL


class Operator:
    """Somebody who wants seats, and waits."""

    def __init__(self, steps: Generator[None, None, Any]) -> None:
        self._steps = steps
        self.is_over = False

    def go_on(self) -> None:
        """Go on as far as the cluster lets it."""
        try:
            next(self._steps)
        except StopIteration:
            self.is_over = True


class OperatedCluster(FailoverCluster):
    """Plays one seed. Raises AssertionError as soon as something is wrong."""

    prefill_loss_share = 0.1

    def __init__(self, seed: int, config: Config | None = None) -> None:
        """Draw a cluster, its requests and its operators."""
        random = Random(seed + (1 << 32))
        config = config or draw_config(Random(seed))
        start_timeout_ms = random.choice([500, 5_000, 120_000])
        self.limits = replace(self.limits, start_timeout_ms=start_timeout_ms)
        self.operators: list[Operator] = []
        self.failures_left = 0
        super().__init__(seed, 6, random.choice([0, 1, 2]), 1, config)
        num = len(self.processes)
        self.change_share = max(self.change_share, 0.002)
        self.operators_left = random.choice([4, 12])
        self.failures_left = random.choice([0, 2, 6])
        self.ill_seat = random.choice([None, None, random.randrange(num)])
        """A seat that is lost rather than others."""
        self.last: Operator | None = None
        self.last_seats: tuple[int, ...] | None = None
        """What the supervisor knows of changes."""
        self.num_asked = self.num_refused = self.num_failed = self.num_overdue = 0
        self.num_undone = self.num_unstarted = 0

    def _draw_redundancy(self) -> int:
        return self.random.choice([0, 1, 2, NUM_EXPERTS, NUM_EXPERTS])

    def _begin_controller(self, first_term: int = 0) -> None:
        self.operators.clear()
        super()._begin_controller(first_term)

    def _lose_controller(self) -> None:
        super()._lose_controller()
        if self.last_seats is not None:
            self._operate(self._want(self.last_seats))

    def _settle(self) -> None:
        super()._settle()
        for operator in [each for each in self.operators if not each.is_over]:
            operator.go_on()
            super()._settle()

    def _started(self, command: StartProcess) -> None:
        # A term without it ends all, and so does its absence.
        is_awaited = command.member in (*self.members.terms.seats, PREFILL)
        if self.failures_left and not is_awaited and self.random.random() < 0.2:
            self.failures_left -= 1
            self.num_unstarted += 1
            self.coordinator.started(command, "no more processes")
        else:
            super()._started(command)

    # --- operators

    def _turn(self) -> None:
        random = self.random
        self._pass_time()
        draw = random.random()
        is_calm = self.is_serving and all(operator.is_over for operator in self.operators)
        if draw < self.change_share and self.operators_left and (is_calm or random.random() < 0.2):
            self.operators_left -= 1
            self._operate(self._draw_operator())
        elif draw < self.change_share and is_calm and not self._num_due():
            # Some requests are too large for fewer.
            self._operate(self._want(range(len(self.processes))))
        elif 0.01 < draw < 0.011 and self.ill_seat in self.coordinator.attached:
            if self.losses_left and self._may_lose():
                self.losses_left -= 1
                self._lose(self.ill_seat)
        elif 0.011 < draw < 0.0112 and not is_calm and self.operators_left:
            self._operate(self._undo())
        elif 0.0112 < draw < 0.0116 and not is_calm and self.losses_left:
            self._lose_some()
        elif 0.012 < draw < 0.03 and self.failures_left and self.coordinator.coming:
            self.failures_left -= 1
            self._die(random.choice(sorted(self.coordinator.coming)), "it failed")
            self._settle()
        elif draw > 0.9 and not is_calm:
            self._settle()  # The time of an operator may be up.
        else:
            super()._turn()

    def _num_left(self) -> int:
        return super()._num_left() + self.operators_left + self.failures_left

    def _num_due(self) -> int:
        """Without what only a process that comes may do, or no seat may for now."""
        num_barred = 0 if self._may_lose() else self.losses_left
        return self._num_left() - self.failures_left - num_barred

    def _want_seats(self, seats: Any = ()) -> None:
        """Operators do."""

    def _operate(self, steps: Generator[None, None, Any]) -> Operator:
        self.operators.append(operator := Operator(steps))
        self._settle()
        return operator

    def _draw_operator(self) -> Generator[None, None, Any]:
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

    def _want(self, seats: Any, by: str = "an operator") -> Generator[None, None, bool]:
        """One operator, whose wait ends whatever happens; as Controller.want_seats."""
        seats = tuple(sorted(seats))
        self.num_asked += 1
        limits = (
            self.limits if self.last is None else replace(self.limits, start_timeout_ms=600_000)
        )
        limit_us = self.coordinator.clock_us + 1e6 * limits.longest_change_s
        try:
            done = self.members.want(seats, by)
        except ValueError:
            self.num_refused += 1
            return False
        while not done.done() and self.coordinator.clock_us < limit_us:
            yield
        if not done.done():
            done.cancel()
            self.num_overdue += 1
            self.last_seats = seats
            return False
        if done.exception() is not None:
            self.num_failed += 1
            return False
        self.last_seats = seats
        return True

    def _upgrade(self, serving: list[int]) -> Generator[None, None, None]:
        for seat in serving:
            if (yield from self._want({*serving} - {seat})):
                yield from self._want(serving)

    def _undo(self) -> Generator[None, None, None]:
        try:
            self.members.changes.undo()
            self.last_seats = self.members.seats_now.wanted
            self.num_undone += 1
        except ValueError:
            self.num_refused += 1
        yield

    def _is_over(self) -> bool:
        """When all is done, and a last operator has got all seats."""
        if not super()._is_over() or not all(each.is_over for each in self.operators):
            return False
        everywhere = tuple(range(len(self.processes)))
        if self.last is None or self.last not in self.operators:
            if self._num_left():
                self.operators_left = self.losses_left = self.failures_left = 0
                self.failovers_left = self.front_ends_left = 0
            self.last = Operator(self._get_all(everywhere))
            self.operators.append(self.last)
            self._settle()
            return False
        return True

    def _get_all(self, seats: tuple[int, ...]) -> Generator[None, None, None]:
        """With the longest deadline, so that it is the change that must end."""
        assert (yield from self._want(seats, "the last operator")), "it was refused, or failed"
        now = self.members.seats_now
        assert (now.serving, now.asked_by) == (seats, ""), now
