"""A controller that is killed: another one takes its place, and every stream goes on."""

import contextlib
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from control_plane.member_streams import Member
from harness.hash_service import CONFIG, ENVIRONMENT, expected, prompt, served
from harness.paths import TESTS
from harness.serve_process import descendants, is_running, segments_of
from harness.service_recovery import LENGTHS, SLOW, WAIT_S, until
from nanocp.client import Client
from nanocp.serve.process import free_port
from nanocp.serve.supervisor import FRONT_ENDS, MEMBERS, Supervisor

pytestmark = pytest.mark.system

FRONT_END = Member("front end", 0)


@contextlib.contextmanager
def supervised():
    service = replace(
        CONFIG.service,
        front_ends=2,
        front_end_processes=True,
        controller_process=True,
        grpc_port=free_port(),
        metrics_port=free_port(),
    )
    environment = ENVIRONMENT | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    limits = replace(CONFIG.limits, orphan_ms=120_000)
    config = replace(CONFIG, service=service, limits=limits)
    supervisor = Supervisor(config, served(SLOW), environment)
    status = []
    thread = threading.Thread(target=lambda: status.append(supervisor.run()))
    thread.start()
    try:
        until(lambda: supervisor.has_served.is_set() or not thread.is_alive())
        assert supervisor.has_served.is_set()
        yield supervisor, [f"127.0.0.1:{service.grpc_port + index}" for index in range(2)]
    finally:
        supervisor.signal(signal.SIGTERM)
        thread.join(WAIT_S)
    assert status == [0]


def answers(pool, targets, max_tokens=300):
    def one(length):
        with Client(targets) as client:
            chunks = client.generate(
                prompt(length, length), max_tokens=max_tokens, seed=1, timeout_s=WAIT_S
            )
            output = []
            for chunk in chunks:
                output += chunk.token_ids
                begun.release()
            return output

    begun = threading.Semaphore(0)
    running = {length: pool.submit(one, length) for length in LENGTHS}
    for _ in range(60):
        assert begun.acquire(timeout=WAIT_S)
    return running


def check(running, max_tokens=300):
    for length, answer in running.items():
        assert answer.result(WAIT_S) == expected(prompt(length, length), max_tokens), length


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda each: each.name)
def test_the_controller_is_lost_and_every_stream_goes_on(number):
    with supervised() as (supervisor, targets), ThreadPoolExecutor(8) as pool:
        controller = supervisor.process.pid
        others = set(descendants(os.getpid())) - {controller}
        running = answers(pool, targets)
        os.kill(controller, number)
        check(running)
        assert supervisor.process.pid != controller
        assert others <= set(descendants(os.getpid())), "members and front ends went on"
        check(answers(pool, targets))
        segments = set().union(*map(segments_of, descendants(os.getpid())))
        assert len({name.split("-t")[-1].split("-")[0] for name in segments}) == 1
    until(lambda: not any(map(is_running, others)))
    assert not segments & set(os.listdir("/dev/shm"))


def test_controllers_are_killed_one_after_the_other():
    with supervised() as (supervisor, targets), ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            running = answers(pool, targets)
            os.kill(supervisor.process.pid, signal.SIGKILL)
            check(running)


def test_a_member_and_a_front_end_are_lost_while_the_next_controller_starts():
    with supervised() as (supervisor, targets), ThreadPoolExecutor(8) as pool:
        controller, hosts = supervisor.process.pid, supervisor.hosts
        running = answers(pool, targets)
        os.kill(controller, signal.SIGKILL)
        until(lambda: supervisor.process.pid != controller)
        for name, member in ((MEMBERS, Member("instance", 1)), (FRONT_ENDS, FRONT_END)):
            os.kill(hosts[name].call("pid", [member]), signal.SIGKILL)
        check(running)
        check(answers(pool, targets))
