"""Starts that fail, and what a start shows, with processes of HashInstances."""

import pytest

from control_plane.coordinator.members.start import StartError
from harness.exact.settings import configured
from harness.services.hash_service import (
    CONFIG,
    forked_service,
    process_launcher,
    served,
    shared_memory_of,
)
from harness.services.kit import started
from nanocp.serve.service import Service
from nanocp.values.members import PREFILL, Member


def assert_cannot_start(service, sentence):
    with pytest.raises(StartError, match=sentence), started(service):
        pass


def test_an_instance_that_cannot_start_says_why_in_its_own_words():
    service = forked_service(CONFIG, served("harness.services.hash_members:build_dying"))
    assert_cannot_start(service, "instance 1: layer 3 of the checkpoint is made of cheese")
    assert shared_memory_of(service) == []


def test_every_member_says_how_much_of_its_weights_it_has_loaded():
    """Once a percent, though hash_members tells the instances' progress 300 times."""
    told: dict[Member, list[int]] = {}
    service = forked_service(CONFIG, served())
    try:
        service.start(
            lambda step: None, lambda member, percent: told.setdefault(member, []).append(percent)
        )
    finally:
        service.stop()
    instances = {
        Member("instance", number): list(range(1, 101))
        for number in range(CONFIG.cluster.num_instances)
    }
    assert told == instances | {PREFILL: [100]}


def test_a_process_that_cannot_even_begin_is_noticed():
    service = Service(CONFIG, served("no_such_module:build"), process_launcher())
    assert_cannot_start(service, "No module named 'no_such_module'")


def test_who_is_late_is_named():
    service = Service(configured(CONFIG, start_timeout_ms=600), served(), _Nobody())
    late = r"not ready after start_timeout_ms \(600 ms\): instance 0, instance 1"
    assert_cannot_start(service, late)


class _Nobody:
    """A launcher that starts nothing."""

    def start(self, specs, exited):
        pass

    def start_one(self, member, number, spec):
        pass

    def stop(self, timeout_s):
        return []

    def kill(self, member):
        pass
