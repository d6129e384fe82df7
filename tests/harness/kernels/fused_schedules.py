"""Schedules of a persistent kernel without a GPU: explored between tasks, woven between accesses.

The interpreter runs one program after the other. The explorer launches instances in a random order
with a few tasks each, so it meets every order of whole tasks. The weaver runs each program in a
thread of its own, and changes threads at loads, stores and atomics, so it meets half-written rows.
"""

import random
import threading
from contextlib import contextmanager
from functools import wraps

UNLIMITED = 2**31 - 1
ACCESSES = (
    "create_load", "create_masked_load", "create_store", "create_masked_store", "create_atomic_rmw",
    "create_atomic_cas",
)  # fmt: skip


class StuckError(AssertionError):
    """A schedule did not come to its end."""


def explore(case, seed, num_launches=400, held_back=None):
    """Launch instances in a random order until all have completed their epochs.

    held_back: an instance that gets a turn only if nobody else can go on.
    """
    draw, without_progress = random.Random(seed), 0
    for _ in range(num_launches):
        pending = case.pending()
        if not pending:
            return
        if held_back in pending and len(pending) > 1 and without_progress < 4:
            pending.remove(held_back)
        instance = draw.choice(pending)
        before = case.fused[instance].counter.clone(), case.epoch(instance)
        case.launch(
            instance, max_tasks=draw.choice((1, 2, UNLIMITED)), max_idle=1, is_last=False,
            num_programs=draw.choice((1, 2)),
        )  # fmt: skip
        case.exchanges[instance].check()
        same = case.fused[instance].counter.equal(before[0]) and case.epoch(instance) == before[1]
        without_progress = without_progress + 1 if same else 0
        if without_progress > 30:
            break
    if case.pending():
        raise StuckError(f"nothing can go on, and these have not ended: {case.pending()}")


class Weaver:
    """Threads of which one runs at a time, until the seed says that another one does."""

    def __init__(self, seed, chance=0.1):
        """chance: of a change at each access to memory."""
        self._random, self._chance = random.Random(seed), chance
        self._turns, self._alive, self._failures = {}, [], []
        self.num_changes = 0

    def run(self, bodies):
        """Run all bodies to their ends; raises what the first of them raised."""
        self._turns = {index: threading.Semaphore(0) for index in range(len(bodies))}
        self._alive = list(self._turns)
        threads = [
            threading.Thread(target=self._run, args=(index, body), daemon=True)
            for index, body in enumerate(bodies)
        ]
        with self._hooked():
            for thread in threads:
                thread.start()
            self._running = self._random.choice(self._alive)
            self._turns[self._running].release()
            for thread in threads:
                thread.join(timeout=300)
                assert not thread.is_alive(), "a thread did not end"
        if self._failures:
            raise self._failures[0]

    def change(self):
        """Let another thread go on, and return when it is this one's turn again."""
        from triton.runtime.interpreter import interpreter_builder

        me = self._running
        others = [index for index in self._alive if index != me]
        if not others:
            return
        self.num_changes += 1
        program = interpreter_builder.grid_idx, interpreter_builder.grid_dim
        self._running = self._random.choice(others)
        self._turns[self._running].release()
        self._turns[me].acquire()
        interpreter_builder.grid_idx, interpreter_builder.grid_dim = program

    def _run(self, index, body):
        self._turns[index].acquire()
        try:
            body()
        except BaseException as failure:
            self._failures.append(failure)
        self._alive.remove(index)
        if self._alive:
            self._running = self._random.choice(self._alive)
            self._turns[self._running].release()

    @contextmanager
    def _hooked(self):
        from triton.runtime.interpreter import InterpreterBuilder

        plain = {name: getattr(InterpreterBuilder, name) for name in ACCESSES}

        def hooked(access):
            @wraps(access)
            def changing(*arguments):
                if self._random.random() < self._chance:
                    self.change()
                return access(*arguments)

            return changing

        for name, access in plain.items():
            setattr(InterpreterBuilder, name, hooked(access))
        try:
            yield
        finally:
            for name, access in plain.items():
                setattr(InterpreterBuilder, name, access)


def weave(case, seed, num_programs=1, chance=0.1, max_idle=400):
    """Run all epochs of all instances at the same time, each program in a thread; return changes.

    A wait that finds nothing in max_idle sweeps is an error, as on a GPU.
    """
    weaver = Weaver(seed, chance)
    ended = [0] * len(case.fused)

    def program(instance):
        for epoch, _ in enumerate(case.layers[instance]):
            # The grid is one program here; its fellows are other threads.
            case.fused[instance].launch(*case.arguments(instance, epoch), max_idle=max_idle,
                                        num_programs=num_programs, grid=1)  # fmt: skip
            ended[instance] += 1
            # A stream's next launch begins when this one has ended.
            while ended[instance] < num_programs * (epoch + 1):
                weaver.change()

    everyone = range(len(case.fused))
    for instance in everyone:
        for epoch, _ in enumerate(case.layers[instance]):
            case.arguments(instance, epoch)
    weaver.run([lambda i=i: program(i) for i in everyone for _ in range(num_programs)])
    return weaver.num_changes
