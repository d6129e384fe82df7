"""The OpenAI API of a front end, and its members' side, for tests over real sockets."""

import json
import socket
from typing import Any

from openai import OpenAI

from control_plane.frontend.http.served_model import ServedModel
from control_plane.frontend.http.tools.chat_template import ChatTemplate
from harness.services.frontend_fakes import TOKENIZER, Service
from harness.waits import WAIT_S
from nanocp.values.plan import FinishReason
from nanocp.values.sampling import Token, TokenLogprobs

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP
TEMPLATE = ChatTemplate(
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    {"bos_token": "<s>"},
)
MODEL = ServedModel("tiny", "checkpoints/tiny", TEMPLATE, {"top_p": 0.5})
HELLO = TOKENIZER.encode("the fox")


def client_of(service: Service) -> OpenAI:
    return OpenAI(base_url=f"{service.url}/v1", api_key="EMPTY", max_retries=0, timeout=WAIT_S)


def deliver(service: Service, ids: list[int], finish: FinishReason = LENGTH) -> None:
    """Answer the next request, a token a message."""
    request = service.controller.next_submission().request_id
    for index, token_id in enumerate(ids):
        service.instance.deliver(
            request, index, [token_id], finish if index == len(ids) - 1 else None
        )


def deliver_logprobs(service: Service, ids: list[int], num_top: int) -> None:
    request = service.controller.next_submission().request_id
    top = tuple(
        (257 - rank, -float(rank) if rank < 2 else -float("inf")) for rank in range(num_top)
    )
    reasons = [None] * (len(ids) - 1) + [LENGTH]
    tokens = [
        Token(service.address, request, index, token_id, reason, TokenLogprobs(-0.5, top))
        for index, (token_id, reason) in enumerate(zip(ids, reasons, strict=True))
    ]
    service.instance.deliver_tokens(tokens)


def address_of(service: Service) -> tuple[str, int]:
    host, port = service.url.removeprefix("http://").split(":")
    return host, int(port)


def connection(service: Service) -> socket.socket:
    return socket.create_connection(address_of(service))


def send(client: socket.socket, body: dict[str, Any], path: str = "completions") -> None:
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Type: "
        f"application/json\r\nContent-Length: {len(content)}"
    )
    client.sendall(head.encode() + b"\r\n\r\n" + content)
