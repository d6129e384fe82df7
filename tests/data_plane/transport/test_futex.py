"""A wait yields its core to quick peers, and sleeps at once beside processes that compute."""

import mmap
from types import SimpleNamespace

import pytest

from data_plane.transport import futex
from data_plane.transport.futex import Word, wait_for_any


class Kernel:
    """Stands for the clock and for yields, each of which takes as long as it is told."""

    def __init__(self, monkeypatch):
        self.now_s, self.yield_s, self.num_yields = 5.0, 0.00001, 0
        monkeypatch.setattr(futex, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(futex, "os", SimpleNamespace(sched_yield=self._yield))
        monkeypatch.setattr(futex, "_sleeps_until_s", 0.0)
        monkeypatch.setattr(futex, "_NUM_YIELDS", 200)

    def _yield(self):
        self.num_yields += 1
        self.now_s += self.yield_s

    def yields_of(self, wait, word):
        """Yields of one wait that ends without its value."""
        before = self.num_yields
        assert not wait(word)
        return self.num_yields - before


@pytest.mark.parametrize("wait", [
    lambda word: word.wait_at_least(1, timeout_ms=0, tick_ms=1, go_on=lambda: True),
    lambda word: wait_for_any([(word, 1)], timeout_ms=0, tick_ms=1, go_on=lambda: True),
])  # fmt: skip
def test_after_a_long_yield_the_next_waits_sleep_at_once(monkeypatch, wait):
    kernel, word = Kernel(monkeypatch), Word(mmap.mmap(-1, 4096), 64)
    assert kernel.yields_of(wait, word) == 200
    kernel.yield_s = 0.004
    assert kernel.yields_of(wait, word) == 1
    kernel.yield_s = 0.00001
    for _ in range(3):
        assert kernel.yields_of(wait, word) == 0
    kernel.now_s += 1
    assert kernel.yields_of(wait, word) == 200, "the busy process may be gone"


def test_a_value_that_comes_in_a_long_yield_is_taken(monkeypatch):
    kernel, word = Kernel(monkeypatch), Word(mmap.mmap(-1, 4096), 64)

    def store():
        kernel.now_s += 1
        word.store(7)

    monkeypatch.setattr(futex, "os", SimpleNamespace(sched_yield=store))
    assert word.wait_at_least(5, timeout_ms=0, tick_ms=1, go_on=lambda: False) == 7
