"""A Ray cluster of machines made of namespaces (nodes.py), and `nanocp serve` on it."""

import os
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import patch

import yaml

from data_plane.model.make_checkpoint import PRESETS, make_checkpoint
from harness.paths import ROOT
from harness.programs.manifests import ON_PREMISES

BIN = Path(sys.executable).parent


def make_checkpoint_of_12(path):
    """Write a checkpoint of preset tiny whose experts three or four instances can share."""
    with patch.dict(PRESETS, {"tiny-12": PRESETS["tiny"] | {"n_routed_experts": 12}}):
        make_checkpoint(path, "tiny-12")


class RayCluster:
    """A running Ray cluster of these machines, made by a file of deploy/."""

    def __init__(self, machines, folder, file=ON_PREMISES, program="nanocp.cli.main", num_gpus=0):
        """program: the module that is `nanocp` there. num_gpus: of each, which no driver shows."""
        self.machines = machines
        self._file = folder / "ray-cluster.yaml"
        self._environment = {**os.environ, "HOME": str(folder), "RAY_TMPDIR": str(folder / "ray")}
        config = yaml.safe_load(file.read_text())
        config["provider"].update(
            head_ip=machines[0].address, worker_ips=[node.address for node in machines[1:]]
        )
        config["min_workers"] = config["max_workers"] = len(machines) - 1
        config["auth"] = {"ssh_user": "root", "ssh_private_key": str(folder / "machines" / "key")}
        config["file_mounts"] = {"~/nanocp": str(ROOT)}
        # An environment that exists already stands in for what is installed.
        *installs, path = config["setup_commands"]
        assert "cd ~/nanocp && make setup" in installs and "make" not in path
        config["setup_commands"] = [borrowed_environment("$HOME/nanocp", program), path]
        if num_gpus:
            for name in ("head_start_ray_commands", "worker_start_ray_commands"):
                stop, start = config[name]
                config[name] = [stop, start.replace("start ", f"start --num-gpus={num_gpus} ")]
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


def borrowed_environment(code, program="nanocp.cli.main"):
    """A shell's command line that makes ~/nanocp/.venv of this environment's commands.

    code: the folder whose code they run. program: see RayCluster.
    """
    lines = ["mkdir -p ~/nanocp/.venv/bin && cd ~/nanocp/.venv/bin"]
    for name in ("python", "ray", "nanocp"):
        start = f"{BIN}/python -m {program}" if name == "nanocp" else BIN / name
        text = f'#!/bin/sh\nPYTHONPATH={code}:{code}/tests exec {start} "$@"\n'
        lines.append(f"printf %s {shlex.quote(text)} > {name} && chmod +x {name}")
    return " && ".join(lines)


class Serve:
    """`nanocp serve` on the head, over ssh."""

    def __init__(self, machines, *words):
        self.machines = machines
        self.process = subprocess.Popen(
            machines[0].ssh("exec " + shlex.join(map(str, words))), stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.lines = []
        self.address = ""
        self._has_served = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._has_served.wait(300) and self.address, "\n".join(self.lines)

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
        self.machines[0].run("pkill -INT -f -- '-m [a-z_.]* serve '")
        return self.wait(120)


def serve_words(machines, checkpoint, num_instances, per_node, policy="fixed_degree:3"):
    sizes = ["--instances", num_instances, "--instances-per-node", per_node]
    nanocp = f"{machines[0].home}/nanocp/.venv/bin/nanocp"
    return [
        nanocp, "serve", checkpoint, "--address", "auto", "--host", "0.0.0.0", *sizes, "--policy",
        policy,
    ]  # fmt: skip


def serve(*arguments, **settings):
    """settings: of the environment, as NANOCP_CLUSTER__SPARES without the first part."""
    words = [f"NANOCP_{name}={value}" for name, value in settings.items()]
    return Serve(arguments[0], "env", *words, *serve_words(*arguments))
