"""A service of four HashInstances that loses members and goes on: every token is right."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from control_plane.coordinator.members import replacements
from control_plane.observe.metrics.families import PHASES
from harness.exact.settings import configured
from harness.services.hash_members import MortalMember
from harness.services.hash_service import (
    CONFIG,
    DEFAULT,
    expected,
    generate,
    hash_service,
    prompt,
    shared_memory_of,
    with_policy,
)
from harness.services.service_recovery import (
    LENGTHS,
    SLOW,
    WAIT_S,
    generating,
    pid_of,
    played_again,
    sample,
    terms_of,
    until,
    until_serving,
)
from nanocp.client import ServiceError
from nanocp.values.members import PREFILL, Member


@pytest.mark.parametrize("backend", ["auto", pytest.param("tcp", marks=pytest.mark.system)])
def test_terms_end_one_after_the_other_without_a_loss(backend, tmp_path):
    config, log = with_policy("chaos", steps_per_window=2), tmp_path / "log"
    config = configured(config, event_log=str(log), exchange_backend=backend)
    with hash_service(config, SLOW) as service, generating(service, 200):
        pids = [pid_of(service, Member("instance", number)) for number in range(4)]
        for term in range(2, 7):
            service._controller.regroup()
            until_serving(service, term)
            time.sleep(0.2)
        assert pids == [pid_of(service, Member("instance", number)) for number in range(4)]
    played = played_again(log)
    assert (played.difference, played.num_requests) == (None, len(LENGTHS))


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.system)],
    ids=lambda each: each.name,
)
def test_an_instance_is_lost_and_another_process_takes_its_seat(number):
    with hash_service(DEFAULT, SLOW) as service:
        with generating(service, 200):
            lost = pid_of(service, Member("instance", 1))
            os.kill(lost, number)
            until_serving(service, 2)
            assert pid_of(service, Member("instance", 1)) != lost
        assert sample(service, "stream_pause_seconds_count", cause="term")
        assert sample(service, "replayed_tokens_total")
        seconds = sum(sample(service, "recovery_phase_seconds_sum", phase=each) for each in PHASES)
        assert seconds == pytest.approx(sample(service, "recovery_seconds_sum")) and seconds > 0
        assert not service.failure.done()
        began = time.monotonic()
    assert time.monotonic() - began < 60, "no limit of a process that is gone is waited for"
    assert shared_memory_of(service) == []


def test_an_instance_is_lost_while_another_is_replaced():
    """Rows draft meanwhile: drafts are lost with a row, and tokens are those without."""
    with hash_service(configured(DEFAULT, num_drafts=2), SLOW) as service:
        with generating(service, 200):
            os.kill(pid_of(service, Member("instance", 3)), signal.SIGKILL)
            until(lambda: not terms_of(service).is_serving)
            os.kill(pid_of(service, Member("instance", 0)), signal.SIGKILL)
            until_serving(service, 2)
        drafts = "spec_decode_num_drafts_total"
        assert sum(sample(service, drafts, engine=engine) for engine in "0123") > 200


@pytest.mark.system
def test_all_instances_are_lost_at_once():
    with hash_service(CONFIG, SLOW) as service, generating(service, 200):
        for number in range(4):
            os.kill(pid_of(service, Member("instance", number)), signal.SIGKILL)
        until_serving(service, 2)


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.system)],
    ids=lambda each: each.name,
)
def test_a_lost_prefill_is_replaced_and_new_requests_wait_for_it(number):
    with hash_service(DEFAULT, SLOW) as service, ThreadPoolExecutor(1) as pool:
        with generating(service, 200):
            lost = pid_of(service, PREFILL)
            os.kill(lost, number)
            late = pool.submit(generate, service.address, prompt(700, 7), 20, timeout_s=WAIT_S)
            until(lambda: pid_of(service, PREFILL) != lost)
            assert late.result(WAIT_S) == expected(prompt(700, 7), 20)
        assert terms_of(service).number == 1


def test_a_service_that_is_asked_to_stop_while_it_recovers_stops():
    with hash_service(DEFAULT, SLOW) as service:
        os.kill(pid_of(service, Member("instance", 2)), signal.SIGKILL)
        until(lambda: not terms_of(service).is_serving)
        began = time.monotonic()
        service.stop()
        assert time.monotonic() - began < 60
    assert shared_memory_of(service) == []
    assert "watch instance 2" not in {thread.name for thread in threading.enumerate()}


def test_a_spare_takes_the_seat_of_a_lost_instance_and_another_stands_by():
    with hash_service(configured(DEFAULT, spares=1), SLOW) as service:
        until(lambda: service.num_ready_spares)
        (spare,) = service.launcher._spares
        with generating(service, 200):
            os.kill(pid_of(service, Member("instance", 1)), signal.SIGKILL)
            until_serving(service, 2)
            assert pid_of(service, Member("instance", 1)) == spare.process.pid
        assert Path(f"/proc/{spare.process.pid}/comm").read_text() == "instance 1\n"
        until(lambda: service.num_ready_spares)
        until(lambda: sample(service, "seats", state="serving") == 4)
        assert sample(service, "seats", state="spare") == 1
        (another,) = service.launcher._spares
    assert another.process.poll() is not None and shared_memory_of(service) == []


@pytest.mark.system
def test_a_request_that_ends_instances_is_ended_and_the_others_go_on():
    poison = MortalMember.POISON
    with hash_service(DEFAULT, "harness.services.hash_members:build_mortal") as service:
        with generating(service, 400):
            until(lambda: sample(service, "num_requests_running") == len(LENGTHS))
            time.sleep(0.1)  # Each has run whole windows before the poison's first.
            with pytest.raises(ServiceError, match="it may be what ends them") as ended:
                generate(service.address, prompt(100, 1), 20, seed=poison, timeout_s=WAIT_S)
            assert type(ended.value) is ServiceError, "neither retried nor the client's fault"
        assert terms_of(service).number == 4 and not service.failure.done()


@pytest.mark.system
def test_a_replacement_that_is_stopped_before_it_dials_is_followed_by_another(monkeypatch):
    monkeypatch.setattr(replacements, "_DIAL_S", 15.0)
    member = Member("instance", 2)
    with hash_service(DEFAULT, SLOW) as service, generating(service, 400):
        first = pid_of(service, member)
        os.kill(first, signal.SIGKILL)
        until(lambda: pid_of(service, member) != first)
        os.kill(pid_of(service, member), signal.SIGSTOP)
        until_serving(service, 2)
