"""OpenAI's API of a whole service: exact tokens, freed frames, no request that makes it fail."""

import asyncio
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import hypothesis
import hypothesis.strategies as st
import openai
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode

from control_plane.frontend.text.tokenizer import load_tokenizer
from control_plane.frontend.validation import ModelLimits
from harness.services.frontend_fakes import TOKENIZER
from harness.services.hash_members import WORDY
from harness.services.hash_service import CONFIG, forked_service
from harness.services.kit import started
from harness.services.serve_process import Serve
from nanocp.config.cluster import ClusterConfig
from nanocp.serve.service import Served, open_checkpoint
from nanocp.values.sampling import SamplingParams

WAIT_S = 60.0
NUM_FRAMES = CONFIG.cluster.num_instances * CONFIG.cluster.num_frames


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint folder without weights, with a chat template."""
    folder = tmp_path_factory.mktemp("words")
    TOKENIZER._tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def service(folder):
    limits = ModelLimits(WORDY.vocab_size, 256, (1,))
    served = Served(
        limits, load_tokenizer(folder), folder, "harness.services.hash_members:build_wordy",
        "harness.services.hash_members:build_prefill",
    )  # fmt: skip
    config = replace(CONFIG, service=replace(CONFIG.service, served_model_name="wordy"))
    with started(forked_service(config, served)) as service:
        yield service


def base_url(service):
    return f"http://{service.http_address}/v1"


def gauge(service, name):
    page = httpx.get(f"http://{service.http_address}/metrics").text
    return sum(
        float(value)
        for value in re.findall(rf"^nanocp:{name}(?:{{.*}})? (.*)$", page, re.MULTILINE)
    )


def assert_everything_comes_back(service):
    """No request is left, and every frame is free, within a moment."""
    deadline = time.monotonic() + WAIT_S
    while True:
        left = {
            name: gauge(service, name)
            for name in ("num_requests_running", "num_requests_waiting", "frames_free")
        }
        if left == {
            "num_requests_running": 0,
            "num_requests_waiting": 0,
            "frames_free": NUM_FRAMES,
        }:
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_the_official_client_gets_exact_tokens_from_many_requests_at_once(service):
    async def run():
        async with openai.AsyncOpenAI(
            base_url=base_url(service), api_key="EMPTY", timeout=WAIT_S
        ) as client:
            prompts = [
                [(seed * 31 + i * 7) % 300 for i in range(20 + seed * 9)] for seed in range(12)
            ]
            extra = {"return_token_ids": True, "ignore_eos": True}
            options = {"model": "wordy", "max_tokens": 40, "temperature": 0, "seed": 1,
                       "extra_body": extra}  # fmt: skip
            answers = await asyncio.gather(
                *(client.completions.create(prompt=prompt, **options) for prompt in prompts[:6]),
                *(
                    client.completions.create(prompt=prompt, stream=True, **options)
                    for prompt in prompts[6:]
                ),
            )
            outputs = [answer.choices[0].token_ids for answer in answers[:6]]
            for stream in answers[6:]:
                outputs.append(
                    [token_id async for chunk in stream for token_id in chunk.choices[0].token_ids]
                )
            return prompts, outputs

    prompts, outputs = asyncio.run(run())
    params = SamplingParams(max_tokens=40, temperature=0.0, seed=1)
    # A HashInstance's tokens depend on the request's number, and which came first is not known.
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output == WORDY.generate(prompt, params), prompt
    assert_everything_comes_back(service)


def test_frames_of_clients_that_go_away_come_back(service):
    def leave(number):
        body = {
            "model": "wordy", "prompt": [5] * 64, "max_tokens": 190, "n": 2,
            "stream": number % 2 == 0,
        }  # fmt: skip
        timeout = httpx.Timeout(WAIT_S, read=0.02 + number * 0.01)
        try:
            with httpx.stream(
                "POST", f"{base_url(service)}/completions", json=body, timeout=timeout
            ) as response:
                next(response.iter_bytes())
                return response.status_code
        except httpx.ReadTimeout:
            return None

    before = gauge(service, "request_success_total")
    with ThreadPoolExecutor(10) as pool:
        assert set(pool.map(leave, range(20))) <= {200, None}
    assert_everything_comes_back(service)
    assert gauge(service, "request_success_total") > before


def test_answers_are_counted_by_endpoint_and_by_no_word_of_a_client(service):
    for method, path in (
        ("GET", "/v1/models/wordy"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/responses"),
        ("GET", "/made/up"),
        ("GET", "/x"),
        ("HEAD", "/ready"),
    ):
        httpx.request(method, f"http://{service.http_address}{path}")
    page = httpx.get(f"http://{service.http_address}/metrics").text
    counts = dict(re.findall(r"^nanocp:http_requests_total{(.*)} (.*)$", page, re.MULTILINE))
    assert float(counts['handler="/v1/models/{name:path}",method="GET",status="2xx"']) >= 1
    for path in ("/v1/completions", "/v1/messages", "/v1/responses"):
        assert float(counts[f'handler="{path}",method="POST",status="4xx"']) >= 1
    assert float(counts['handler="none",method="GET",status="4xx"']) >= 2
    assert float(counts['handler="/ready",method="HEAD",status="2xx"']) >= 1


def test_a_second_service_on_the_port_is_one_sentence(service):
    port = service.http_address.split(":")[1]
    options = ["--no-ray", "--grpc-port", "0", "--metrics-port", "0", "--http-port", port]
    with Serve(*options) as second:
        assert second.wait(150) == 2
    assert second.lines[-1] == (
        f"nanocp serve: cannot listen on port {port} of 127.0.0.1: Address already in use "
        "(service.http_port)"
    )


def fuzz(service, max_examples):
    """Requests to every operation of the service's own OpenAPI document are answered well."""
    schema = schemathesis.openapi.from_url(f"http://{service.http_address}/openapi.json")
    schema.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    statuses = {}
    for result in schema.get_all_operations():
        operation = result.ok()

        @hypothesis.settings(
            max_examples=max_examples,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy(), is_for_us=st.booleans())
        def run(case, is_for_us):
            if is_for_us and isinstance(case.body, dict):
                case.body.pop("model", None)
            response = case.call(timeout=WAIT_S)
            statuses.setdefault(case.operation.label, set()).add(response.status_code)
            # 504 is right where a queue_timeout_ms is drawn that a busy machine exceeds.
            if response.status_code != 504:
                case.validate_response(response, checks=[not_a_server_error])
            if response.status_code >= 400:
                error = response.json()["error"]
                assert error["message"] and error["type"]
                if "messages" not in case.operation.label:
                    words = ("context_length_exceeded", "previous_response_not_found")
                    assert error["code"] in (response.status_code, *words)

        run()
    return statuses


def test_no_request_makes_the_service_fail(service):
    statuses = fuzz(service, 10)
    assert len(statuses) == 18 and {200, 400} <= set().union(*statuses.values())
    assert_everything_comes_back(service)


@pytest.mark.system
@pytest.mark.timeout(1800)
def test_nor_does_any_of_very_many(service):
    statuses = fuzz(service, 500)
    print(statuses)
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert {200, 400} <= statuses[f"POST {path}"]
    assert_everything_comes_back(service)


def test_a_real_model_chats_as_transformers_would(tiny_checkpoint, tiny_oracle):
    config = replace(
        CONFIG, cluster=ClusterConfig(num_instances=2, instances_per_node=2, max_model_len=512)
    )
    service = forked_service(config, open_checkpoint(config, tiny_checkpoint))
    try:
        service.start(lambda step: None)
        with openai.OpenAI(base_url=base_url(service), api_key="EMPTY", timeout=WAIT_S) as client:
            (model,) = client.models.list().data
            messages = [
                {"role": "user", "content": "Once upon a time there was a long prompt. " * 8}
            ]
            options = {"model": model.id, "messages": messages, "temperature": 0, "max_tokens": 12}
            extra = {"return_token_ids": True, "ignore_eos": True}
            answer = client.chat.completions.create(
                **options, logprobs=True, top_logprobs=2, extra_body=extra
            )
            stream = client.chat.completions.create(**options, stream=True, extra_body=extra)
            (choice,) = answer.choices
            assert (
                "".join(chunk.choices[0].delta.content for chunk in stream)
                == choice.message.content
            )
            assert tiny_oracle.judge(answer.prompt_token_ids, choice.token_ids).exact
            logits = tiny_oracle.logits(answer.prompt_token_ids, choice.token_ids)
            for logprob, token_id, row in zip(
                choice.logprobs.content, choice.token_ids, logits, strict=True
            ):
                expected = row.log_softmax(-1)
                assert len(logprob.top_logprobs) == 2
                assert logprob.logprob == pytest.approx(float(expected[token_id]), abs=1e-3)
            text = client.completions.create(
                model=model.id, prompt=answer.prompt_token_ids, max_tokens=1, echo=True
            )
            assert text.choices[0].text.startswith("<bos>user: Once upon a time")
    finally:
        service.stop()
