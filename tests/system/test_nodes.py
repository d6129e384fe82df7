"""A service over several machines, made of namespaces, with `ray up`; a process or machine dies."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from data_plane.model.make_checkpoint import PRESETS, make_checkpoint
from data_plane.reference.oracle import Oracle
from harness.nodes import nodes, why_not
from harness.paths import ROOT
from nanocp.client import Client, ServiceError

BIN = Path(sys.executable).parent
pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

RAY = "raylet/raylet|gcs_server"
WORKERS_GONE_S = 90.0
"""`ray down` stops Ray on the head; the other machines stop after a minute without the head."""


class RayCluster:
    """A running Ray cluster of these machines, made by deploy/ray-cluster.yaml."""

    def __init__(self, machines, folder):
        self.machines = machines
        self._file = folder / "ray-cluster.yaml"
        self._environment = {**os.environ, "HOME": str(folder), "RAY_TMPDIR": str(folder / "ray")}
        config = yaml.safe_load((ROOT / "deploy" / "ray-cluster.yaml").read_text())
        config["provider"].update(
            head_ip=machines[0].address, worker_ips=[node.address for node in machines[1:]]
        )
        config["min_workers"] = config["max_workers"] = len(machines) - 1
        config["auth"] = {"ssh_user": "root", "ssh_private_key": str(folder / "machines" / "key")}
        config["file_mounts"] = {"~/nanocp": str(ROOT)}
        # One command differs from the file's: an environment that exists already stands in for
        # `make setup`.
        assert config["setup_commands"][0] == "cd ~/nanocp && make setup"
        config["setup_commands"][0] = borrowed_environment("$HOME/nanocp")
        self._file.write_text(yaml.safe_dump(config))
        self._ray("up", "--no-config-cache")
        self._await_nodes(len(machines))

    def _ray(self, command, *options):
        words = [BIN / "ray", command, self._file, "--yes", *options]
        done = subprocess.run(
            words, capture_output=True, text=True, env=self._environment, timeout=300, cwd=ROOT
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    def _await_nodes(self, count):
        program = "import ray; ray.init('auto', logging_level='ERROR'); print(len(ray.nodes()))"
        ask = f"~/nanocp/.venv/bin/python -c {shlex.quote(program)}"
        deadline = time.monotonic() + 120
        while (seen := self.machines[0].run(ask).stdout.strip()) != str(count):
            assert time.monotonic() < deadline, f"{seen} of {count}: {self._log()}"
            time.sleep(2)

    def _log(self):
        return self.machines[0].run("tail -n 40 /tmp/ray/session_latest/logs/monitor.*").stdout

    def down(self):
        self._ray("down")


def borrowed_environment(code):
    """A shell's command line that makes ~/nanocp/.venv of this environment's commands.

    code: the folder whose code they run.
    """
    lines = ["mkdir -p ~/nanocp/.venv/bin && cd ~/nanocp/.venv/bin"]
    for name in ("python", "ray", "nanocp"):
        start = f"{BIN}/python -m nanocp.cli.main" if name == "nanocp" else BIN / name
        text = f'#!/bin/sh\nPYTHONPATH={code} exec {start} "$@"\n'
        lines.append(f"printf %s {shlex.quote(text)} > {name} && chmod +x {name}")
    return " && ".join(lines)


class Serve:
    """`nanocp serve` on the head, over ssh."""

    def __init__(self, machines, *words):
        self.machines = machines
        self.process = subprocess.Popen(
            machines[0].ssh("exec " + shlex.join(map(str, words))),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        self.lines = []
        self.address = ""
        self._has_served = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._has_served.wait(120) and self.address, "\n".join(self.lines)

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if line.startswith("serving"):
                self.address = line.split()[-1]
                self._has_served.set()
        self._has_served.set()

    def wait(self, timeout_s):
        """Wait for the end; returns the exit status."""
        status = self.process.wait(timeout_s)
        self._reader.join(10)
        return status

    def interrupt(self):
        """Send what Ctrl-C sends; returns the exit status."""
        self.machines[0].run("pkill -INT -f '[n]anocp.cli.main serve'")
        return self.wait(60)


def serve_words(machines, checkpoint, num_instances, per_node):
    sizes = ["--instances", num_instances, "--instances-per-node", per_node]
    nanocp = f"{machines[0].home}/nanocp/.venv/bin/nanocp"
    return [
        nanocp,
        "serve",
        checkpoint,
        "--address",
        "auto",
        "--host",
        "0.0.0.0",
        *sizes,
        "--policy",
        "fixed_degree:3",
    ]


def serve(*arguments, **settings):
    """settings: of the environment, as NANOCP_CLUSTER__SPARES without the first part."""
    words = [f"NANOCP_{name}={value}" for name, value in settings.items()]
    return Serve(arguments[0], "env", *words, *serve_words(*arguments))


class Stream:
    """One request in a thread; the constructor returns once its first tokens have come."""

    def __init__(self, address, length, seed, max_tokens):
        self.prompt_ids = [
            (seed * 31 + position * 7 + position * position) % 512 for position in range(length)
        ]
        self.output_ids = []
        self.cp_degree = 0
        self.error = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(address, max_tokens))
        self._thread.start()
        assert self._begun.wait(60)

    def _run(self, address, max_tokens):
        try:
            with Client(address) as client:
                options = {
                    "max_tokens": max_tokens,
                    "temperature": 0.0,
                    "ignore_eos": True,
                    "timeout_s": 120,
                }
                for chunk in client.generate(self.prompt_ids, **options):
                    self.output_ids += chunk.token_ids
                    self._begun.set()
                    if chunk.finish is not None:
                        self.cp_degree = chunk.finish.cp_degree
        except ServiceError as error:
            self.error = error
        self._begun.set()

    def join(self):
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of preset tiny whose experts three or four instances can share."""
    path = tmp_path_factory.mktemp("checkpoints") / "tiny-12"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny-12", PRESETS["tiny"] | {"n_routed_experts": 12})
        make_checkpoint(path, "tiny-12")
    return path


@pytest.fixture
def machines(request, tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    with nodes(request.param, tmp_path / "machines") as machines:
        yield machines


def num_connections(first, second):
    """The number of connections between two machines that have a member at either end."""

    def ends(machine):
        lines = machine.run("ss -Htnp state established").stdout.splitlines()
        return {tuple(line.split()[2:4]) for line in lines if "ray::Member" in line}

    return len(ends(first) & {(peer, local) for local, peer in ends(second)})


def assert_exact(address, checkpoint):
    """Fail unless every token is the reference's, with KV on three instances."""
    oracle = Oracle(checkpoint)
    streams = [
        Stream(address, length, seed, 60)
        for seed, length in enumerate((130, 500, 1000, 2000), start=1)
    ]
    for stream in streams:
        stream.join()
        assert (stream.error, stream.cp_degree, len(stream.output_ids)) == (None, 3, 60)
        assert oracle.judge(stream.prompt_ids, stream.output_ids).exact


def assert_streams_go_on(service, checkpoint, lose):
    """Fail unless every stream that runs at a loss ends with all of its tokens, each right."""
    oracle = Oracle(checkpoint)
    streams = [
        Stream(service.address, length, seed, 250)
        for seed, length in enumerate((130, 500, 1000, 2000), start=1)
    ]
    lost_at = time.monotonic()
    lose()
    for stream in streams:
        stream.join()
    print(f"streams ended {time.monotonic() - lost_at:.1f} s after the loss")
    for stream in streams:
        assert stream.error is None, (stream.error, service.lines[-5:])
        assert len(stream.output_ids) == 250
        assert oracle.judge(stream.prompt_ids, stream.output_ids).exact


def seats(machines):
    """How many instances serve, by the status port."""
    answer = machines[0].run("curl -s http://127.0.0.1:9464/cluster/seats").stdout
    return len(json.loads(answer)["serving"])


def assert_nothing_is_left(machines):
    for machine in machines:
        assert machine.shared_memory() == []
    until_gone(machines, "ray::MemberActor|nanocp.cli.main", 30)


def assert_there_is_no_place_for(machines, *sizes):
    impatient = [
        "env",
        "NANOCP_LIMITS__START_TIMEOUT_MS=3000",
        *map(str, serve_words(machines, *sizes)),
    ]
    answer = machines[0].run(shlex.join(impatient), timeout_s=120)
    assert answer.returncode == 2
    sentence = answer.stderr.splitlines()[-1]
    assert (
        "no place for the instances in 3 s: they need 3 nodes with 2 CPU free each; Ray has"
        in sentence
    )
    assert all(f"{machine.address} (" in sentence for machine in machines)


def until_gone(machines, pattern, limit_s):
    deadline = time.monotonic() + limit_s
    while left := [line for machine in machines for line in machine.processes(pattern)]:
        assert time.monotonic() < deadline, left
        time.sleep(1)


@pytest.mark.parametrize("machines", [2], indirect=True)
def test_two_machines_with_two_instances_each(machines, tmp_path, checkpoint):
    """One cluster uses shared memory within a machine and TCP between two, one stream for each.

    Then a process dies, and at last a machine, whose experts fit the other one.
    """
    cluster = RayCluster(machines, tmp_path)
    settings = {
        "CLUSTER__REDUNDANT_EXPERTS": 3,
        "SERVICE__NODE_STREAMS": "true",
        "SERVICE__LOG_LEVEL": "debug",
    }
    service = serve(machines, checkpoint, 4, 2, **settings)
    assert [len(machine.shared_memory()) for machine in machines] == [2 * (1 + 1 + 3)] * 2
    # For each pair the exchange and the ring of page moves, both ways; and the prefill's rings of
    # two instances.
    assert num_connections(*machines) == 4 * 2 * 2 + 2
    assert_exact(service.address, checkpoint)
    kill_one = "pkill -KILL -n -f ray::MemberActor"
    assert_streams_go_on(service, checkpoint, lambda: machines[1].run(kill_one))
    assert_streams_go_on(service, checkpoint, machines[1].kill)
    assert seats(machines) == 2
    assert service.interrupt() == 0, service.lines
    assert_nothing_is_left(machines[:1])
    cluster.down()
    until_gone(machines[:1], RAY, 20)


@pytest.mark.parametrize("machines", [2], indirect=True)
def test_there_is_no_place_on_two_machines_for_three(machines, tmp_path, checkpoint):
    cluster = RayCluster(machines, tmp_path)
    assert_there_is_no_place_for(machines, checkpoint, 6, 2)
    cluster.down()


@pytest.mark.parametrize("machines", [3], indirect=True)
def test_three_machines_with_an_instance_each(machines, tmp_path, checkpoint):
    """The instances use TCP alone; then a machine falls silent, without a closed connection."""
    cluster = RayCluster(machines, tmp_path)
    service = serve(machines, checkpoint, 3, 1, CLUSTER__REDUNDANT_EXPERTS=2)
    assert [len(machine.shared_memory()) for machine in machines] == [1 + 1 + 2] * 3
    assert num_connections(*machines[1:]) == 2 * 2
    assert_exact(service.address, checkpoint)
    assert_streams_go_on(service, checkpoint, machines[2].unplug)
    assert seats(machines) == 2
    assert service.interrupt() == 0, service.lines
    assert_nothing_is_left(machines[:2])
    cluster.down()
    until_gone(machines[:2], RAY, WORKERS_GONE_S)


@pytest.mark.parametrize("machines", [2], indirect=True)
def test_symmetric_run(machines, checkpoint):
    """Run one command on every machine, without `ray up`."""
    for machine in machines:
        assert machine.run(borrowed_environment(ROOT)).returncode == 0
    where = [
        "--address",
        f"{machines[0].address}:6379",
        "--min-nodes",
        2,
        "--object-store-memory=268435456",
    ]
    words = ["ray", "symmetric-run", *where, "--", *serve_words(machines, checkpoint, 4, 2)]
    with_path = ["env", f"PATH={machines[0].home}/nanocp/.venv/bin:{os.environ['PATH']}"]
    other = [f"PATH={machines[1].home}/nanocp/.venv/bin:{os.environ['PATH']}", *map(str, words)]
    worker = subprocess.Popen(
        machines[1].ssh("exec env " + shlex.join(other)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    service = Serve(machines, *with_path, *words)
    assert_exact(service.address, checkpoint)
    assert service.interrupt() == 0, service.lines
    worker.wait(WORKERS_GONE_S)
    until_gone(machines, RAY, 10)
