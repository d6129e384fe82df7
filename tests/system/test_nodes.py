"""A service over several machines, made of namespaces, with `ray up`; a process or machine dies."""

import json
import os
import re
import shlex
import subprocess
import threading
import time

import pytest

from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.reference.oracle import Oracle
from harness.exact.models import MINI
from harness.gpu_stand_ins import far_nodes
from harness.paths import ROOT
from harness.programs.manifests import GPUS
from harness.programs.manifests import serve_words as serve_words_of
from harness.programs.nodes import nodes, why_not
from harness.services.kit import random_prompt
from nanocp.client import Client, ServiceError
from tests.system.ray_machines import (
    RayCluster,
    Serve,
    borrowed_environment,
    make_checkpoint_of_12,
    serve,
    serve_words,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

RAY = "raylet/raylet|gcs_server"
WORKERS_GONE_S = 90.0
"""`ray down` stops Ray on the head; the other machines stop after a minute without the head."""


class Stream:
    """One request in a thread; the constructor returns once its first tokens have come."""

    def __init__(self, address, length, seed, max_tokens, timeout_s=120):
        self.prompt_ids = random_prompt(length, seed)
        self.output_ids = []
        self.cp_degree = 0
        self.error = None
        self._timeout_s = timeout_s
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(address, max_tokens))
        self._thread.start()
        assert self._begun.wait(60)

    def _run(self, address, max_tokens):
        try:
            with Client(address) as client:
                options = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True,
                           "timeout_s": self._timeout_s}  # fmt: skip
                for chunk in client.generate(self.prompt_ids, **options):
                    self.output_ids += chunk.token_ids
                    self._begun.set()
                    if chunk.finish is not None:
                        self.cp_degree = chunk.finish.cp_degree
        except ServiceError as error:
            self.error = error
        self._begun.set()

    def join(self):
        self._thread.join(self._timeout_s)
        assert not self._thread.is_alive()
        return self


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints") / "tiny-12"
    make_checkpoint_of_12(path)
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


def streams_of(address, max_tokens, timeout_s=120):
    lengths = enumerate((130, 500, 1000, 2000), start=1)
    return [Stream(address, length, seed, max_tokens, timeout_s) for seed, length in lengths]


def assert_exact(address, checkpoint, degree=3):
    """Fail unless every token is the reference's, with KV on so many instances."""
    oracle = Oracle(checkpoint)
    for stream in streams_of(address, 60):
        stream.join()
        assert (stream.error, stream.cp_degree, len(stream.output_ids)) == (None, degree, 60)
        assert oracle.judge(stream.prompt_ids, stream.output_ids).exact


def assert_streams_go_on(service, checkpoint, lose, num_tokens=250, timeout_s=120):
    """Fail unless every stream that runs at a loss ends with all of its tokens, each right."""
    oracle = Oracle(checkpoint)
    streams = streams_of(service.address, num_tokens, timeout_s)
    lost_at = time.monotonic()
    lose()
    assert any(len(stream.output_ids) < num_tokens for stream in streams), "none ran at the loss"
    for stream in streams:
        stream.join()
    print(f"streams ended {time.monotonic() - lost_at:.1f} s after the loss")
    for stream in streams:
        assert stream.error is None, (stream.error, service.lines[-5:])
        assert len(stream.output_ids) == num_tokens
        assert oracle.judge(stream.prompt_ids, stream.output_ids).exact


def seats(machines):
    """How many instances serve, by the status port."""
    answer = machines[0].run("curl -s http://127.0.0.1:9464/cluster/seats").stdout
    return len(json.loads(answer)["serving"])


def assert_nothing_is_left(machines):
    until_gone(machines, f"ray::MemberActor|nanocp.cli.main|{far_nodes.NAME}", 30)
    for machine in machines:
        assert machine.shared_memory() == []


def assert_there_is_no_place_for(machines, *sizes):
    words = ["env", "NANOCP_LIMITS__START_TIMEOUT_MS=3000", *serve_words(machines, *sizes)]
    answer = machines[0].run(shlex.join(map(str, words)), timeout_s=120)
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
def test_two_stages_of_a_prefill_fill_instances_on_two_machines(machines, tmp_path, checkpoint):
    """The stages stand beside the controller; each sends its layers of pages to both machines."""
    cluster = RayCluster(machines, tmp_path)
    service = serve(machines, checkpoint, 2, 1, "fixed_degree:2", PREFILL__STAGES=2)
    stages = [machine.processes("data_plane.prefill.prefill_stage") for machine in machines]
    assert list(map(len, stages)) == [2, 0], stages
    assert_exact(service.address, checkpoint, degree=2)
    assert service.interrupt() == 0, service.lines
    assert_nothing_is_left(machines)
    cluster.down()
    until_gone(machines[:1], RAY, 20)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("machines", [3], indirect=True)
def test_a_pipeline_over_two_machines_goes_on_with_a_third(machines, tmp_path, checkpoint):
    """Layers move between machines by TCP; one dies while they do, and does not come back."""
    cluster = RayCluster(machines, tmp_path)
    settings = {
        "CLUSTER__LAYOUT": "pipeline",
        "LIMITS__START_TIMEOUT_MS": 280_000,
        "LIMITS__RECOVERY_TIMEOUT_MS": 280_000,
    }
    service = serve(machines, checkpoint, 2, 1, "dual_balanced", **settings)

    def layout(split):
        """Ask for it as an operator does."""
        return machines[0].run(f"~/nanocp/.venv/bin/nanocp layout {split}", 300).stdout

    def post(split):
        """Ask for it without the time that a command takes to start."""
        url = "http://127.0.0.1:9464/cluster/layout"
        machines[0].run(f"curl -s -d '{json.dumps({'split': split})}' {url}", 600)

    used = [machine for machine in machines if machine.shared_memory()]
    assert len(used) == 2
    lost = next(machine for machine in used if machine is not machines[0])

    moving = threading.Thread(target=post, args=((1, 3),))

    def lose():
        moving.start()
        time.sleep(0.3)
        lost.kill()

    assert "stage 0 has layers 0 to 2" in layout("3,1")
    # Another actor starts on another machine, and reads its weights.
    assert_streams_go_on(service, checkpoint, lose, num_tokens=600, timeout_s=300)
    moving.join()
    left = [machine for machine in machines if machine is not lost]
    assert all(machine.shared_memory() for machine in left)
    deadline = time.monotonic() + 120
    while "stage 0 has layers 0 to 1" not in layout("2,2"):  # layers may still move to 1,3
        assert time.monotonic() < deadline, service.lines[-5:]
    assert service.interrupt() == 0, service.lines
    assert_nothing_is_left(left)
    cluster.down()
    until_gone(left, RAY, WORKERS_GONE_S)


def in_small(checkpoint, home):
    """The line of deploy/ray-cluster-gpu.yaml for four instances of a small model on two nodes."""
    words = serve_words_of(GPUS)
    begin = words.index("--prefill")
    of_file = [*words[3:begin], *words[begin + 2 :]]
    settings = {
        "data_plane.eager": "true", "data_plane.row_buckets": "[4]", "cluster.bounds.max_links": 4,
        "cluster.bounds.max_attention_rows": 4, "cluster.bounds.max_partials": 4,
        "limits.start_timeout_ms": 280_000, "limits.exchange_timeout_ms": 10_000,
        "limits.plan_timeout_ms": 9_000,
    }  # fmt: skip
    sets = [word for pair in settings.items() for word in ("--set", "{}={}".format(*pair))]
    small = ["--instances", 4, "--instances-per-node", 2, "--num-frames", 8, "--dtype", "float32",
             "--max-model-len", 512, "--max-rows", 4, "--policy", "fixed_degree:4"]  # fmt: skip
    return [f"{home}/nanocp/.venv/bin/nanocp", "serve", checkpoint, *of_file, *small, *sets]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("machines", [2], indirect=True)
def test_the_paper_s_cluster_of_gpus_in_small(machines, tmp_path):
    """`ray up` of the file for GPUs, and its line: FlashMLA, DeepEP, and puts by NVSHMEM.

    Stand-ins take the place of what needs a GPU; what goes between nodes crosses their network. At
    first the second node lacks the driver, has another DeepEP, or is hidden: a sentence, and all
    end.
    """
    make_checkpoint(checkpoint := tmp_path / "mini", "tiny", overrides=MINI | {"vocab_size": 512})
    cluster = RayCluster(machines, tmp_path, GPUS, far_nodes.NAME, num_gpus=2)
    words = in_small(checkpoint, machines[0].home)
    for fault, text, sentence in (
        ("no_driver", "", f"device is cuda: .* torch sees none here, on {machines[1].name}: "),
        ("deep_ep", "2.0.0", r"instance \d has deep_ep 2\.\d\.0, .*: install the same"),
        (
            "hidden",
            "",
            rf".* attached at {machines[1].address}:\d+ in 10000 ms: .*; nodes must reach",
        ),
    ):
        (wrong := machines[1].home / fault).write_text(text)
        refused = machines[0].run(shlex.join(map(str, words)), timeout_s=300)
        assert refused.returncode == 2, refused.stderr[-2000:]
        (said,) = [line for line in refused.stderr.splitlines() if line.startswith("nanocp serve:")]
        assert re.match(rf"nanocp serve: (instance \d|prefill): {sentence}", said), said
        assert_nothing_is_left(machines)
        wrong.unlink()
    service = Serve(machines, *words)
    assert any(line.startswith("exchange: nvshmem, experimental") for line in service.lines)
    assert "dispatch: deep_ep, as configured" in service.lines
    oracle = Oracle(checkpoint)
    for seed, length in enumerate((200, 260, 400)):
        stream = Stream(service.address, length, seed, 6).join()
        assert (stream.error, stream.cp_degree, len(stream.output_ids)) == (None, 4, 6)
        assert oracle.judge(stream.prompt_ids, stream.output_ids).exact
    assert service.interrupt() == 0, service.lines
    assert_nothing_is_left(machines)
    cluster.down()
    until_gone(machines[:1], RAY, 20)


@pytest.mark.parametrize("machines", [2], indirect=True)
def test_symmetric_run(machines, checkpoint):
    """Run one command on every machine, without `ray up`."""
    for machine in machines:
        assert machine.run(borrowed_environment(ROOT)).returncode == 0
    where = [
        "--address", f"{machines[0].address}:6379", "--min-nodes", 2,
        "--object-store-memory=268435456",
    ]  # fmt: skip
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
