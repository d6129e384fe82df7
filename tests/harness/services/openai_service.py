"""The OpenAI API of a front end, and its members' side, for tests over real sockets."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import OpenAI

from control_plane.frontend.http.served_model import ServedModel
from control_plane.frontend.http.tools.chat_template import ChatTemplate
from harness.services.frontend_fakes import TOKENIZER, Service
from harness.services.tale_models import TEMPLATES
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


SOURCE = (TEMPLATES / "late_kept.jinja").read_text()
WITH_TOOLS = ServedModel(
    "tale", "tale", ChatTemplate(SOURCE, {"bos_token": "<s>"}), {}, "hermes", has_reasoning=True
)
SEARCH = {"type": "tool_search", "execution": "client", "description": "d", "parameters": {}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "run", "parameters": {"type": "object"}},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "notes", "tools": [{"type": "function", "name": "keep"}]},
    SEARCH,
]
SAID = (
    "<think>\nI look.</think>\n\nA file.\n"
    '<tool_call>\n{"name": "run", "arguments": {"cmd": "ls"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "patch", "arguments": {"input": "+ö\\n"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "notes__keep", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "tool_search", "arguments": {"query": "q"}}\n</tool_call>'
)


def say(service: Service, text: str, step: int = 5) -> list[int]:
    """Answer the next request with the text; return its prompt."""
    submission = service.submitted()
    ids = [*TOKENIZER.encode(text, add_special_tokens=False), 1]
    for first in range(0, len(ids), step):
        finish = FinishReason.STOP if first + step >= len(ids) else None
        service.instance.deliver(submission.request_id, first, ids[first : first + step], finish)
    return list(submission.prompt_ids)


def asked(service: Service, ask: Any, text: str = "Yes.") -> tuple[Any, str]:
    """What `ask` returns if the model says the text; and the text of the prompt."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask)
        prompt = say(service, text)
        return answer.result(WAIT_S), TOKENIZER._tokenizer.decode(prompt, skip_special_tokens=False)


def posted(service: Service, body: dict[str, Any], text: str = "Yes.") -> tuple[Any, str]:
    answer, prompt = asked(service, lambda: service.post("responses", body), text)
    assert answer.status_code == 200, answer.text
    return answer.json(), prompt


def refused(service: Service, **fields: Any) -> dict[str, Any]:
    answer = service.post("responses", {"input": "x", **fields})
    assert answer.status_code in (400, 404), answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error
