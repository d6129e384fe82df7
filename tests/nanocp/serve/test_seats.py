"""`nanocp drain`, `scale` and `upgrade` on services that run: no stream ends, no token is wrong."""

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from typer.testing import CliRunner

from harness.services.hash_service import expected, prompt
from harness.services.kit import greedy
from harness.services.serve_process import SMALL, Serve, Stream, seats, status_of
from harness.waits import until
from nanocp.cli.demo.judge import ReferenceJudge
from nanocp.cli.main import app
from nanocp.serve.process import serving
from nanocp.values.sampling import SamplingParams

REDUNDANT = {"NANOCP_CLUSTER__REDUNDANT_EXPERTS": "5"}
BY_RAY = [word for word in SMALL if word != "--no-ray"]


def command(*words, target):
    done = CliRunner().invoke(app, [*words, "--target", target])
    return done.exit_code, done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize(
    "options", [SMALL, pytest.param(BY_RAY, marks=pytest.mark.system)], ids=["processes", "ray"]
)
def test_instances_leave_and_come_back_while_a_stream_goes_on(options, tmp_path, monkeypatch):
    """At the word of an operator, whom the log names."""
    (tmp_path / "operators").write_text("alice her-key\n")
    monkeypatch.setenv("NANOCP_OPERATOR_KEY", "her-key")
    keys = ["--operator-keys-file", str(tmp_path / "operators")]
    keys += ["--set", "service.public_status=true"]
    with Serve(*options, *keys, factory="build_slow", environment=REDUNDANT) as serve:
        stream = Stream(serve.address, max_tokens=800)
        target = status_of(serve)
        status, said, _ = command("drain", "3", target=target)
        assert (status, said) == (0, ["instances 0, 1, 2 serve"])
        assert command("drain", "3", target=target)[::2] == (
            1,
            "nanocp drain: instance 3 does not serve; 0, 1, 2 do\n",
        )
        now = seats(target)
        assert (now["serving"], now["empty"], now["is_serving"]) == ([0, 1, 2], [3], True)
        status, said, _ = command("scale", "4", target=target)
        assert (status, said) == (0, ["instances 0, 1, 2, 3 serve"])
        status, _, errors = command("drain", "3", "--operator-key", "his-key", target=target)
        assert status == 1 and "asks for an operator's key" in errors
        assert "give --operator-key, or set NANOCP_OPERATOR_KEY" in errors
        stream.join()
        assert (stream.tokens, stream.error) == (expected(prompt(300, 1), 800), "")
        serve.end()
    made = [line.partition(" nanocp.changes: ")[2] for line in serve.lines]
    asked = "by alice at 127.0.0.1: instances"
    assert list(filter(None, made)) == [
        f"change asked for {asked} [0, 1, 2] are to serve",
        "change made: instances [0, 1, 2] are to serve (alice at 127.0.0.1)",
        f"change asked for {asked} [0, 1, 2, 3] are to serve",
        "change made: instances [0, 1, 2, 3] are to serve (alice at 127.0.0.1)",
    ]
    idle = "draining: no request is open, refusing new ones; Ctrl-C again to stop now"
    # It says the load at times, and on a busy machine that members were slow to leave.
    said = [line for line in serve.lines if not re.search("nanocp.load|: killed after", line)]
    assert said[-2:] == [idle, "stopped"]


@pytest.mark.system
@pytest.mark.parametrize("num_spares", [0, 1])
def test_a_rolling_upgrade_of_a_real_service_gives_every_seat_a_new_process(
    tiny_checkpoint, num_spares
):
    settings = {"cluster.redundant_experts": 2, "cluster.num_frames": 64}
    settings |= {"cluster.max_model_len": 2048, "cluster.spares": num_spares}
    flags = {"ray": False, "synthetic_kv": False}
    with serving(tiny_checkpoint, 4, settings, **flags) as service, ThreadPoolExecutor(6) as pool:
        target = f"127.0.0.1:{service.metrics_port}"
        until(lambda: seats(target)["ready_spares"] == num_spares)
        spares = spare_pids(service.pid)
        before = service.instance_pids()
        prompts = [prompt(length, length) for length in (1, 64, 130, 300, 511, 700)]
        outputs = [
            pool.submit(greedy, service.target, ids, 900 if number == 0 else 300, timeout_s=600)
            for number, ids in enumerate(prompts)
        ]
        status, said, errors = command("upgrade", "--rolling", target=target)
        assert status == 0, errors
        assert said == [
            line
            for seat in range(4)
            for line in (f"instances {others(seat)} serve", "instances 0, 1, 2, 3 serve")
        ]
        judge = ReferenceJudge(tiny_checkpoint)
        for prompt_ids, output in zip(prompts, outputs, strict=True):
            token_ids = output.result(600)
            params = SamplingParams(max_tokens=len(token_ids), temperature=0.0)
            assert judge.first_wrong(prompt_ids, params, token_ids)[0] is None
        after = service.instance_pids()
        assert len(after) == 4 and not {*before} & {*after}
        assert not {*spares} & {*after}, "a spare of the old program took a seat"
        attempts = service.metrics()["nanocp:request_attempts_total", ""]
        assert (attempts, service.frames_not_back()) == (0, 0)
        assert service.stop() == 0


def others(seat):
    return ", ".join(str(each) for each in range(4) if each != seat)


def spare_pids(parent):
    children = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(parent)], capture_output=True, text=True
    )
    words = map(str.split, children.stdout.splitlines())
    return [int(each[0]) for each in words if each[-2] == "spare"]
