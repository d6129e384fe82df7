"""A decode pool behind the vLLM that people run: vLLM, its NixlConnector and its proxy unmodified.

Needs the environments that `make .venv-vllm/.installed .vllm-sources/.fetched` makes, or others
named in NANOCP_VLLM_PYTHON and NANOCP_VLLM_SOURCES.
"""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

import httpx
import pytest

from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.reference.oracle import Oracle
from harness.exact.settings import configured
from harness.paths import ROOT
from harness.programs.installed import vllm_python
from harness.services.hash_service import CONFIG, process_launcher
from harness.vllm.vllm_server import NixlPrefill, ToyProxy
from harness.waits import until
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.serve.service import Service, open_checkpoint

pytestmark = [pytest.mark.system, pytest.mark.timeout(1500)]

NUM_TOKENS = 16
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 66, 127, 128, 129, 200, 700, 2000)
"""Around edges of blocks of 16 and 128 tokens, and of pages."""
MODELS = {
    "latent": ("tiny", {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "CPU_MLA"),
    "heads": ("tiny-qwen3-moe", {"head_dim": 32}, "CPU_ATTN"),
}


@pytest.fixture(scope="module")
def sources():
    folder = os.environ.get("NANOCP_VLLM_SOURCES", str(ROOT / ".vllm-sources"))
    if not os.path.isdir(folder):
        pytest.skip("no sources of vLLM: run make .vllm-sources/.fetched")
    return folder


class Pool:
    """vLLM as a prefill, a service that pulls, and the proxy before both."""

    def __init__(self, kind, python, sources, folder, lease_s=30):
        preset, overrides, attention = MODELS[kind]
        self.checkpoint = folder / "checkpoint"
        make_checkpoint(self.checkpoint, preset, overrides=overrides)
        self.oracle = Oracle(self.checkpoint)
        self.lease_s = lease_s
        self._folder, self._python, self._sources = folder, python, sources
        self.prefill = NixlPrefill(
            python, self.checkpoint, folder / "vllm.log", attention=attention, lease_s=lease_s,
            more=("--served-model-name", "tale", "--max-model-len", "2304"),
        )  # fmt: skip

    def __enter__(self):
        self.prefill.start()
        self.prefill.wait()
        return self

    def __exit__(self, *_):
        self.prefill.kill()

    @contextmanager
    def service(self, policy="fixed_degree:2", on_failure="fail", num_frames=128, **settings):
        size = {"num_instances": 2, "num_frames": num_frames, "max_model_len": 2304}
        config = configured(
            CONFIG, cluster=ClusterConfig(**size, bounds=BoundsConfig(max_rows=16)), policy=policy,
            allowed=("127.0.0.0/8",), on_failure=on_failure, lease_s=self.lease_s, dtype="float32",
            served_model_name="tale", **settings,
        )  # fmt: skip
        service = Service(config, open_checkpoint(config, self.checkpoint), process_launcher())
        with ExitStack() as held:
            held.callback(service.stop)
            service.start(lambda step: None)
            prefill = self.prefill.url.removeprefix("http://")
            yield (
                service,
                held.enter_context(
                    ToyProxy(
                        self._python, self._sources, self._folder, prefill, service.http_address
                    )
                ),
            )

    def leg_one(self, ids):
        """The first of a router's two calls."""
        body = {
            "model": "tale", "prompt": ids, "max_tokens": 1, "temperature": 0,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }  # fmt: skip
        answer = httpx.post(f"{self.prefill.url}/v1/completions", json=body, timeout=300)
        return answer.json()["kv_transfer_params"]

    def until_all_free(self):
        """vLLM notes freed blocks as it steps: at the latest with another request."""

        def is_free():
            if self.prefill.sample("vllm:kv_cache_usage_perc"):
                httpx.post(
                    f"{self.prefill.url}/v1/completions",
                    json={"model": "tale", "prompt": [5], "max_tokens": 1}, timeout=300,
                )  # fmt: skip
                time.sleep(0.2)
            return self.prefill.sample("vllm:kv_cache_usage_perc") == 0

        until(is_free)


def prompts_of(lengths, seed=0):
    chosen = random.Random(seed)
    return [[chosen.randrange(2, 500) for _ in range(length)] for length in lengths]


def asked(url, ids, params=None, max_tokens=NUM_TOKENS, timeout=300):
    body = {
        "model": "tale", "prompt": ids, "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    if params is not None:
        body["kv_transfer_params"] = params
    return httpx.post(f"{url}/v1/completions", json=body, timeout=timeout)


def tokens_of(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


@pytest.fixture(scope="module", params=MODELS)
def pool(request, sources, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    with Pool(request.param, vllm_python(), sources, folder) as pool:
        yield pool


def test_behind_the_proxy_every_token_is_that_of_transformers(pool):
    for policy in ("fixed_degree:2", "fixed_degree:1"):
        with pool.service(policy) as (service, proxy), ThreadPoolExecutor(4) as threads:
            prompts = prompts_of(LENGTHS)
            answers = list(threads.map(partial(asked, proxy.url), prompts))
            for ids, answer in zip(prompts, answers, strict=True):
                assert pool.oracle.judge(ids, tokens_of(answer)).exact, len(ids)
            assert sum(row["done"] for row in service.metrics.engines.rows()) == len(LENGTHS) - 1
            pool.until_all_free()
            body = {
                "model": "tale", "messages": [{"role": "user", "content": "Tell me a tale."}],
                "max_tokens": 8, "temperature": 0, "stream": True,
            }  # fmt: skip
            chat = httpx.post(f"{proxy.url}/v1/chat/completions", json=body, timeout=300)
            assert chat.status_code == 200 and "[DONE]" in chat.text
            pool.until_all_free()
