"""Talks with a front end in the form of the Responses API, whose model says what a test gives."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from control_plane.frontend.http.served_model import ServedModel
from control_plane.frontend.http.tools.chat_template import ChatTemplate
from harness.services.frontend_fakes import TOKENIZER, Service
from harness.services.tale_models import TEMPLATES
from harness.waits import WAIT_S
from nanocp.values.plan import FinishReason

SOURCE = (TEMPLATES / "late_kept.jinja").read_text()
MODEL = ServedModel(
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
