"""Front ends as processes of a hash service: they are killed, and every answer ends right."""

import os
import signal
import socket
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from harness.exact.settings import configured
from harness.services.hash_service import (
    DEFAULT,
    expected,
    generate,
    hash_service,
    prompt,
    shared_memory_of,
)
from harness.services.kit import ids_of
from harness.services.service_recovery import (
    LENGTHS,
    SLOW,
    WAIT_S,
    num_free_frames,
    pid_of,
    sample,
    terms_of,
    until,
    until_serving,
)
from nanocp.client import Client, Unavailable
from nanocp.values.members import Member

pytestmark = pytest.mark.system

HELD_S = 3
PROCESSES = configured(DEFAULT, front_ends=2, held_timeout_us=HELD_S * 1_000_000)


def pid_of_front_end(service, index):
    return service._front_ends._launcher.pid(Member("front end", index))


def num_generated(service):
    return sample(service, "generation_tokens_total") or 0


def until_nothing_is_left(service):
    until(lambda: num_free_frames(service) == 4 * DEFAULT.cluster.num_frames)
    assert not service._front_ends._port._attendance.unattended
    until(lambda: service.num_open == 0)


def answers(pool, service, max_tokens=200):
    """Requests of six lengths, from clients that know both front ends and begin at either."""

    def one(length):
        turn = length % 2
        targets = service.addresses[turn:] + service.addresses[:turn]
        with Client(targets) as client:
            chunks = client.generate(
                prompt(length, length), max_tokens=max_tokens, seed=1, timeout_s=WAIT_S
            )
            return ids_of(chunks)

    return {length: pool.submit(one, length) for length in LENGTHS}


def check(answers, max_tokens=200):
    for length, answer in answers.items():
        assert answer.result(WAIT_S) == expected(prompt(length, length), max_tokens), length


def test_a_front_end_is_killed_and_its_clients_go_on_at_another():
    with hash_service(PROCESSES, SLOW) as service, ThreadPoolExecutor(8) as pool:
        address, lost = service.addresses[0], pid_of_front_end(service, 0)
        running = answers(pool, service)
        left = pool.submit(generate, address, prompt(90, 90), 1500, timeout_s=WAIT_S)
        until(lambda: num_generated(service) > 50)
        os.kill(lost, signal.SIGKILL)
        with pytest.raises(Unavailable):
            left.result(WAIT_S)
        check(running)
        until(lambda: pid_of_front_end(service, 0) != lost)
        with Client([address, address]) as client:
            chunks = client.generate(prompt(64, 3), max_tokens=5, seed=1, timeout_s=WAIT_S)
            assert ids_of(chunks) == expected(prompt(64, 3), 5)
            assert client.server_info().front_ends == service.addresses
            assert len(client.loads().instances) == 4
        assert terms_of(service).number == 1, "the instances have noticed nothing"
        until_nothing_is_left(service)
        page = httpx.get(f"http://{service.http_addresses[0]}/metrics").text
        status = urllib.request.urlopen(f"http://{service.metrics_address}/metrics").read().decode()
        for text in (page, status):
            assert "nanocp:request_success_total" in text
        assert service.drain()
    assert shared_memory_of(service) == []


def test_an_instance_and_a_front_end_are_lost_together():
    with hash_service(PROCESSES, SLOW) as service, ThreadPoolExecutor(8) as pool:
        running = answers(pool, service)
        until(lambda: num_generated(service) > 50)
        os.kill(pid_of(service, Member("instance", 2)), signal.SIGKILL)
        until(lambda: not terms_of(service).is_serving)
        os.kill(pid_of_front_end(service, 1), signal.SIGKILL)
        until_serving(service, 2)
        check(running)
        until_nothing_is_left(service)


def test_front_ends_are_killed_again_and_again():
    with hash_service(PROCESSES, SLOW) as service, ThreadPoolExecutor(8) as pool:
        for number in range(4):
            running = answers(pool, service)
            time.sleep(1.0)
            lost = pid_of_front_end(service, number % 2)
            os.kill(lost, signal.SIGKILL)
            check(running)
            until(lambda number=number, lost=lost: pid_of_front_end(service, number % 2) != lost)
            until(lambda: len(service._front_ends._port._attached) == 2)
        until_nothing_is_left(service)


def test_a_front_end_that_is_stopped_is_replaced():
    with (
        hash_service(configured(PROCESSES, suspect_ms=3000), SLOW) as service,
        ThreadPoolExecutor(8) as pool,
    ):
        lost = pid_of_front_end(service, 0)
        os.kill(lost, signal.SIGSTOP)
        until(lambda: pid_of_front_end(service, 0) != lost)
        until(lambda: len(service._front_ends._port._attached) == 2)
        check(answers(pool, service, 20), 20)
        until_nothing_is_left(service)


def test_a_port_that_is_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = configured(PROCESSES, http_port=port)
        with pytest.raises(OSError, match=f"cannot listen on port {port}"), hash_service(config):
            pass
