"""A client may offer another protocol: the service answers by HTTP/1.1, and loses nothing."""

import json

import pytest

from harness.services.openai_service import connection, deliver
from harness.waits import WAIT_S

BODY = json.dumps({"prompt": [5], "max_tokens": 1}).encode()
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAA\r\n"
OFFERS = {
    "h2c": H2C,
    "twice": H2C + b"Upgrade: h2c\r\n",
    "websocket": b"connection: keep-alive, UPGRADE\r\nupgrade: websocket\r\n",
    "tls": b"Connection: Upgrade\r\nUpgrade: TLS/1.0, HTTP/1.1\r\n",
}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
FRAMED = {
    "length": b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY),
    "chunked": b"Transfer-Encoding: chunked\r\n\r\n5\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n"
    % (BODY[:5], len(BODY) - 5, BODY[5:]),
}


def cuts(text: bytes) -> dict[str, list[bytes]]:
    body = text.index(b"\r\n\r\n") + 4
    return {
        "whole": [text],
        "the body in a second packet": [text[:body], text[body:]],
        "within": [text[:30], text[30 : body - 2], text[body - 2 : body + 3], text[body + 3 :]],
        "single bytes": [text[i : i + 1] for i in range(len(text))],
    }


@pytest.mark.parametrize("cut", ["whole", "the body in a second packet", "within", "single bytes"])
@pytest.mark.parametrize("framing", FRAMED)
@pytest.mark.parametrize("offer", OFFERS)
def test_an_offer_is_ignored_and_the_body_is_read(service, offer, framing, cut):
    with connection(service) as client:
        client.settimeout(WAIT_S)
        # A second request on the connection, with an offer or without, is answered as well.
        for more in (OFFERS[offer], b""):
            for piece in cuts(HEAD + more + FRAMED[framing])[cut]:
                client.sendall(piece)
            deliver(service, [7])
            answer = b""
            while b"usage" not in answer:
                new = client.recv(4096)
                assert new, answer
                answer += new
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and b'"completion_tokens":1' in answer


def test_an_offer_without_a_body_and_a_pipelined_request(service):
    with connection(service) as client:
        client.settimeout(WAIT_S)
        get = b"GET /version HTTP/1.1\r\nHost: x\r\n%b\r\n"
        client.sendall(get % b"" + get % H2C + get % b"" + get % b"Connection: close\r\n")
        answer = b""
        while new := client.recv(4096):
            answer += new
        assert answer.count(b"HTTP/1.1 200 OK") == 4 and answer.count(b'"version"') == 4


@pytest.mark.parametrize("method", [b"CONNECT / HTTP/1.1", b"CONNECT a:443 HTTP/1.1"])
def test_what_is_no_offer_is_refused_once(service, method):
    with connection(service) as client:
        client.settimeout(WAIT_S)
        client.sendall(method + b"\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 40")
