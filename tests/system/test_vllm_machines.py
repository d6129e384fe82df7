"""The commands of deploy/'s files for prefill by vLLM, as processes, without images or a cluster.

Kubernetes: the engine is on a machine of its own, made of namespaces (root), so that pages go by
TCP or NIXL. Compose: both are on this machine, and pages go through shared memory.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
import yaml

from control_plane.launchers.processes import ProcessLauncher
from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.reference.oracle import Oracle
from data_plane.transport.nixl.pages import nixl_package
from harness.exact.settings import configured
from harness.paths import ROOT
from harness.programs.installed import vllm_python
from harness.programs.nodes import GATEWAY, NETWORK, nodes, why_not
from harness.services.hash_service import CONFIG
from harness.services.kit import greedy, started
from harness.services.serve_process import ENVIRONMENT, NANOCP
from nanocp.config.cluster import ClusterConfig
from nanocp.serve.process import free_port
from nanocp.serve.service import Service, open_checkpoint

pytestmark = [pytest.mark.system, pytest.mark.timeout(1500)]

DEPLOY = ROOT / "deploy"
START_S = 600
WIDTHS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
ON_CPU = ["--enforce-eager", "--attention-backend=CPU_MLA", "--max-model-len=2048"]
OVER_THE_LINK = {"UCX_TLS": "tcp", "UCX_TCP_BRIDGE_ENABLE": "y"}
"""For NIXL: UCX takes machines of one kernel for one machine, and leaves their bridge out."""
VLLM_ENVIRONMENT = {
    **OVER_THE_LINK, "PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip


@pytest.fixture(scope="module")
def vllm():
    """The words that begin a server's command line."""
    return [vllm_python(), "-m", "vllm.entrypoints.openai.api_server", *ON_CPU]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(folder, "tiny", overrides=WIDTHS)
    return folder


@contextlib.contextmanager
def running(command, log, environment=None):
    """A process group, ended on exit."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def until_healthy(url, process, log):
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(1)


@pytest.fixture(scope="module")
def engine_of_kubernetes(vllm, checkpoint, tmp_path_factory):
    """The container's arguments, on another machine; its network is that of the namespaces."""
    if reason := why_not():
        pytest.skip(reason)
    manifest, _ = yaml.safe_load_all((DEPLOY / "k8s/prefill.yaml").read_text())
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    text = "\n".join(container["args"])
    text = text.replace("/checkpoints/model", str(checkpoint))
    text = text.replace("allowed=10.0.0.0/8", f"allowed={NETWORK}.0/24")
    assert f"{NETWORK}.0/24" in text and str(checkpoint) in text
    folder = tmp_path_factory.mktemp("machines")
    with nodes(1, folder / "nodes") as (node,):
        words = [f"{name}={value}" for name, value in VLLM_ENVIRONMENT.items()]
        line = shlex.join(["exec", "env", *words, *vllm, *text.splitlines()])
        log = folder / "vllm.log"
        with running(node.ssh(line), log) as process:
            url = f"http://{node.address}:{container['ports'][0]['containerPort']}"
            until_healthy(url, process, log)
            yield url


@pytest.mark.parametrize("page_backend", ["auto", "nixl"])
def test_pages_of_an_engine_on_another_machine_are_exact(
    engine_of_kubernetes, checkpoint, page_backend
):
    if page_backend == "nixl" and not nixl_package():
        pytest.skip("NIXL is not installed: pip install '.[nixl]'")
    config = configured(
        CONFIG, cluster=ClusterConfig(num_instances=2, num_frames=64, max_model_len=1200),
        page_backend=page_backend, engines=(engine_of_kubernetes,), host=GATEWAY,
    )  # fmt: skip
    launcher = ProcessLauncher(
        [sys.executable, "-m", "data_plane.programs.process"], ENVIRONMENT | OVER_THE_LINK
    )
    oracle = Oracle(checkpoint)
    with started(Service(config, open_checkpoint(config, checkpoint), launcher)) as service:
        for length in (2, 65, 700):
            ids = [7 + number % 400 for number in range(length)]
            tokens = greedy(service.address, ids, 12, timeout_s=300)
            verdict = oracle.judge(ids, tokens)
            assert len(tokens) == 12 and verdict.exact, f"{length} tokens: {verdict}"


def test_the_commands_of_the_compose_file_serve(vllm, checkpoint, tmp_path):
    services = yaml.safe_load((DEPLOY / "compose.prefill.yaml").read_text())["services"]
    port = free_port()

    def here(words):
        joined = "\n".join(words).replace("/checkpoints/model", str(checkpoint))
        return joined.replace("8741", str(port)).splitlines()

    log = tmp_path / "vllm.log"
    environment = {**os.environ, **VLLM_ENVIRONMENT}
    with running([*vllm, *here(services["vllm"]["command"])], log, environment) as engine:
        until_healthy(f"http://127.0.0.1:{port}", engine, log)
        nanocp, *words = here(services["nanocp"]["command"])
        ports = {name: free_port() for name in ("grpc-port", "http-port", "metrics-port")}
        words += [f"--{name}={number}" for name, number in ports.items()]
        words += ["--no-ray", "--instances=1"]
        environment = ENVIRONMENT | services["nanocp"]["environment"]
        log = tmp_path / "nanocp.log"
        with running([*NANOCP, *words], log, environment) as service:
            url = f"http://127.0.0.1:{ports['http-port']}"
            until_healthy(url, service, log)
            body = {"prompt": [5] * 200, "max_tokens": 8, "ignore_eos": True}
            request = urllib.request.Request(
                f"{url}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=300) as reply:
                usage = json.loads(reply.read())["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (200, 8)
    assert nanocp == "nanocp"
