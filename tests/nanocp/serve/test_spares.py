"""Spares are kept while all seats serve, and given up if none becomes ready."""

import time

import pytest

from harness.waits import until
from nanocp.serve import spares
from nanocp.serve.spares import Spares


class Launcher:
    """Spares that are ready at once, or end at once."""

    def __init__(self, is_sound=True):
        self.spares, self.started, self.is_sound = [], [], is_sound

    def start_spare(self, name, spec, ended):
        self.started.append((name, spec))
        if not self.is_sound:
            raise OSError("no memory")
        self.spares.append(True)
        self.ended = ended


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(spares, "_PAUSE_S", 0.005)


def test_as_many_as_wanted_stand_by_while_all_seats_serve():
    launcher, is_whole = Launcher(), [False]
    kept = Spares(launcher, 2, lambda name: f"spec of {name}", lambda: is_whole[0])
    kept.start()
    time.sleep(0.05)
    assert not launcher.started, "what serves again has the machine to itself"
    is_whole[0] = True
    until(lambda: kept.num_ready == 2)
    launcher.spares.pop()
    launcher.ended("its process was ended by SIGKILL", True)
    until(lambda: kept.num_ready == 2)
    assert launcher.started == [(f"spare {n}", f"spec of spare {n}") for n in range(3)]
    kept.stop()
    launcher.spares.clear()
    time.sleep(0.05)
    assert len(launcher.started) == 3 and not kept._thread.is_alive()


def test_spares_that_never_become_ready_are_given_up(caplog):
    launcher = Launcher(is_sound=False)
    kept = Spares(launcher, 1, str, lambda: True)
    kept.start()
    until(lambda: not kept._thread.is_alive())
    assert len(launcher.started) == 3 and "3 spares ended before they were ready" in caplog.text
