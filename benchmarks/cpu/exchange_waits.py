"""Steps of four processes that wait for each other, beside processes that compute and alone.

Enters: nothing. Leaves: a table, and a list of {beside, yields, always, never}: steps a second.
Does not know: what a step computes.

A process computes for a while, stores its step in a shared word, and waits for the words of the
others, as the exchange over shared memory does. The waits are as they are (`yields`: they yield,
but not for a second after a yield that took long), always yield first, or sleep at once. The three
take turns.
"""

from __future__ import annotations

import math
import mmap
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from benchmarks.kit.bench import BenchRun, at_least, bench
from data_plane.transport import futex

WAYS = {"yields": {}, "always": {"_LONG_YIELD_S": math.inf}, "never": {"_NUM_YIELDS": 0}}
NUM_PROCESSES, COMPUTE_S, TURN_S = 4, 0.0003, 2.0
MIN_BESIDE, MIN_ALONE = 1.3, 0.97
"""Claims: steps over those of waits that always yield, beside others that compute and alone."""
_FORK = multiprocessing.get_context("fork")


def _step_on(number: int, words: list[futex.Word], way: str, end_s: float) -> None:
    """Take part in steps until the time is over."""
    vars(futex).update(WAYS[way])
    step = 0
    while time.monotonic() < end_s:
        begin_s = time.thread_time()
        while time.thread_time() - begin_s < COMPUTE_S:
            pass
        step += 1
        words[number].store(step)
        for word in words:
            word.wait_at_least(step, 2_000, 100, lambda: time.monotonic() < end_s)


def _steps_a_second(way: str) -> float:
    buffer = mmap.mmap(-1, mmap.PAGESIZE)
    words = [futex.Word(buffer, 64 * number) for number in range(NUM_PROCESSES)]
    end_s = time.monotonic() + TURN_S
    each = [
        _FORK.Process(target=_step_on, args=(number, words, way, end_s))
        for number in range(NUM_PROCESSES)
    ]
    for process in each:
        process.start()
    for process in each:
        process.join()
    return words[0].load() / TURN_S


def _spin() -> None:
    while True:
        pass


@contextmanager
def _beside(num: int) -> Iterator[None]:
    others = [_FORK.Process(target=_spin, daemon=True) for _ in range(num)]
    for other in others:
        other.start()
    try:
        yield
    finally:
        for other in others:
            other.kill()


@bench("Three turns of each, half a minute; it judges the claims too.")
def main(run: BenchRun) -> None:
    """Measure in turn, so that a drift of the machine meets all alike."""
    for num in (os.cpu_count() or 1, 0):
        with _beside(num):
            turns = 3 if run.is_quick else 10
            found = [{way: _steps_a_second(way) for way in WAYS} for _ in range(turns)]
        result = {way: median(turn[way] for turn in found) for way in WAYS}
        run.keep({"beside": num, **result})
        ratio = result["yields"] / result["always"]
        what = f"steps beside {num} processes that compute, over those of waits that always yield"
        run.judge([at_least(what, ratio, MIN_BESIDE if num else MIN_ALONE)])
    run.table("Steps a second", run.results)


if __name__ == "__main__":
    main()
