"""Actors of members, with a stand-in for Ray: the end of a service that is still losing some."""

import threading

import pytest
import ray

from control_plane.launchers.ray_actors import RayLauncher
from nanocp.values.members import Member

FIRST = Member("instance", 0)


class Actor:
    """An actor, its class and its call, which lasts until it is killed."""

    def __init__(self):
        self.killed, self.run = threading.Event(), self

    def options(self, **_):
        return self

    def remote(self, *_):
        return self


@pytest.fixture
def killed(monkeypatch):
    """Every actor that Ray was asked to kill, while it ran."""
    found, is_running = [], [True]

    def kill(actor):
        assert is_running, "Ray has stopped"
        found.append(actor)
        actor.killed.set()

    monkeypatch.setattr(ray, "kill", kill)
    monkeypatch.setattr(ray, "get", lambda run: run.killed.wait(20))
    monkeypatch.setattr(ray, "shutdown", is_running.clear)
    return found


def started(exited=lambda *_: None):
    launcher = RayLauncher(actor := Actor(), None, {})
    launcher._exited = exited
    launcher.start_one(FIRST, 0, "spec")
    return launcher, actor


def test_a_member_is_killed_until_the_launcher_stops_and_then_nothing_is(killed):
    """The controller may still find one lost while the service ends."""
    ends = []
    launcher, actor = started(lambda *end: ends.append(end))
    launcher.kill(FIRST)
    assert killed[0] is actor
    launcher.stop(1)
    assert ends == [(FIRST, 0, "its actor left")]
    num_killed = len(killed)
    launcher.kill(FIRST)
    launcher.kill(Member("instance", 7))
    launcher.stop(1)
    assert len(killed) == num_killed


def test_a_kill_while_ray_stops_reaches_no_ray(killed, monkeypatch):
    launcher, _ = started()
    stop_ray = ray.shutdown

    def shutdown():
        stop_ray()
        launcher.kill(FIRST)

    monkeypatch.setattr(ray, "shutdown", shutdown)
    launcher.stop(0)
    assert killed
