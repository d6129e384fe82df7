"""`nanocp bench serve` against both APIs: what it sends, what it counts, vLLM's block and keys."""

import asyncio
import itertools
import json
import math
import time
from functools import partial

import pytest
from aiohttp import web

from harness.exact.settings import configured
from harness.programs.command_line import nanocp
from harness.programs.web_server import web_server
from harness.services.hash_service import CONFIG, hash_service
from nanocp.bench import report
from nanocp.bench.backends import OpenAIBackend, RequestOutput
from nanocp.bench.dataset import SampleRequest
from nanocp.bench.load import due_times, send_all

bench = partial(nanocp, "bench", "serve", "--disable-tqdm")


def output(start_s, ttft_s, itl_s, **others):
    values = {
        "success": True,
        "output_len": 1 + len(itl_s),
        "latency_s": ttft_s + sum(itl_s),
    } | others
    return RequestOutput(10, start_s, ttft_s=ttft_s, itl_s=list(itl_s), **values)


# --- when


def test_gaps_fill_the_time_exactly_and_burstiness_bunches_them():
    requests = [SampleRequest((1,), 1, 1)] * 400
    poisson, bursty, even = (
        due_times(requests, 20.0, shape, 0, False) for shape in (1.0, 0.1, math.inf)
    )
    assert poisson[-1] == bursty[-1] == even[-1] == pytest.approx(20.0) and poisson == sorted(
        poisson
    )
    shortest = [
        sum(b - a < 0.005 for a, b in itertools.pairwise(times))
        for times in (even, poisson, bursty)
    ]
    assert shortest[0] == 0 < shortest[1] < shortest[2] / 4
    assert set(due_times(requests, math.inf, 1.0, 0, False)) == {0.0}


class SlowBackend:
    """Counts how many requests it has at a time."""

    def __init__(self):
        self.now = self.most = 0

    async def send(self, request, request_id):
        self.now += 1
        self.most = max(self.most, self.now)
        sent = output(time.perf_counter(), 0.01, ())
        await asyncio.sleep(0.02)
        self.now -= 1
        return sent


def test_no_more_requests_than_allowed_are_out_at_a_time():
    backend, requests, ended = SlowBackend(), [SampleRequest((1,), 1, 1)] * 12, []
    outputs, took_s = asyncio.run(
        send_all(backend, requests, [0.0] * 12, 3, "x", lambda: ended.append(1))
    )
    assert backend.most == 3 and len(outputs) == len(ended) == 12 and took_s >= 4 * 0.02
    assert outputs[-1].client_queue_s - outputs[0].client_queue_s > 3 * 0.02 - 0.01


# --- numbers


def test_numbers_are_those_of_vllm():
    outputs = [
        output(100.0, 0.5, (0.1, 0.1, 0.4)),
        output(100.5, 1.0, (0.2,), output_len=5),
        output(101.7, 0.3, (), output_len=1),
        RequestOutput(10, 100.0, error="no"),
    ]
    values = report.result(
        outputs, 2.0, {"ttft": 600, "tpot": 250}, list(report.METRICS), [50, 99.5]
    )
    assert (values["completed"], values["failed"]) == (3, 1)
    assert (values["total_input_tokens"], values["total_output_tokens"]) == (30, 10)
    assert (
        values["request_throughput"],
        values["output_throughput"],
        values["total_token_throughput"],
    ) == (1.5, 5, 20)
    assert values["request_goodput"] == 1.0, "the second was late, the third has no time per token"
    assert values["mean_ttft_ms"] == pytest.approx(600) and values[
        "median_tpot_ms"
    ] == pytest.approx(125)
    assert values["mean_itl_ms"] == pytest.approx(200) and values["p50_itl_ms"] == pytest.approx(
        150
    )
    assert values["p99.5_e2el_ms"] == pytest.approx(1199, abs=1)
    assert values["max_concurrent_requests"] == 2, "the third begins when the second has ended"
    assert values["max_output_tokens_per_s"] == 3, "0.5, 0.6, 0.7 s; 1.1, 1.5, 1.7 s; 2.0 s"
    lines = report.block(values, 3.0, 8, ["ttft"], [99.5])
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[1] == "Successful requests:                     3         "
    assert "Request rate configured (RPS):           3.00      " in lines
    assert "---------------Time to First Token----------------" in lines
    assert lines[-2] == f"P99.5 TTFT (ms):{'':25}995.00    " and lines[-1] == "=" * 50


# --- services


def test_the_grpc_api_gets_what_was_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    with hash_service(configured(CONFIG, api_keys=("a key",))) as service:
        port = service.address.rpartition(":")[2]
        result = bench(
            *("--backend", "grpc", "--port", port, "--num-prompts", 6, "--random-input-len", 90),
            *("--output-len", 8, "--set", "random_vocab_size=97", "--num-warmups", 1),
            *("--ready-check-timeout-sec", 30, "--max-concurrency", 3),
            *("--save-result", "--result-dir", tmp_path, "--metadata", "commit=abc", "tp=1"),
            *("--goodput", "ttft:60000", "tpot:0.00001", "--percentile-metrics", "ttft,e2el"),
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        sample = service.metrics.registry.get_sample_value
        assert sample("nanocp:prompt_tokens_total") == 8 * 90, (
            "one was the ready check, one the warm-up"
        )
    (path,) = tmp_path.iterdir()
    values = json.loads(path.read_text())
    assert path.name.startswith("grpc-infqps-concurrency3-unknown-")
    assert (values["completed"], values["total_output_tokens"], values["commit"], values["tp"]) == (
        6, 48, "abc", "1",
    )  # fmt: skip
    assert (
        values["request_goodput"] == 0 and values["request_rate"] == "inf" and "ttfts" not in values
    )
    assert (
        1 <= values["max_concurrent_requests"] <= 3
        and values["p99_e2el_ms"] >= values["median_ttft_ms"] > 0
    )
    assert "Maximum request concurrency:             3" in result.output and "E2EL" in result.output


@pytest.fixture
def openai_server():
    """The little of OpenAI's HTTP that a benchmark uses. (base URL, bodies that came)."""
    bodies = []

    async def answer(request):
        body = await request.json()
        about = {"id": request.headers["x-request-id"], "key": request.headers.get("Authorization")}
        bodies.append(body | {"path": request.path} | about)
        if len(bodies) == 2:
            return web.json_response({"error": {"message": "no room"}}, status=503)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        is_chat = "messages" in body
        parts = [{"delta": {"role": "assistant", "content": ""}}] if is_chat else []
        parts += [{"delta": {"content": "la"}} if is_chat else {"text": "la"} for _ in range(3)]
        events = [{"choices": [part | {"finish_reason": None}]} for part in parts]
        events.append({"choices": [{"delta": {}, "text": "", "finish_reason": "length"}]})
        events.append({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 5}})
        for event in events:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            await asyncio.sleep(0.002)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def models(request):
        return web.json_response({"data": [{"id": "the/model"}]})

    with web_server(web.get("/v1/models", models), web.post("/v1/{name:.*}", answer)) as url:
        yield url, bodies


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_an_openai_endpoint_is_measured_message_by_message(
    openai_server, tmp_path, tiny_checkpoint, backend, monkeypatch
):
    url, bodies = openai_server
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    path = tmp_path / "result.json"
    tokenizer = ["--tokenizer", tiny_checkpoint] if backend == "openai-chat" else []
    result = bench(
        *("--backend", backend, "--base-url", url, "--num-prompts", 4, "--max-concurrency", 1,
          "--temperature", 0.5),
        *("--input-len", 9, "--output-len", 5, "--extra-body", '{"user": "me"}',
          "--request-id-prefix", "b-"),
        *("--save-result", "--save-detailed", "--result-dir", tmp_path, "--result-filename",
          path.name, *tokenizer),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "Error 0: status 503: " in result.output and "no room" in result.output
    values = json.loads(path.read_text())
    assert (values["completed"], values["failed"], values["model_id"]) == (3, 1, "the/model")
    assert (values["total_input_tokens"], values["total_output_tokens"]) == (33, 15), (
        "as the server counts them"
    )
    assert [len(itls) for itls in values["itls"]] == [2, 0, 2, 2], (
        "neither the role nor the end is a token"
    )
    assert values["generated_texts"][0] == "lalala" and values["errors"][1].startswith("status 503")
    asked = bodies[0]
    assert (asked["model"], asked["temperature"], asked["user"], asked["ignore_eos"]) == (
        "the/model", 0.5, "me", True,
    )  # fmt: skip
    assert (
        asked["stream"]
        and asked["stream_options"] == {"include_usage": True}
        and asked["id"] == "b-0"
    )
    assert asked["key"] == "Bearer a key"
    if backend == "openai":
        assert (
            asked["path"] == "/v1/completions"
            and len(asked["prompt"]) == 9
            and asked["max_tokens"] == 5
        )
    else:
        assert asked["path"] == "/v1/chat/completions" and asked["max_completion_tokens"] == 5
        assert isinstance(asked["messages"][0]["content"], str)


@pytest.mark.parametrize(("arguments", "sentence"), [
    (("--backend", "tgi"), "--backend is 'tgi'; it must be openai, openai-chat, vllm or grpc"),
    (("--dataset-name", "sonet"), "--dataset-name is 'sonet'; it must be random, sharegpt"),
    (("--dataset-name", "sonnet"), "not here: give random with --random-prefix-len"),
    (("--dataset-name", "custom"), "--dataset-name custom needs --dataset-path"),
    (("--ramp-up-strategy", "linear"), "run once for each --request-rate"),
    (("--lora-modules=a", "b"), "--lora-modules is not supported: the service has one model"),
    (("--num-promts", "3"), "--num-promts is no option here: did you mean --num-prompts?"),
    (("--dataset-name", "azure"), "needs --dataset-path"),
    (("--dataset-path", "x.json"), "--dataset-path x.json has no meaning"),
    (("--goodput", "ttft"), "it must be KEY:MILLISECONDS"),
    (("--goodput", "itl:5"), "the key must be ttft, tpot or e2el"),
    (("--percentile-metrics", "p99"), "--percentile-metrics has 'p99'"),
    (("--metric-percentiles", "101"), "from 0 to 100"),
    (("--request-rate", "0"), "--request-rate is 0"),
    (("--max-concurrency", "0"), "--max-concurrency is 0"),
    (("--self-timed",), "--self-timed is for traces"),
    (("--extra-body", "[1]"), "it must be a JSON object"),
    (("--backend", "openai-chat"), "give --tokenizer"),
    (("--base-url", "http://127.0.0.1:1"), "no service answers at http://127.0.0.1:1 ("),
    (("--model", "m", "--base-url", "http://127.0.0.1:1", "--ready-check-timeout-sec", "0.1"),
     "was not ready in 0.1 s"),
    (("--backend", "grpc", "--port", "1", "--ready-check-timeout-sec", "0.1"),
     "no service answers at 127.0.0.1:1"),
])  # fmt: skip
def test_what_has_no_meaning_is_a_sentence(arguments, sentence):
    result = bench("--num-prompts", 2, *arguments)
    assert result.exit_code == 2 and "nanocp bench serve: " in result.output
    assert sentence in " ".join(result.output.split())


def test_a_word_that_belongs_to_no_option_is_refused():
    result = bench("--num-prompts", 2, "stray")
    assert result.exit_code == 2 and "(stray)" in result.output


TOKEN = '{"choices": [{"text": "la", "finish_reason": null}]}'
LAST = '{"choices": [{"text": "la", "finish_reason": "length"}]}'


@pytest.mark.parametrize(("events", "error"), [
    ([TOKEN, "[DONE]"], ""),
    ([TOKEN, LAST], ""),
    ([TOKEN, '{"error": null, "choices": []}', "[DONE]"], ""),
    ([TOKEN], "the answer broke off: it has no finish reason"),
    (["[DONE]"], "the request ended without a token"),
    ([TOKEN, '{"object": "error", "message": "no room"}', "[DONE]"], "no room"),
    ([TOKEN, '{"error": {"message": "no room"}}', "[DONE]"], "no room"),
    ([TOKEN, LAST.replace("length", "error"), "[DONE]"], "a choice ended in an error"),
    ([TOKEN, '{"choices": [{"error": {"message": "no room"}}]}', LAST], "no room"),
    ([TOKEN, '["no chunk"]', "[DONE]"], "an event of the answer is no chunk"),
    ([TOKEN, '{"choices": ["no choice"]}', "[DONE]"], "an event of the answer is no chunk"),
    ([TOKEN, '{"choices": [', "[DONE]"], "JSONDecodeError"),
])  # fmt: skip
def test_only_an_answer_that_came_to_its_end_is_a_success(events, error):
    async def answer(request):
        text = "".join(f"data: {event}\n\n" for event in events)
        return web.Response(text=text, content_type="text/event-stream")

    async def asked(url):
        backend = OpenAIBackend(url, "/v1/completions", "m", False, {}, {})
        output = await backend.send(SampleRequest((1,), 1, 5), "a")
        await backend.close()
        return output

    with web_server(web.post("/v1/completions", answer)) as url:
        output = asyncio.run(asked(url))
    assert error in output.error and output.success == (not error) == (not output.error)


def test_nothing_served_is_a_failure():
    result = bench("--backend", "grpc", "--port", 1, "--num-prompts", 1)
    assert result.exit_code == 1 and "Successful requests:                     0" in result.output


def test_what_was_measured_before_an_interrupt_is_kept():
    """The third request never ends; Ctrl-C cancels what is sending."""

    class Slow:
        def __init__(self):
            self.sent = []

        async def send(self, request, request_id):
            self.sent.append(request_id)
            if request_id.endswith("2"):
                await asyncio.Event().wait()
            return RequestOutput(1, time.perf_counter(), success=True)

    async def interrupted():
        target, requests = Slow(), [SampleRequest((5,), 1, 1)] * 3
        sending = asyncio.create_task(send_all(target, requests, [0.0] * 3, None, "a-"))
        while len(target.sent) < 3:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        sending.cancel()
        return await sending

    outputs, duration_s = asyncio.run(interrupted())
    assert [output.success for output in outputs] == [True, True] and duration_s > 0
