"""Real vLLM servers for the CPU, in process groups of their own, and vLLM's proxy before them."""

import contextlib
import json
import os
import signal
import subprocess
import tarfile
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
            *self._transfer(module),
            *(("--api-key", api_key) if api_key else ()),
            *more,
        ]
        self._log = log
        self._environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}"}
        self.process: subprocess.Popen | None = None

    def _transfer(self, module):
        return [
            *("--kv-transfer-config.kv_connector", "NanocpConnector"),
            *("--kv-transfer-config.kv_connector_module_path", module),
            *("--kv-transfer-config.kv_role", "kv_producer"),
        ]

    def start(self):
        """Start it and return at once; see `wait`."""
        environment = {
            **os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            **self._environment,
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


class NixlPrefill(VllmServer):
    """An unmodified vLLM that computes prompts for whoever reads its memory by NIXL."""

    def __init__(self, *arguments, lease_s=30, **options):
        self._lease_s = lease_s
        super().__init__(*arguments, **options)
        self.side_port = free_port()
        self._environment = {
            "PYTHONPATH": "", "UCX_TLS": "tcp,sm", "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_port),
        }  # fmt: skip

    def _transfer(self, module):
        fields = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_producer",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"kv_lease_duration": self._lease_s},
        }
        return ["--kv-transfer-config", json.dumps(fields)]

    def sample(self, name):
        """A value of its metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


class ToyProxy:
    """The proxy of vLLM's own tests, unmodified: it asks a prefill, and then a decoder."""

    def __init__(self, python, sources, folder, prefill, decoder):
        """sources: the folder with vLLM's sources, packed. prefill, decoder: host:port."""
        name = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"
        (packed,) = Path(sources).glob("vllm-*.tar.gz")
        program = folder / "toy_proxy_server.py"
        with tarfile.open(packed) as archive:
            member = f"{packed.name.removesuffix('.tar.gz')}/{name}"
            program.write_bytes(archive.extractfile(member).read())
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        words = [python, str(program), "--port", str(port)]
        for kind, address in (("prefiller", prefill), ("decoder", decoder)):
            host, _, port = address.rpartition(":")
            words += [f"--{kind}-hosts", host, f"--{kind}-ports", port]
        self._log = folder / "proxy.log"
        self._process = subprocess.Popen(
            words, stdout=self._log.open("ab"), stderr=subprocess.STDOUT
        )

    def __enter__(self):
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/healthcheck"):
                return self
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            assert time.monotonic() < deadline, "the proxy does not start"
            time.sleep(0.2)

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
