"""Commands and examples of README, the quick start and docs/use/api.md, run as they are printed."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.paths import ROOT
from nanocp.serve.process import serving

DOCUMENTS = ("README.md", "docs/use/quick-start.md", "docs/use/api.md")
WAIT_S = 900
"""Longest time of a command; they take seconds on a machine that is not busy."""
ASKS = r"curl |nanocp (generate|batch|why|top|bench serve) "
"""What asks the service that the documents have started."""
STARTS = r"nanocp serve "
"""What starts one: its flags are read, and its configuration printed."""
SLOW = r"nanocp (simulate|profile|make-checkpoint|plan)\b"
"""Run in `make test-system`."""
NOT_RUN = {
    "source .venv/bin/activate": "the environment of this test",
    "git clone REPOSITORY nanocp && cd nanocp": "a placeholder",
    "make demo": ".ci/run does",
    "make test": "this is it",
    "nanocp generate --tls --ca": "a placeholder; tests/control_plane/frontend has TLS",
    "nanocp simulate replay LOG": "a placeholder", "nanocp simulate --plots DIR": "a placeholder",
    "nanocp simulate sweep": "minutes",
    "nanocp batch -i requests.jsonl -o answers.jsonl --base": "the same with another file",
    "nanocp batch -i requests.jsonl -o answers.jsonl --resume": "the same with another file",
    "grpcurl ": "a program that may be absent",
}  # fmt: skip
"""Begin of a command -> why it is not run."""


def blocks(document, kind):
    return re.findall(rf"^```{kind}\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S)


def commands(document):
    """Each command of the bash blocks; one may take several lines."""
    for block in blocks(document, "bash"):
        command = ""
        for line in block.splitlines():
            command += line + "\n"
            try:
                words = shlex.split(command, comments=True)
            except ValueError:  # a quotation goes on
                continue
            if words and not line.endswith("\\"):
                yield command.strip()
                command = ""
            elif not words:
                command = ""
        assert not command, f"{document}: {command}"


def ran_as(command):
    """Where a command is run; `` for one that nobody knows."""
    if any(command.startswith(begin) for begin in NOT_RUN):
        return "not run"
    kinds = (("asks", ASKS), ("starts", STARTS), ("slow", SLOW))
    return next((kind for kind, pattern in kinds if re.match(pattern, command + " ")), "")


ALL = [(document, command) for document in DOCUMENTS for command in commands(document)]


def test_every_command_is_run_or_it_is_said_why_not():
    unknown = [(document, command) for document, command in ALL if not ran_as(command)]
    assert not unknown
    unused = [begin for begin in NOT_RUN if not any(c.startswith(begin) for _, c in ALL)]
    assert not unused
    assert len([command for _, command in ALL if ran_as(command) == "asks"]) > 15


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder that has what the repository has, and may be written to."""
    folder = tmp_path_factory.mktemp("documents")
    for name in ("models", "docs", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture(scope="module")
def service(folder):
    """What the quick start serves, without Ray, and on ports that are free."""
    (started,) = {
        command.partition("#")[0].strip()
        for _, command in ALL
        if ran_as(command) == "starts" and "--num-frames" in command
    }
    words = shlex.split(started, comments=True)
    number, flags = words.index("--instances"), words[3:]
    del flags[number - 3 : number - 1]
    options = {"ray": False, "synthetic_kv": False, "http": True}
    with serving(Path(words[2]), int(words[number + 1]), {}, *flags, **options) as service:
        yield service


def with_ports(text, service):
    """The text, with the ports that the service has in place of the default ones."""
    for default, port in ((8000, service.http_port), (9464, service.metrics_port)):
        text = text.replace(f"127.0.0.1:{default}", f"127.0.0.1:{port}")
    return text.replace("127.0.0.1:50051", service.target)


def run(command, folder):
    """The command's output; it must succeed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "200", "HOME": str(folder)}
    environment |= {"J": "Content-Type: application/json", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 0, (command, done.stdout[-500:], done.stderr[-1000:])
    return done.stdout


def asked(command, service, folder):
    """What a command that asks the service prints; where it would ask is added."""
    status, grpc = f"127.0.0.1:{service.metrics_port}", service.target
    command = re.sub(r"\s+# .*$", "", command)
    if "127.0.0.1" not in command:
        if re.match("nanocp (why|top)", command):
            command += f" --target {status}"
        elif command.startswith("nanocp generate"):
            command += f" --target {grpc}"
        elif "--backend grpc" in command:
            command += f" --port {grpc.rpartition(':')[2]}"
        elif command.startswith("nanocp bench"):
            command += f" --port {service.http_port}"
        else:
            command += f" --base-url http://127.0.0.1:{service.http_port}"
    if command.startswith("nanocp top"):
        command += " --once"
    return run(with_ports(command, service), folder)


def python(block, service):
    """What an example prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(with_ports(block, service), "example", "exec"), {})
    return said.getvalue()


@pytest.mark.system
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_asks_a_service_runs_as_printed(document, service, folder):
    """The examples first: the quick start asks for their requests afterwards."""
    said = [python(block, service) for block in blocks(document, "python")]
    answers = []
    for command in commands(document):
        if ran_as(command) == "asks":
            answers.append(asked(command, service, folder))
            assert '"error":{' not in answers[-1], (command, answers[-1])
    text = (ROOT / document).read_text()
    if document == "docs/use/quick-start.md":
        # Which instances have it, and how many pages, depends on what was asked before.
        finish = r"cp_degree=[2-4], moe_binding=\d, kv_split=\(\(\d, \d+\), \(.*?\)\)"
        why = r"split because an instance has 64 frames, and it needs \d+"
        for shown, pattern in ((said[-1], finish), ("".join(answers), why)):
            assert re.search(pattern, shown), f"no long prompt on several instances: {shown}"
            assert re.search(pattern, " ".join(text.split()))
    if document == "docs/use/api.md":
        assert any("'weather'" in one for one in said), "the model called the tool"
        (tokens,) = [json.loads(a)["tokens"] for a in answers if '"token_strs":[' in a]
        assert f'"tokens":{json.dumps(tokens, separators=(",", ":"))}' in text


@pytest.mark.parametrize(
    "command", sorted({c for _, c in ALL if ran_as(c) == "starts" and "--config" not in c})
)
def test_what_starts_a_service_has_flags_that_there_are(command, folder):
    assert "num_instances" in run(f"{command.partition('#')[0]} --print-config", folder)


@pytest.mark.system
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("document", ("README.md", "docs/use/quick-start.md"))
def test_slow_commands_run_as_printed(document, folder):
    for command in commands(document):
        if ran_as(command) == "slow":
            run(command, folder)
