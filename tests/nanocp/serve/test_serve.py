"""`nanocp serve` from its command line: signals, deaths, and a sentence for every mistake."""

import ctypes
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time

import pytest
from rich.console import Console

from control_plane.launchers.ray_actors import RayLauncher, _describe_ray_error
from harness.paths import ROOT
from harness.programs.imports import assert_not_imported
from harness.services.hash_service import expected, generate, prompt
from harness.services.serve_process import (
    ENVIRONMENT,
    IDLE_WAKES_PER_S,
    NANOCP,
    SMALL,
    WAIT_S,
    Serve,
    Stream,
    assert_nothing_is_left,
    descendants,
    instances_of,
    nanocp,
    wakes_and_cpu_s,
)
from harness.waits import until
from nanocp.cli.serve.serve import _start, _warn_of_open_ports
from nanocp.config.service import ServiceConfig
from nanocp.values.members import PREFILL, Member

TWO = [*SMALL, "--instances", "2"]
SYS_TGKILL = 234
"""Linux's number on x86-64; Python has no function that chooses a thread of another process."""


def test_an_idle_service_rests_and_wakes():
    """Wakes are counted: how long one of them takes is the machine's affair."""
    with Serve(*TWO) as serve:
        assert generate(serve.address, prompt(70, 1), 5) == expected(prompt(70, 1), 5)
        processes = [serve.process.pid, *descendants(serve.process.pid)]
        for _ in range(20):  # what the request left to do may fall into the first ones
            before = [wakes_and_cpu_s(pid) for pid in processes]
            began = time.monotonic()
            time.sleep(1)
            after = [wakes_and_cpu_s(pid) for pid in processes]
            lasted_s = time.monotonic() - began
            wakes_per_s, busy = (
                [(last[i] - first[i]) / lasted_s for first, last in zip(before, after, strict=True)]
                for i in range(2)
            )
            is_idle = 0 < min(wakes_per_s) <= max(wakes_per_s) < IDLE_WAKES_PER_S
            if is_idle := is_idle and max(busy) < 0.1:
                break
        assert is_idle, (wakes_per_s, busy)
        assert generate(serve.address, prompt(300, 2), 5) == expected(prompt(300, 2), 5)


def replay(log):
    status, output, _ = nanocp("simulate", "replay", str(log), "--json")
    return status, json.loads(output)


@pytest.mark.parametrize(("number", "front_ends"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_signal_drains_and_exits_0(number, front_ends, tmp_path):
    """The last front end is asked; two are processes. The event log replays byte for byte."""
    options = ["--front-ends", str(front_ends), "--event-log", str(tmp_path / "log")]
    with Serve(*TWO, *options, factory="build_slow") as serve:
        stream = Stream(serve.address, max_tokens=400)
        members, segments = serve.processes()
        serve.end(number)
        stream.join()
        assert (stream.tokens, stream.error) == (expected(prompt(300, 1), 400), "")
        assert len(members) == (3 if front_ends == 1 else 5)
        assert_nothing_is_left(members, segments, num_instances=2)
        begins = "draining: finishing 1 request, refusing new ones"
        assert any(line.startswith(begins) for line in serve.lines), serve.lines
    status, played = replay(tmp_path / "log")
    found = status, played["difference"], played["failure"], played["is_truncated"]
    assert found == (0, None, "", False)
    assert played["num_requests"] == 1 and played["num_windows"] >= 100


def test_a_signal_that_another_thread_gets_drains_too():
    """The kernel chooses the thread."""
    with Serve(*TWO) as serve:
        assert serve.address
        pid = serve.process.pid
        _, other, *_ = sorted(int(thread) for thread in os.listdir(f"/proc/{pid}/task"))
        ctypes.CDLL(None).syscall(SYS_TGKILL, pid, other, int(signal.SIGTERM))
        assert serve.wait(WAIT_S) == 0, serve.lines


def test_a_second_signal_does_not_wait_for_running_requests():
    with Serve(*TWO, factory="build_slow") as serve:
        stream = Stream(serve.address, max_tokens=1700)
        members, segments = serve.processes()
        serve.process.send_signal(signal.SIGINT)
        serve.says("draining")
        serve.process.send_signal(signal.SIGINT)
        assert serve.wait() == 1
        stream.join()
        assert "the service is stopping" in stream.error
        assert 0 < len(stream.tokens) < 1700
        assert "1 request cut off" in serve.lines
        assert_nothing_is_left(members, segments, num_instances=2)


NO_RECOVERY = {"NANOCP_LIMITS__RECOVERY_TIMEOUT_MS": "0", "NANOCP_LIMITS__SUSPECT_MS": "3000"}


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.system)],
    ids=lambda each: each.name,
)
def test_an_instance_lost_in_mid_run_is_replaced_and_the_stream_goes_on(number):
    with Serve(*SMALL, factory="build_slow") as serve:
        stream = Stream(serve.address, max_tokens=400)
        lost = instances_of(descendants(serve.process.pid))[0]
        os.kill(lost, number)
        serve.says("another process takes its place")
        stream.join()
        assert (stream.tokens, stream.error) == (expected(prompt(300, 1), 400), "")
        back = "term 2 serves with instance 0, instance 1, instance 2, instance 3"
        until(lambda: any(line.endswith(back) for line in serve.lines))
        processes, segments = serve.processes()
        assert lost not in processes and len(processes) == 5
        serve.end()
        assert_nothing_is_left(processes, segments)


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.system)],
    ids=lambda each: each.name,
)
def test_without_recovery_a_lost_instance_ends_the_service_in_the_stated_time(number, tmp_path):
    """The event log of a lost cluster replays to its end."""
    documented = (ROOT / "docs/develop/architecture.md").read_text()
    words = " ".join(documented.split())
    limit_s = int(re.search(r"at the first loss, within (\d+) seconds", words)[1])
    options = ["--event-log", str(tmp_path / "log")]
    with Serve(*TWO, *options, factory="build_slow", environment=NO_RECOVERY) as serve:
        stream = Stream(serve.address, max_tokens=1700)
        members, segments = serve.processes()
        began_s = time.monotonic()
        os.kill(instances_of(members)[0], number)
        assert serve.wait() == 1
        assert time.monotonic() - began_s < limit_s
        stream.join()
        assert "was lost" in stream.error
        assert any(re.match(r"nanocp serve: instance \d: ", line) for line in serve.lines), (
            serve.lines
        )
        assert_nothing_is_left(members, segments, num_instances=2)
    assert '"ClusterLost"' in (tmp_path / "log").read_text()
    assert replay(tmp_path / "log")[0] == 0


def test_an_instance_that_dies_at_start_is_quoted():
    with Serve(*TWO, factory="build_dying") as serve:
        assert serve.refusal() == (
            "nanocp serve: instance 1: layer 3 of the checkpoint is made of cheese; it must be "
            "made of numbers"
        )


@pytest.mark.parametrize(("host", "settings", "warning"), [
    ("127.0.0.1", {}, ""),
    ("0.0.0.0", {}, "whoever reaches this machine may use the service, and drain and scale it"),
    ("::", {"api_keys": ("a key",)}, "nobody may read the status port, or drain and scale"),
    ("0.0.0.0", {"api_keys": ("a",), "operator_keys_file": "/keys"}, ""),
])  # fmt: skip
def test_open_ports_without_keys_are_warned_of(host, settings, warning, caplog):
    _warn_of_open_ports(ServiceConfig(host=host, **settings))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * bool(warning)
    assert warning in caplog.text


@pytest.mark.parametrize("name", ["grpc", "metrics"])
def test_a_port_in_use_is_named(name):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with Serve(*TWO, f"--{name}-port", str(port)) as serve:
            assert f"port {port} of 127.0.0.1" in serve.refusal()


@pytest.mark.parametrize(("options", "environment", "sentence"), [
    (["--policy", "dual_balancd"], {}, "dual_balanced"),
    (["--instances", "0"], {}, "num_instances is 0; it must be at least 1"),
    (["--config", "no-such-file.yaml"], {}, "no-such-file.yaml does not exist"),
    ([], {"NANOCP_CLUSTER__NUM_INSTANCE": "2"}, "did you mean 'num_instances'?"),
    (["--grpc-port", "70000"], {}, "grpc_port is 70000"),
    (["--address", "auto"], {}, "--address names a Ray cluster"),
    (["--event-log", "/proc/log"], {},
     "the event log /proc/log cannot be written: No such file or directory"),
    (["--policy", "fluid"], {}, "only `nanocp simulate` knows; use cost_aware"),
])  # fmt: skip
def test_a_mistake_is_one_sentence(options, environment, sentence):
    with Serve(*TWO, *options, environment=environment) as serve:
        assert sentence in serve.refusal()


def test_a_start_that_keys_refuse_leaves_no_event_log(tmp_path):
    keys, log = tmp_path / "keys", tmp_path / "log"
    keys.write_text("")
    with Serve(*TWO, "--operator-keys-file", str(keys), "--event-log", str(log)) as serve:
        assert str(keys) in serve.refusal()
    assert not log.exists()


@pytest.mark.parametrize(("config", "sentence"), [
    pytest.param("{}", "the architecture is none", marks=pytest.mark.system),
    ('{"architectures": ["GptOssForCausalLM"]}', "DeepseekV3ForCausalLM"),
    (None, "config.json"),
    pytest.param("{", "config.json", marks=pytest.mark.system),
])  # fmt: skip
def test_a_checkpoint_that_cannot_be_served_is_refused_before_anything_starts(
    tmp_path, config, sentence
):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    # Torch reads a model's configuration.
    command = ["serve", str(tmp_path), *SMALL]
    status, output, errors = nanocp(*command, imports=["data_plane.model.config"])
    assert (status, output) == (2, "")
    assert errors.startswith("nanocp serve: ") and sentence in errors, errors


@pytest.mark.system
def test_an_instance_that_cannot_load_its_share_is_one_sentence(tmp_path, tiny_checkpoint):
    shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    weights = tmp_path / "checkpoint" / "model.safetensors"
    weights.write_bytes(
        weights.read_bytes().replace(b"experts.15.down_proj", b"experts.15.dawn_proj", 1)
    )
    command = [*NANOCP, "serve", str(tmp_path / "checkpoint"), *SMALL]
    result = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert result.returncode == 2
    errors = [line for line in result.stderr.splitlines() if "experts.15" in line]
    assert len(errors) == 1 and errors[0].startswith("nanocp serve: "), result.stderr
    assert "WARNING" not in result.stderr and "Traceback" not in result.stderr


def test_an_actor_that_died_is_one_sentence():
    """Ray's own text has a dozen lines."""
    from ray.core.generated.common_pb2 import ActorDiedErrorContext
    from ray.exceptions import ActorDiedError

    died = "its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: ..."
    context = ActorDiedErrorContext(
        error_message=f"The actor is dead because {died}", actor_id=b"1" * 16
    )
    said = _describe_ray_error(ActorDiedError(context))
    assert said == "its process has died: it was killed, or it crashed"
    assert _describe_ray_error(ValueError("no room\nat all")) == "ValueError: no room"


@pytest.mark.system
def test_every_line_is_json_also_when_ray_loses_an_actor():
    options = [word for word in SMALL if word != "--no-ray"]
    with Serve(*options, "--log-format", "json", factory="build_slow") as serve:
        assert serve.address
        os.kill(instances_of(descendants(serve.process.pid))[0], signal.SIGKILL)
        serve.says("term 2 serves")
        serve.end()
    said = [json.loads(line)["message"] for line in serve.lines]
    assert any("its process has died: it was killed" in one for one in said), said


def test_a_ray_that_does_not_start_is_a_sentence(monkeypatch):
    tries = []

    def init(**_):
        tries.append(0)
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("ray.init", init)
    with pytest.raises(
        RuntimeError, match=r"Ray does not start: The current node timed out during startup\."
    ):
        RayLauncher(None, None, {}).start({}, lambda name, how: None)
    assert len(tries) == 3, "Ray's own limit is short on a busy machine"


def test_a_demo_without_a_checkpoint_is_a_sentence(tmp_path):
    status, _, errors = nanocp("demo", str(tmp_path))
    assert status == 2
    assert errors.startswith(f"nanocp demo: {tmp_path / 'tokenizer.json'} is missing; "), errors


def test_help_imports_nothing_heavy():
    program = (
        "import sys; sys.argv = ['nanocp', '--help']\n"
        "from nanocp.cli.main import app\n"
        "try: app()\n"
        "except SystemExit: pass\n"
    )
    heavy = ("torch", "ray", "grpc", "transformers")
    assert_not_imported(program, *heavy, stdout=subprocess.DEVNULL)


def test_processes_without_a_model_import_nothing_heavy():
    """The suite starts some hundreds of them."""
    program = (
        "import data_plane.programs.process\n"
        "import harness.services.hash_members, harness.transports.transport_processes\n"
    )
    assert_not_imported(program, "torch", "ray", "transformers", env=ENVIRONMENT)


def test_a_terminal_shows_a_bar_for_each_members_weights():
    first = Member("instance", 0)

    class Starting:
        def start(self, progress, loading):
            progress("starting 2 processes")
            for member, percent in ((first, 10), (PREFILL, 5), (first, 45)):
                loading(member, percent)
            return {first: ("choice",)}

    shown = {}
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100)
        assert _start(Starting(), console) == {first: ("choice",)}
        shown[is_terminal] = console.file.getvalue()
    assert re.search(
        r"starting 2 processes.*instance 0: weights.* 45%.*prefill: weights.* 5%",
        shown[True],
        re.DOTALL,
    )
    assert shown[False] == ""
