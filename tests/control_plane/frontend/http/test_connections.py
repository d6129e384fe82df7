"""What a connection carries: answers to HTTP/1.0, and the next request while one is answered."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from harness.services.frontend_fakes import Service, make_config, running
from harness.services.openai_service import HELLO, LENGTH, MODEL, connection, deliver
from harness.waits import WAIT_S
from nanocp.client import Client, NotFound

TIMEOUT_S = 0.5
"""Longest time for a request here; 30 s by default."""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    config = make_config(http_request_timeout_ms=int(TIMEOUT_S * 1000))
    with running(config, model=MODEL) as service:
        yield service


def post(version: bytes, **body: object) -> bytes:
    text = json.dumps({"prompt": [5], **body}).encode()
    head = b"POST /v1/completions HTTP/%b\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head % version + b"Content-Length: %d\r\n\r\n%b" % (len(text), text)


@pytest.mark.parametrize("more", [b"", b"Connection: keep-alive\r\n"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_to_http_1_0_has_no_chunks(service, is_stream, more):
    """RFC 9112, 6.1: no Transfer-Encoding unless the request is of HTTP/1.1 or later."""
    with connection(service) as client:
        client.settimeout(WAIT_S)
        asked = post(b"1.0", stream=is_stream)
        client.sendall(asked.replace(b"Host: x\r\n", b"Host: x\r\n" + more))
        deliver(service, HELLO)
        answer = b""
        while new := client.recv(4096):
            answer += new
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 200 OK\r\n" in head and b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert (b"content-length" in head.lower()) != is_stream
    if is_stream:
        lines = [line for line in body.split(b"\n") if line]
        assert all(line.startswith(b"data: ") for line in lines) and lines[-1] == b"data: [DONE]"
    else:
        assert json.loads(body)["usage"]["completion_tokens"] == len(HELLO)


def test_get_and_head_of_http_1_0_are_as_they_were(service):
    for method, has_body in ((b"GET", True), (b"HEAD", False)):
        with connection(service) as client:
            client.settimeout(WAIT_S)
            client.sendall(method + b" /version HTTP/1.0\r\n\r\n")
            answer = b""
            while new := client.recv(4096):
                answer += new
            assert (b"content-length: " in answer.lower() and b"version" in answer) or not has_body


@pytest.mark.parametrize("begun", ["a head", "a head and a part of its body", "a line end"])
def test_a_stream_goes_on_when_the_next_request_has_begun(service, begun):
    following = post(b"1.1")
    cut = {"a head": 30, "a head and a part of its body": len(following) - 3, "a line end": 2}[
        begun
    ]
    text = b"\r\n" + following if begun == "a line end" else following
    with connection(service) as client:
        client.settimeout(WAIT_S)
        client.sendall(post(b"1.1", stream=True, max_tokens=100_000))
        request = service.next_request()
        service.instance.deliver(request, 0, HELLO[:1])
        client.sendall(text[:cut])
        answer = client.recv(4096)
        until_s = time.monotonic() + 3 * TIMEOUT_S
        index = 1
        while time.monotonic() < until_s:
            service.instance.deliver(request, index, HELLO[:1])
            index += 1
            time.sleep(0.01)
            new = client.recv(4096)
            assert new, f"the stream was cut: {answer[-200:]!r}"
            answer += new
        service.instance.deliver(request, index, HELLO[:1], LENGTH)
        client.sendall(text[cut:])
        deliver(service, HELLO)
        while b'"usage"' not in answer:
            new = client.recv(4096)
            assert new, answer[-300:]
            answer += new
        assert answer.count(b"[DONE]") == 1


def test_a_request_that_never_ends_is_cut_as_before(service):
    for sent in (b"", b"POST /v1/comp", post(b"1.1")[:-3]):
        with connection(service) as client:
            client.settimeout(WAIT_S)
            client.sendall(sent)
            assert client.recv(4096) == b"", sent
    # One that is begun behind an answer that has ended.
    with connection(service) as client:
        client.settimeout(WAIT_S)
        client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while b"}" not in answer:
            answer += client.recv(4096)
        client.sendall(b"GET /vers")
        assert client.recv(4096) == b""


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("named", ["cmpl-mine", "cmpl-mine-0"])
def test_an_answers_id_is_that_of_all_its_prompts(service, is_stream, named):
    body = {"prompt": [[5], [6], [7]], "n": 2, "request_id": "mine", "stream": is_stream}
    with ThreadPoolExecutor() as pool, Client(service.address) as client:
        asked = pool.submit(httpx.post, f"{service.url}/v1/completions", json=body, timeout=WAIT_S)
        submitted = [service.submitted() for _ in range(6)]
        assert {each.arrival.client_id for each in submitted} == {"cmpl-mine"}
        service.instance.deliver(submitted[0].request_id, 0, HELLO[:1])
        # Another call with the id is refused, as it is beside one prompt.
        again = httpx.post(f"{service.url}/v1/completions", json=body, timeout=WAIT_S)
        assert again.status_code == 400 and "'cmpl-mine' is running" in again.text
        if named == "cmpl-mine-0":
            with pytest.raises(NotFound):
                client.abort(named)
        assert client.abort("cmpl-mine") == ("cmpl-mine",)
        answer = asked.result(WAIT_S)
        assert answer.status_code == 200 and answer.text.count('"abort"') == 6
        assert sorted(service.next_abort() for _ in range(6)) == [
            each.request_id for each in submitted
        ]
        with pytest.raises(NotFound):
            client.abort("cmpl-mine")


def test_an_id_is_free_again_when_every_prompt_has_ended(service):
    body = {"prompt": [[5], [6]], "request_id": "again"}
    with ThreadPoolExecutor() as pool:
        for _ in range(2):
            asked = pool.submit(
                httpx.post, f"{service.url}/v1/completions", json=body, timeout=WAIT_S
            )
            deliver(service, HELLO)
            deliver(service, HELLO)
            assert asked.result(WAIT_S).json()["usage"]["completion_tokens"] == 2 * len(HELLO)
