"""A decode pool behind the vLLM that people run: vLLM, its NixlConnector and its proxy unmodified.

Needs the environments that `make .venv-vllm/.installed .vllm-sources/.fetched` makes, or others
named in NANOCP_VLLM_PYTHON and NANOCP_VLLM_SOURCES.
"""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial

import httpx
import pytest

from data_plane.model.make_checkpoint import make_checkpoint
from data_plane.reference.oracle import Oracle
from harness.exact.settings import configured
from harness.paths import ROOT
from harness.programs.installed import vllm_python
from harness.services.hash_service import CONFIG, process_launcher
from harness.services.service_recovery import sample
from harness.vllm.vllm_server import NixlPrefill, ToyProxy
from harness.waits import until
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.serve.service import Service, open_checkpoint
from nanocp.values.members import Member

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

    def __init__(self, kind, python, sources, folder, lease_s=30, more=()):
        preset, overrides, attention = MODELS[kind]
        self.checkpoint = folder / "checkpoint"
        make_checkpoint(self.checkpoint, preset, overrides=overrides)
        self.oracle = Oracle(self.checkpoint)
        self.lease_s = lease_s
        self._folder, self._python, self._sources = folder, python, sources
        self.prefill = NixlPrefill(
            python, self.checkpoint, folder / "vllm.log", attention=attention, lease_s=lease_s,
            more=("--served-model-name", "tale", "--max-model-len", "2304", *more),
        )  # fmt: skip

    def __enter__(self):
        self.prefill.start()
        self.prefill.wait()
        return self

    def __exit__(self, *_):
        self.prefill.kill()

    @contextmanager
    def service(
        self, policy="fixed_degree:2", on_failure="fail", num_frames=128, reader="", **settings
    ):
        """A service that pulls, and the proxy. reader: another factory of the puller's."""
        settings = {"lease_s": self.lease_s, **settings}
        size = {"num_instances": 2, "num_frames": num_frames, "max_model_len": 2304}
        config = configured(
            CONFIG, cluster=ClusterConfig(**size, bounds=BoundsConfig(max_rows=16)), policy=policy,
            allowed=("127.0.0.0/8",), on_failure=on_failure, dtype="float32",
            served_model_name="tale", **settings,
        )  # fmt: skip
        served = open_checkpoint(config, self.checkpoint)
        served = replace(served, reader_factory=reader or served.reader_factory)
        service = Service(config, served, process_launcher())
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


def asked(url, ids, params=None, max_tokens=NUM_TOKENS, **more):
    body = {
        "model": "tale", "prompt": ids, "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, **more,
    }  # fmt: skip
    if params is not None:
        body["kv_transfer_params"] = params
    return httpx.post(f"{url}/v1/completions", json=body, timeout=300)


def tokens_of(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


@pytest.fixture(scope="module", params=MODELS)
def pool(request, sources, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    # What no notification frees stays for longer than a test waits, also on a machine that stalls.
    with Pool(request.param, vllm_python(), sources, folder, lease_s=300) as pool:
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


def url_of(service):
    return f"http://{service.http_address}"


def goes_away(url, ids, params, after_s):
    """A client that reads a stream for a while."""
    body = {
        "model": "tale", "prompt": ids, "max_tokens": 100, "temperature": 0, "ignore_eos": True,
        "stream": True, "kv_transfer_params": params,
    }  # fmt: skip
    until_s = time.monotonic() + after_s
    timeout = httpx.Timeout(60, read=max(after_s, 0.001))
    with (
        suppress(httpx.ReadTimeout),
        httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=timeout) as answer,
    ):
        for _ in answer.iter_raw():
            if time.monotonic() > until_s:
                return


def test_200_clients_that_go_away_at_any_time_leave_no_block_and_none_expires(pool):
    chosen = random.Random(3)
    # Few frames: some wait in the queue.
    with pool.service(num_frames=40) as (service, _), ThreadPoolExecutor(6) as threads:

        def one(seed):
            (ids,) = prompts_of([chosen.choice([20, 200, 1500])], seed)
            params, after_s = pool.leg_one(ids), chosen.choice([0, 0.005, 0.05, 0.3, 2])
            goes_away(url_of(service), ids, params, after_s)

        for begin in range(0, 200, 20):
            list(threads.map(one, range(begin, begin + 20)))
            pool.until_all_free()
        assert pool.prefill.sample("vllm:nixl_num_kv_expired_reqs") == 0
        until(lambda: num_free(service) == 2 * 40)


def num_free(service):
    return sum(sample(service, "frames_free", engine=engine) for engine in "01")


@pytest.fixture(scope="module")
def short_lease(sources, tmp_path_factory):
    """A prefill with few blocks, which it soon uses again, and a lease of 6 s."""
    folder = tmp_path_factory.mktemp("short")
    more = ("--num-gpu-blocks-override", "160", "--no-enable-prefix-caching")
    with Pool("latent", vllm_python(), sources, folder, lease_s=6, more=more) as pool:
        yield pool


def wait_in_queue(pool, service, wait_s):
    """Answers to prompts that wait so long behind others, while the prefill goes on."""
    with ThreadPoolExecutor(9) as threads:
        until_s = time.monotonic() + wait_s

        def fill():
            while time.monotonic() < until_s:
                # It needs all frames, and no KV.
                assert tokens_of(asked(url_of(service), [5], None, 1300, priority=-1))

        ahead = [threads.submit(fill) for _ in range(2)]
        until(lambda: sample(service, "num_requests_waiting") == 1)
        waiting = prompts_of([300, 301, 302], 5)
        params = [pool.leg_one(ids) for ids in waiting]
        answers = [
            threads.submit(asked, url_of(service), *each)
            for each in zip(waiting, params, strict=True)
        ]
        seed = 100
        while time.monotonic() < until_s:
            (ids,) = prompts_of([1500], seed := seed + 1)
            body = {"model": "tale", "prompt": ids, "max_tokens": 1}
            httpx.post(f"{pool.prefill.url}/v1/completions", json=body, timeout=300)
            assert not any(answer.done() for answer in answers)
        for each in ahead:
            each.result()
        return list(zip(waiting, [answer.result() for answer in answers], strict=True))


QUEUED = {"num_frames": 11, "max_overtake_us": 10**9}
UNAWARE = {**QUEUED, "lease_s": 600}
"""A service that believes in a lease of 600 s: no heartbeat comes in time, and it reads later."""


def test_heartbeats_keep_the_blocks_of_requests_that_wait_for_40_s(short_lease):
    with short_lease.service(**QUEUED) as (service, _):
        for ids, answer in wait_in_queue(short_lease, service, 40):
            assert short_lease.oracle.judge(ids, tokens_of(answer)).exact
        short_lease.until_all_free()


@pytest.mark.parametrize("on_failure", ["fail", "recompute"])
def test_without_heartbeats_requests_that_wait_give_no_wrong_token(short_lease, on_failure):
    with short_lease.service(on_failure=on_failure, **UNAWARE) as (service, _):
        for ids, answer in wait_in_queue(short_lease, service, 40):
            if on_failure == "fail":
                assert answer.status_code == 503 and "other KV than the prompt's" in answer.text
            else:
                assert short_lease.oracle.judge(ids, tokens_of(answer)).exact


def test_without_heartbeats_and_without_the_check_tokens_are_wrong(short_lease):
    """The control: the prefill has used the blocks again."""
    reader = "harness.vllm.careless_reader:build_reader"
    with short_lease.service(reader=reader, **UNAWARE) as (service, _):
        found = wait_in_queue(short_lease, service, 40)
        assert not all(short_lease.oracle.judge(ids, tokens_of(each)).exact for ids, each in found)


@pytest.mark.parametrize("lost", ["instance 1", "puller", "prefill"])
def test_a_process_is_killed_in_mid_read_ten_times_and_nothing_stays_held(pool, lost):
    chosen = random.Random(len(lost))
    impatient = {"exchange_timeout_ms": 3000, "plan_timeout_ms": 2500}
    with (
        pool.service(on_failure="recompute", **impatient) as (service, _),
        ThreadPoolExecutor(4) as threads,
    ):
        for turn in range(10):
            prompts = prompts_of([2000, 1500, 900, 70], turn + 1000)
            params = [pool.leg_one(ids) for ids in prompts]
            answers = [
                threads.submit(asked, url_of(service), *each)
                for each in zip(prompts, params, strict=True)
            ]
            time.sleep(chosen.choice([0.005, 0.02, 0.05, 0.1]))  # nothing is waited for
            if lost == "prefill":
                pool.prefill.kill()
            else:
                service.launcher.kill(Member.named(lost))
            for ids, answer in zip(prompts, answers, strict=True):
                assert pool.oracle.judge(ids, tokens_of(answer.result())).exact, len(ids)
            if lost == "prefill":
                pool.prefill.start()
                pool.prefill.wait()
            until(lambda: num_free(service) == 2 * 128)
        pool.until_all_free()
