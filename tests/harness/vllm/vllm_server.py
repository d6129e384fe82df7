"""A real vLLM server for the CPU, in a process group of its own, with NanoCP's connector."""

import contextlib
import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

from harness.paths import ROOT, TESTS
from harness.services.serve_process import descendants
from nanocp.serve.process import free_port

START_S = 400
"""The longest start seen on two busy cores was 150 s."""


class VllmServer:
    """Started on entry; `start` again after a death, on the same port."""

    def __init__(
        self, python: str, checkpoint: Path, log: Path, module="nanocp.connectors.vllm",
        dtype="float32", api_key="", attention="CPU_MLA", more=(),
    ):  # fmt: skip
        """more: options of its command line."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [
            *(python, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(checkpoint), "--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", dtype, "--max-model-len", "2048", "--max-num-seqs", "16"),
            *("--enforce-eager", "--attention-backend", attention),
            *("--kv-transfer-config.kv_connector", "NanocpConnector"),
            *("--kv-transfer-config.kv_connector_module_path", module),
            *("--kv-transfer-config.kv_role", "kv_producer"),
            *(("--api-key", api_key) if api_key else ()),
            *more,
        ]
        self._log = log
        self.process: subprocess.Popen | None = None

    def start(self):
        """Start it and return at once; see `wait`."""
        environment = {
            **os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        self.process = subprocess.Popen(
            self._command, env=environment, stdout=self._log.open("ab"), stderr=subprocess.STDOUT,
            cwd=self._log.parent, start_new_session=True,
        )  # fmt: skip

    def wait(self):
        """Return once it answers."""
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health"):
                return
            assert self.process.poll() is None, self._log.read_text()[-3000:]
            assert time.monotonic() < deadline, f"vLLM does not start: {self._log}"
            time.sleep(0.5)

    def kill_worker(self):
        """End the process that has the weights, as the system's memory killer would."""
        *_, worker = sorted(
            (pid for pid in descendants(self.process.pid)),
            key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]),
        )
        os.kill(worker, signal.SIGKILL)

    def kill(self):
        """End every process of it."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()
