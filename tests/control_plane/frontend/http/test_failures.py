"""Whatever fails is answered in one shape: with its id, its origin, and the end of its stream."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from control_plane.frontend.http.answers.chat import ChatWriter
from control_plane.frontend.http.answers.completions import CompletionWriter, TextOffsets
from control_plane.frontend.http.answers.token_names import TokenNames
from harness.exact.settings import configured
from harness.services.frontend_fakes import TOKENIZER, Service, make_config, running
from harness.services.openai_service import HELLO, MODEL, connection, deliver
from harness.waits import WAIT_S
from nanocp.cli.ask.batch_files import read_requests

ORIGIN = {"Origin": "https://page.example", "X-Request-Id": "mine"}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    config = configured(make_config(), cors_origins=(ORIGIN["Origin"],))
    with running(config, model=MODEL) as service:
        yield service


def fail(*_: Any) -> Any:
    raise ZeroDivisionError("planted")


@pytest.mark.parametrize("writer", [CompletionWriter, ChatWriter])
@pytest.mark.parametrize("method", ["body", "chunks", "last_chunks"])
def test_a_failure_has_its_id_its_origin_and_an_end(service, pool, monkeypatch, writer, method):
    monkeypatch.setattr(writer, method, fail)
    is_stream = method != "body"
    path, body = "completions", {"prompt": [5]}
    if writer is ChatWriter:
        path, body = "chat/completions", {"messages": [{"role": "user", "content": "hi"}]}
    asked = pool.submit(service.post, path, body | {"stream": is_stream}, headers=ORIGIN)
    deliver(service, HELLO)
    answer = asked.result(WAIT_S)
    assert answer.headers["X-Request-Id"] == "mine"
    assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN["Origin"]
    if is_stream:
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert events.pop() == "[DONE]"
        error = json.loads(events[-1])["error"]
    else:
        error = answer.json()["error"]
        assert answer.status_code == 500
    assert (error["code"], error["type"]) == (500, "InternalServerError")
    assert "its log says why" in error["message"]


def test_a_body_that_says_that_it_is_too_long_is_refused_before_it_is_sent(service):
    with connection(service) as client:
        client.settimeout(WAIT_S)
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Expect: 100-continue\r\nContent-Length: 99999999999\r\n\r\n"
        )
        assert client.recv(4096).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("asks", [True, False])
def test_only_the_last_chunk_has_usage_and_the_others_null(service, pool, asks):
    for path, body in (
        ("completions", {"prompt": [5]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        options: dict[str, Any] = {"stream": True}
        if asks:
            options["stream_options"] = {"include_usage": True}
        asked = pool.submit(service.post, path, body | options)
        deliver(service, HELLO)
        events = [line[6:] for line in asked.result(WAIT_S).text.splitlines() if line][:-1]
        usages = [json.loads(event).get("usage", "absent") for event in events]
        if asks:
            assert set(usages[:-1]) == {None} and usages[-1]["completion_tokens"] == len(HELLO)
        else:
            assert set(usages) == {"absent"}


def test_models_with_a_slash_are_the_list_too(service):
    assert httpx.get(f"{service.url}/v1/models/").json()["object"] == "list"
    assert httpx.get(f"{service.url}/v1/models/tiny").json()["object"] == "model"


@pytest.mark.parametrize("skips", [True, False])
def test_offsets_are_places_in_the_text(skips):
    ids = [*TOKENIZER.encode("a\N{GRINNING FACE}the"), 1, *TOKENIZER.encode("b")]
    offsets = TextOffsets(TOKENIZER, skips)
    assert offsets.of_prompt([0, *HELLO], "the fox")[0] == 0
    got = [offset for token_id in ids for offset in offsets.of([token_id])]
    size = 0 if skips else len("</s>")
    assert got == [7, 8, 8, 8, 8, 9, 12, 12 + size]
    # A prompt that spells a special token has it in its text.
    spelled = TextOffsets(TOKENIZER, True)
    assert spelled.of_prompt([0, 1, *HELLO], "</s>the fox")[:3] == [0, 0, 4]
    assert TextOffsets(None, True).of([5, 6]) == [0, 0]


def test_tokens_of_one_name_are_told_apart():
    first, second = TOKENIZER.encode("\N{GRINNING FACE}")[:2]
    named = TokenNames(TOKENIZER, False).by_name([(second, -2.0), (first, -1.0), (second, -2.0)])
    assert named == {"\N{REPLACEMENT CHARACTER}": -2.0, r"bytes:\xf0": -1.0}


def test_a_batch_file_may_begin_with_a_byte_order_mark(tmp_path):
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(line), encoding="utf-8-sig")
    assert [request.custom_id for request in read_requests(path)] == ["a"]
