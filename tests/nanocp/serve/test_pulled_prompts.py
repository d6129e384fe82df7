"""A service that decodes what an engine has computed: its KV is read by real NIXL.

The engine is a stand-in of vLLM's side, in a process of its own, with the checkpoint's real KV.
"""

import contextlib
import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from harness.exact.settings import configured
from harness.services.hash_service import CONFIG, forked_service
from harness.services.kit import random_prompt, started
from harness.services.service_recovery import sample
from harness.vllm.nixl_engine import NixlEngine
from harness.waits import WAIT_S, until
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.serve.service import open_checkpoint
from nanocp.values.members import Member

NUM_TOKENS = 6
EDGES = (1, 2, 16, 17, 63, 64, 65, 66, 128, 129, 300)


@contextlib.contextmanager
def pulled(checkpoint, num_frames=64, policy="fixed_degree:2", **settings):
    """A service over this checkpoint that pulls, and the address of its HTTP API."""
    size = {"num_instances": 2, "num_frames": num_frames, "max_model_len": 1024}
    settings = {"dtype": "float32", "allowed": ("127.0.0.0/8",), **settings}
    config = configured(
        CONFIG, cluster=ClusterConfig(**size, bounds=BoundsConfig(max_rows=16)), policy=policy,
        **settings,
    )  # fmt: skip
    with started(forked_service(config, open_checkpoint(config, checkpoint))) as service:
        yield service


def asked(service, ids, params, max_tokens=NUM_TOKENS, **more):
    """The second of a router's two calls."""
    body = {
        "prompt": ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "kv_transfer_params": params, **more,
    }  # fmt: skip
    url = f"http://{service.http_address}/v1/completions"
    return httpx.post(url, json=body, timeout=WAIT_S)


def tokens_of(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def assert_exact(service, engine, oracle, prompts):
    """All at once."""
    params = [engine.prefill(ids) for ids in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(partial(asked, service), prompts, params))
    for ids, answer in zip(prompts, answers, strict=True):
        assert oracle.judge(ids, tokens_of(answer)).exact, len(ids)


def until_all_free(engine, num_blocks=128):
    until(lambda: engine.free_blocks() == num_blocks)


def num_read(service):
    return sum(engine["done"] for engine in service.metrics.engines.rows())


def pages_read(service, engine):
    return sample(service, "prefill_pages_total", url=f"127.0.0.1:{engine.port}")


@pytest.mark.parametrize(("policy", "block_size"), [("fixed_degree:2", 16), ("fixed_degree:1", 64)])
def test_every_token_is_right_and_every_block_is_freed(
    tiny_checkpoint, tiny_oracle, policy, block_size
):
    with (
        NixlEngine(tiny_checkpoint, block_size=block_size) as engine,
        pulled(tiny_checkpoint, policy=policy, on_failure="fail") as service,
    ):
        for seed in range(2):  # The second time all full pages are shared.
            prompts = [random_prompt(length, length) for length in EDGES]
            assert_exact(service, engine, tiny_oracle, prompts)
            until_all_free(engine)
            if not seed:
                until(lambda: num_read(service) >= len(EDGES) - 1)
        # Without the parameters, or with blocks that are gone, nothing computes the prompt.
        answer = asked(service, random_prompt(90, 1), None)
        assert answer.status_code == 400 and "kv_transfer_params is absent" in answer.text


def test_a_second_prompt_with_the_same_beginning_reads_only_missing_pages(
    tiny_checkpoint, tiny_oracle
):
    with (
        NixlEngine(tiny_checkpoint) as engine,
        pulled(tiny_checkpoint, on_failure="fail") as service,
    ):
        begin = random_prompt(200, 1)
        for ids, num_pages in ((begin, 4), ([*begin[:150], *random_prompt(60, 2)], 4 + 2)):
            assert_exact(service, engine, tiny_oracle, [ids])
            until(lambda num=num_pages: pages_read(service, engine) == num)
        # Of a prompt of whole pages and one token nothing is missing.
        assert_exact(service, engine, tiny_oracle, [begin[:129]])
        until_all_free(engine)
        assert pages_read(service, engine) == 6
        answer = asked(service, begin, {**engine.prefill(begin), "remote_prefill_cached_tokens": 9})
        assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 192}


def test_requests_wait_in_the_queue_and_their_blocks_are_kept(tiny_checkpoint, tiny_oracle):
    with (
        NixlEngine(tiny_checkpoint, lease_s=3.0) as engine,
        pulled(tiny_checkpoint, lease_s=3, num_frames=4, on_failure="fail") as service,
        ThreadPoolExecutor(9) as pool,
    ):
        long = pool.submit(asked, service, ids := random_prompt(300, 1), engine.prefill(ids), 150)
        until(lambda: engine.free_blocks() == 128)
        waiting = [random_prompt(200, seed) for seed in range(2, 5)]
        answers = [pool.submit(asked, service, each, engine.prefill(each)) for each in waiting]
        for each, answer in zip(waiting, answers, strict=True):
            assert tiny_oracle.judge(each, tokens_of(answer.result())).exact
        assert tokens_of(long.result())
        until_all_free(engine)
        assert engine.heartbeats()


def test_blocks_that_the_engine_has_used_again_give_no_token(tiny_checkpoint, tiny_oracle):
    with NixlEngine(tiny_checkpoint) as engine:
        with pulled(tiny_checkpoint, on_failure="fail") as service:
            for seed in range(3):
                params = engine.prefill(ids := random_prompt(200, seed))
                engine.expire(params["remote_request_id"])
                engine.overwrite(params["remote_block_ids"][0][-2:])
                answer = asked(service, ids, params)
                assert answer.status_code == 503 and "other KV than the prompt's" in answer.text
            answer = asked(service, random_prompt(200, 7), engine.prefill(random_prompt(200, 8)))
            assert answer.status_code == 503
            until_all_free(engine)
        with pulled(tiny_checkpoint) as service:
            params = engine.prefill(ids := random_prompt(200, 9))
            engine.overwrite(params["remote_block_ids"][0][-1:])
            answer = asked(service, ids, params)
            assert tiny_oracle.judge(ids, tokens_of(answer)).exact, "it was computed here"
            # A prompt without parameters is computed as ever.
            answer = asked(service, ids := random_prompt(70, 3), None)
            assert tiny_oracle.judge(ids, tokens_of(answer)).exact
            until_all_free(engine)


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"remote_block_ids": [[1, 2, 500, 4, 5, 6, 7, 8]]}, 400, "remote_block_ids must be"),
        ({"remote_block_ids": [[1]]}, 400, "remote_block_ids has 1 blocks"),
        ({"remote_engine_id": "another"}, 400, "remote_engine_id is 'another'"),
        ({"remote_host": "192.0.2.1"}, 400, "prefill.pull.allowed"),
        ({"remote_host": "localhost.invalid"}, 503, "does not resolve"),
        ({"transfer_mode": "push"}, 400, "must be pull"),
        ({"remote_num_tokens": 60}, 503, "its tokenizer or chat template differs"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_read_ends_by_name(refusing, change, status, words):
    engine, service = refusing
    params = engine.prefill(ids := random_prompt(120, 1))
    answer = asked(service, ids, {**params, **change})
    assert answer.status_code == status and words in answer.text, answer.text
    if "remote_host" in change or "remote_engine_id" in change:
        engine.expire(params["remote_request_id"])  # Nobody could tell it.
    until_all_free(engine)
    until(lambda: sample(service, "frames_free", engine="0") == 64)


@pytest.fixture(scope="module")
def refusing(models):
    checkpoint = models("tiny").path
    with (
        NixlEngine(checkpoint) as engine,
        pulled(checkpoint, on_failure="fail") as service,
    ):
        yield engine, service


def test_an_engine_with_another_layout_is_refused_and_its_blocks_are_freed(tiny_checkpoint):
    with (
        NixlEngine(tiny_checkpoint, dtype="bfloat16") as engine,
        pulled(tiny_checkpoint) as service,
    ):
        answer = asked(service, ids := random_prompt(90, 1), engine.prefill(ids))
        assert answer.status_code == 400 and "block_lens of the engine's handshake" in answer.text


def aborted(service, ids, params, after_s):
    """The client reads for a while, and goes away."""
    body = {
        "prompt": ids, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True,
        "kv_transfer_params": params,
    }  # fmt: skip
    url, until_s = f"http://{service.http_address}/v1/completions", time.monotonic() + after_s
    with contextlib.suppress(httpx.ReadTimeout):
        limits = httpx.Timeout(WAIT_S, read=max(after_s, 0.001))
        with httpx.stream("POST", url, json=body, timeout=limits) as answer:
            for _ in answer.iter_raw():
                if time.monotonic() > until_s:
                    return


def test_clients_that_go_away_at_any_time_leave_no_block_held(tiny_checkpoint):
    chosen = random.Random(5)
    with (
        NixlEngine(tiny_checkpoint, num_blocks=512) as engine,
        pulled(tiny_checkpoint, num_frames=12, on_failure="fail") as service,
        ThreadPoolExecutor(6) as pool,
    ):
        running = []
        for seed in range(40):
            ids = random_prompt(chosen.choice([20, 90, 300]), seed)
            after_s = chosen.choice([0, 0.002, 0.02, 0.1, 0.3])
            running.append(pool.submit(aborted, service, ids, engine.prefill(ids), after_s))
        for each in running:
            each.result()
        until_all_free(engine, 512)
        until(lambda: sample(service, "frames_free", engine="0") == 12)


@pytest.mark.parametrize("lost", ["puller", "instance 0", "engine"])
def test_a_process_is_killed_while_prompts_are_read(tiny_checkpoint, tiny_oracle, lost):
    with (
        NixlEngine(tiny_checkpoint) as engine,
        pulled(tiny_checkpoint, exchange_timeout_ms=3000, plan_timeout_ms=2500) as service,
        ThreadPoolExecutor(8) as pool,
    ):
        assert_exact(service, engine, tiny_oracle, [random_prompt(100, 99)])
        prompts = [random_prompt(300, seed) for seed in range(6)]
        params = [engine.prefill(ids) for ids in prompts]
        answers = [
            pool.submit(asked, service, *each, 20) for each in zip(prompts, params, strict=True)
        ]
        if lost == "engine":
            engine.kill()
        else:
            service.launcher.kill(Member.named(lost))
        for ids, answer in zip(prompts, answers, strict=True):
            assert tiny_oracle.judge(ids, tokens_of(answer.result())).exact
        if lost != "engine":
            assert_exact(service, engine, tiny_oracle, [random_prompt(100, 98)])
            until_all_free(engine)
        until(lambda: sample(service, "frames_free", engine="1") == 64)
