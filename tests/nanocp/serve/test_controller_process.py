"""A controller that is killed: another one takes its place, and every stream goes on."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from control_plane.launchers.ray_actors import RayLauncher
from control_plane.scheduler.scheduler import Scheduler
from control_plane.shell.event_log import LogReader, digest, log_lines
from data_plane.programs.ray_actor import MemberActor
from harness.exact.settings import configured
from harness.hash_clusters.hash_model import NUM_EXPERTS
from harness.paths import TESTS
from harness.services.hash_service import DEFAULT, ENVIRONMENT, expected, prompt, served
from harness.services.serve_process import NANOCP, descendants, is_running, seats, segments_of
from harness.services.service_recovery import LENGTHS, SLOW, WAIT_S, until
from harness.vllm.engines import EngineProcess
from nanocp.client import Client
from nanocp.config.prefill import PrefillConfig
from nanocp.serve.free_ports import free_ports
from nanocp.serve.supervisor import FRONT_ENDS, MEMBERS, Supervisor
from nanocp.values.members import PREFILL, Member

pytestmark = pytest.mark.system

FRONT_END = Member("front end", 0)
NUM_TOKENS = 300


@contextlib.contextmanager
def supervised(launcher=None, **settings):
    config = configured(
        DEFAULT, front_ends=2, controller_process=True, grpc_port=free_ports(2),
        metrics_port=free_ports(), **settings,
    )  # fmt: skip
    environment = ENVIRONMENT | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    with_experts = replace(served(SLOW), num_experts=NUM_EXPERTS)
    supervisor = Supervisor(config, with_experts, environment, launcher)
    status = []
    thread = threading.Thread(target=lambda: status.append(supervisor.run()))
    thread.start()
    try:
        until(lambda: supervisor.has_served.is_set() or not thread.is_alive())
        assert supervisor.has_served.is_set()
        yield (
            supervisor,
            Streams([f"127.0.0.1:{config.service.grpc_port + index}" for index in range(2)]),
        )
    finally:
        supervisor.signal(signal.SIGTERM)
        thread.join(WAIT_S)
    assert status == [0]


class Streams:
    """Clients of every front end, each with a stream."""

    def __init__(self, targets):
        self._targets = targets
        self._begun = threading.Semaphore(0)

    def _answer(self, length):
        output, options = [], {"max_tokens": NUM_TOKENS, "seed": 1, "timeout_s": WAIT_S}
        with Client(self._targets) as client:
            for chunk in client.generate(prompt(length, length), **options):
                output += chunk.token_ids
                self._begun.release()
        return output

    @contextlib.contextmanager
    def running(self):
        """Streams are under way; at the end each has every token, and none that is wrong."""
        self._begun = threading.Semaphore(0)
        with ThreadPoolExecutor(8) as pool:
            answers = {length: pool.submit(self._answer, length) for length in LENGTHS}
            for _ in range(60):
                assert self._begun.acquire(timeout=WAIT_S)
            yield
            for length, answer in answers.items():
                assert answer.result(WAIT_S) == expected(prompt(length, length), NUM_TOKENS), length

    def are_exact(self):
        """New streams."""
        with self.running():
            pass


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda each: each.name)
def test_the_controller_is_lost_and_every_stream_goes_on(number):
    with supervised() as (supervisor, streams):
        controller = supervisor.process.pid
        others = set(descendants(os.getpid())) - {controller}
        with streams.running():
            os.kill(controller, number)
        assert supervisor.process.pid != controller
        assert others <= set(descendants(os.getpid())), "members and front ends went on"
        streams.are_exact()
        segments = set().union(*map(segments_of, descendants(os.getpid())))
        assert len({name.split("-t")[-1].split("-")[0] for name in segments}) == 1
    until(lambda: not any(map(is_running, others)))
    assert not segments & set(os.listdir("/dev/shm"))


def test_controllers_are_killed_one_after_the_other():
    """Rows draft meanwhile: what was accepted is lost with the controller that was told."""
    with supervised(num_drafts=2) as (supervisor, streams):
        for _ in range(3):
            with streams.running():
                os.kill(supervisor.process.pid, signal.SIGKILL)


def test_a_service_that_is_asked_to_stop_while_the_next_controller_starts_ends_its_streams():
    """The next controller gets the signal once it serves; the service ends with 0."""
    with supervised() as (supervisor, streams):
        controller = supervisor.process.pid
        with streams.running():
            os.kill(controller, signal.SIGKILL)
            until(lambda: supervisor.process.pid != controller)
            supervisor.signal(signal.SIGTERM)
        until(lambda: supervisor.process.poll() is not None)


def test_a_member_and_a_front_end_are_lost_while_the_next_controller_starts():
    with supervised() as (supervisor, streams):
        controller, hosts = supervisor.process.pid, supervisor.hosts
        with streams.running():
            os.kill(controller, signal.SIGKILL)
            until(lambda: supervisor.process.pid != controller)
            for name, member in ((MEMBERS, Member("instance", 1)), (FRONT_ENDS, FRONT_END)):
                os.kill(hosts[name].call("pid", [member]), signal.SIGKILL)
        streams.are_exact()


def test_a_front_end_that_is_stopped_when_the_controller_is_lost_is_replaced():
    """It never dials the next controller, and its process does not end by itself."""
    with supervised() as (supervisor, streams):
        controller = supervisor.process.pid
        with streams.running():
            stopped = supervisor.hosts[FRONT_ENDS].call("pid", [FRONT_END])
            os.kill(stopped, signal.SIGSTOP)
            os.kill(controller, signal.SIGKILL)
        assert not is_running(stopped)
        streams.are_exact()


def test_front_ends_that_end_while_the_next_controller_starts_are_replaced():
    """Those of the lost controller, and those that the next one has started itself."""
    with supervised() as (supervisor, streams):
        pid_of_it = partial(supervisor.hosts[FRONT_ENDS].call, "pid", [FRONT_END])
        with streams.running():
            lost = pid_of_it()
            os.kill(lost, signal.SIGSTOP)  # so that it does not dial
            os.kill(supervisor.process.pid, signal.SIGKILL)
            for _ in range(2):
                time.sleep(1)  # for the next controller to begin, if it has not
                os.kill(lost, signal.SIGKILL)
                until(lambda lost=lost: pid_of_it() not in (None, lost))
                lost = pid_of_it()
            os.kill(lost, signal.SIGKILL)
        streams.are_exact()


def transfers_of_the_second_controller(event_log):
    """Play its event log again; returns how many tickets its prefill got."""
    num_tickets, reader = 0, LogReader(log_lines(Path(f"{event_log}.2")), "log")
    scheduler = Scheduler(reader.header.cluster, reader.header.scheduler)
    for call in reader:
        plan = scheduler.plan_window([event for _, event in call.events], call.now_us)
        assert digest(plan) == call.plan
        num_tickets += sum(transfer.source is None for transfer in plan.transfers)
    return num_tickets


def test_requests_go_on_over_the_pages_that_instances_kept(tmp_path):
    event_log = str(tmp_path / "events.jsonl")
    with supervised(event_log=event_log) as (supervisor, streams), streams.running():
        os.kill(supervisor.process.pid, signal.SIGKILL)
    assert transfers_of_the_second_controller(event_log) == 0


def instance_is_replaced(supervisor, member):
    """Kill an instance; returns once another process has its seat."""
    host = supervisor.hosts[MEMBERS]
    lost = host.call("pid", [member])
    os.kill(lost, signal.SIGKILL)
    until(lambda: host.call("pid", [member]) != lost)


def test_the_controller_is_lost_while_a_spare_takes_a_seat():
    with supervised(spares=1) as (supervisor, streams):
        host = supervisor.hosts[MEMBERS]
        until(lambda: host.call("spares", []) == (True,))
        (spare,) = [each.process.pid for each in host._launcher._spares]
        with streams.running():
            instance_is_replaced(supervisor, Member("instance", 1))
            os.kill(supervisor.process.pid, signal.SIGKILL)
        assert host.call("pid", [Member("instance", 1)]) == spare
        until(lambda: host.call("spares", []) == (True,))
        streams.are_exact()


def test_prompts_of_engines_go_on_under_the_next_controller():
    with EngineProcess() as engine:
        prefill = PrefillConfig(engines=(engine.url,), ring_pages=2)
        with supervised(prefill=prefill) as (supervisor, streams):
            prefill_pid = supervisor.hosts[MEMBERS].call("pid", [PREFILL])
            for _ in range(2):
                with streams.running():
                    os.kill(supervisor.process.pid, signal.SIGKILL)
            assert supervisor.hosts[MEMBERS].call("pid", [PREFILL]) == prefill_pid


def test_actors_of_ray_outlive_the_controller():
    environment = ENVIRONMENT | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    launcher = RayLauncher(MemberActor, None, environment)
    with supervised(launcher) as (supervisor, streams):
        with streams.running():
            os.kill(supervisor.process.pid, signal.SIGKILL)
        with streams.running():
            launcher.kill(Member("instance", 2))
            os.kill(supervisor.process.pid, signal.SIGKILL)


def test_a_seat_that_was_drained_is_drained_again_by_the_next_controller():
    with supervised(redundant_experts=NUM_EXPERTS) as (supervisor, streams):
        status = f"127.0.0.1:{supervisor.config.service.metrics_port}"
        subprocess.run([*NANOCP, "drain", "3", "--target", status], check=True, timeout=WAIT_S)
        with streams.running():
            os.kill(supervisor.process.pid, signal.SIGKILL)
        until(lambda: is_answering(status) and seats(status)["serving"] == [0, 1, 2])
        assert seats(status)["empty"] == [3]
        streams.are_exact()


def is_answering(status):
    with contextlib.suppress(OSError):
        seats(status)
        return True
