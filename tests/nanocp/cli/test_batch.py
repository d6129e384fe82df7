"""`nanocp batch`: what comes of each line, what a run that was stopped leaves, what is refused."""

import asyncio
import json
import signal
import subprocess
import threading
from collections import Counter
from contextlib import contextmanager

import pytest
from aiohttp import web

from harness.programs.command_line import nanocp
from harness.programs.web_server import web_server
from harness.services.hash_service import expected, hash_service
from harness.services.serve_process import ENVIRONMENT, NANOCP, WAIT_S
from harness.waits import until


def line(custom_id, **others):
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "seed": 1}
    body["return_token_ids"] = True
    values = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(values | others)


def write(path, lines):
    path.write_text("".join(f"{one}\n" for one in lines))
    return path


def batch(tmp_path, url, *options):
    files = ("-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl")
    return nanocp("batch", *files, "--base-url", url, *options)


def read(path):
    return [json.loads(one) for one in path.read_text().splitlines()]


@contextmanager
def endpoint(answer):
    """A server whose completions are `answer(request, number of the call)`; yields its URL."""
    calls = 0

    async def complete(request):
        nonlocal calls
        calls += 1
        return await answer(request, calls)

    async def models(request):
        return web.json_response({"data": [{"id": "m"}]})

    routes = web.post("/v1/completions", complete), web.get("/v1/models", models)
    with web_server(*routes) as url:
        yield url


def test_a_service_answers_each_line_and_a_failure_is_a_line_too(tmp_path):
    good = [line(f"r{number}") for number in range(20)]
    write(tmp_path / "in.jsonl", [*good, "", line("bad", body={"prompt": [1], "top_p": 7})])
    with hash_service() as service:
        result = batch(tmp_path, f"http://{service.http_address}/v1", "--max-concurrency", "5")
        (tmp_path / "in.jsonl").write_text(line("r0") + "\n")
        again = batch(tmp_path, f"http://{service.http_address}")
    assert result.exit_code == 1 and "20 of 21 answered, 1 failed: see" in result.stderr
    answers = {answer["custom_id"]: answer for answer in read(tmp_path / "out.jsonl")}
    assert sorted(answers) == sorted(f"r{number}" for number in range(20))
    response = answers["r7"]["response"]
    assert response["status_code"] == 200 and answers["r7"]["error"] is None
    assert response["body"]["id"] == f"cmpl-{response['request_id']}"
    assert {tuple(a["response"]["body"]["choices"][0]["token_ids"]) for a in answers.values()} == {
        tuple(expected([1, 2, 3], 4))
    }
    (failure,) = read(tmp_path / "out.errors.jsonl")
    assert failure["custom_id"] == "bad" and failure["response"]["status_code"] == 400
    assert failure["response"]["body"]["error"]["param"] == "top_p"
    assert again.exit_code == 2 and "out.jsonl exists; go on with --resume" in again.stderr
    assert len(read(tmp_path / "out.jsonl")) == 20


def test_a_killed_run_goes_on_with_what_is_left(tmp_path):
    num, asked, slow = 40, Counter(), threading.Event()

    async def answer(request, number):
        body = await request.json()
        if number > 12 and not slow.is_set():
            await asyncio.sleep(3600)
        asked[body["prompt"][0]] += 1
        return web.json_response({"echo": body["prompt"], "priority": body["priority"]})

    write(
        tmp_path / "in.jsonl",
        [line(f"r{number}", body={"prompt": [number]}) for number in range(num)],
    )
    out = tmp_path / "out.jsonl"
    with endpoint(answer) as url:
        words = ["batch", "-i", tmp_path / "in.jsonl", "-o", out, "--base-url", url]
        process = subprocess.Popen(
            [*NANOCP, *words, "--max-concurrency", "4"], env=ENVIRONMENT, stderr=subprocess.PIPE
        )
        until(lambda: out.exists() and out.read_text().count("\n") == 12)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        with out.open("a") as file:
            file.write('{"id": "batch_req_1", "custom_id": "r3')  # as a full disk leaves it
        slow.set()
        result = batch(tmp_path, url, "--resume")
    assert result.exit_code == 0 and f"{num} of {num} answered" in result.stderr
    answers = read(out)
    assert Counter(a["custom_id"] for a in answers) == {f"r{number}": 1 for number in range(num)}
    assert all(
        a["response"]["body"] == {"echo": [int(a["custom_id"][1:])], "priority": 100}
        for a in answers
    )
    assert asked == dict.fromkeys(range(num), 1)
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_ctrl_c_keeps_what_came_and_says_how_to_go_on(tmp_path):
    async def answer(request, number):
        await asyncio.sleep(0 if number <= 3 else 3600)
        return web.json_response({})

    write(tmp_path / "in.jsonl", [line(f"r{number}") for number in range(9)])
    out = tmp_path / "out.jsonl"
    with endpoint(answer) as url:
        words = ["batch", "-i", tmp_path / "in.jsonl", "-o", out, "--base-url", url]
        process = subprocess.Popen([*NANOCP, *words], env=ENVIRONMENT, stderr=subprocess.PIPE)
        until(lambda: out.exists() and out.read_text().count("\n") == 3)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=WAIT_S)[1].decode()
    assert process.returncode == 130
    assert "stopped; 3 of 9 answered; --resume sends the others" in said


def test_no_more_requests_than_allowed_are_out_and_one_without_room_is_sent_again(tmp_path):
    now = most = 0
    refused = Counter()

    async def answer(request, number):
        nonlocal now, most
        body = await request.json()
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        if body["prompt"] == [5] and refused["5"] < 1:
            refused["5"] += 1
            return web.json_response({"error": {}}, status=503)
        return web.json_response({"priority": body["priority"]})

    lines = [line(f"r{number}", body={"prompt": [number]}) for number in range(30)]
    lines.append(line("urgent", body={"prompt": [99], "priority": -1}))
    write(tmp_path / "in.jsonl", lines)
    with endpoint(answer) as url:
        result = batch(tmp_path, url, "--max-concurrency", "3")
    assert result.exit_code == 0 and most == 3 and refused["5"] == 1
    answers = {a["custom_id"]: a["response"]["body"] for a in read(tmp_path / "out.jsonl")}
    assert len(answers) == 31 and answers["urgent"] == {"priority": -1}


def test_a_service_that_goes_away_stops_the_run_with_a_sentence(tmp_path):
    async def dropped(request, number):
        if number == 1:
            return web.json_response({})
        request.transport.abort()
        return web.Response()

    write(tmp_path / "in.jsonl", [line(f"r{number}") for number in range(9)])
    with endpoint(dropped) as url:
        result = batch(tmp_path, url, "--retry-s", "0.1", "--max-concurrency", "1")
    assert result.exit_code == 1 and f"no service answers at {url} (" in result.stderr
    assert "1 of 9 answered; --resume sends the others" in result.stderr
    nobody = batch(tmp_path, url, "--resume")
    assert nobody.exit_code == 2 and f"no service answers at {url}" in nobody.stderr
    assert len(read(tmp_path / "out.jsonl")) == 1


@pytest.mark.parametrize("text, sentence", [
    ("{", "line 2: it is no JSON"),
    ("[]", "line 2: it must be a JSON object"),
    (line(""), "line 2: custom_id is ''; it must be a text"),
    (line("a"), "line 2: custom_id is 'a', as in a line before"),
    (line("b", method="GET"), "line 2: method is 'GET'; it must be POST"),
    (line("b", url="/v1/embeddings"), "line 2: url is '/v1/embeddings'; it must be /v1/chat"),
    (line("b", body=[]), "line 2: body must be a JSON object"),
    (line("b", body={"stream": True}), "line 2: body.stream is true"),
])  # fmt: skip
def test_a_line_that_is_no_request_is_named_before_anything_is_sent(tmp_path, text, sentence):
    write(tmp_path / "in.jsonl", [line("a"), text])
    result = batch(tmp_path, "http://127.0.0.1:1")
    assert result.exit_code == 2 and sentence in result.stderr
    assert not (tmp_path / "out.jsonl").exists()
