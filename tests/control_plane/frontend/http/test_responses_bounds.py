"""What a Responses request or a model's answer may have at most: depth, characters and items."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from control_plane.frontend.http.responses_api.client_tools import ClientTools
from control_plane.frontend.http.responses_api.protocol import ResponsesRequest
from control_plane.frontend.http.responses_api.translate import translated
from control_plane.frontend.http.tools.chat_tools import read_tools
from harness.services.cases import strict_json
from harness.services.frontend_fakes import Service, running
from harness.services.openai_service import TOOLS, WITH_TOOLS, asked, refused


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running(model=WITH_TOOLS) as service:
        yield service


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "arguments", "field", "value"),
    [
        ("patch", '{"input": "a\\ud800b"}', "input", "a?b"),
        ("tool_search", '{"query": "\\ud800"}', "arguments", {}),
        ("tool_search", '{"query": %s}' % ("[" * 300 + "]" * 300), "arguments", {}),
        ("tool_search", '{"query": %s}' % ("1" * 5000), "arguments", {}),
    ],
)
def test_values_that_no_answer_can_have_are_left_out(
    service, name, arguments, field, value, stream
):
    text = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    body = {"input": "x", "tools": TOOLS, "stream": stream}
    answer, _ = asked(service, lambda: service.post("responses", body), text)
    last = answer.text.rsplit("data: ", 1)[-1]
    response = strict_json(last)["response"] if stream else strict_json(last)
    assert (response["status"], response["output"][0][field]) == ("completed", value)


@pytest.mark.parametrize("place", ["tools", "input"])
def test_what_no_answer_could_repeat_is_refused_at_once(service, place):
    nested: Any = {}
    for _ in range(300):
        nested = {"properties": nested}
    item = {"role": "user", "content": "x", "more": nested}
    tool = {"type": "function", "name": "f", "parameters": nested}
    assert "nested" in refused(service, **{place: [item if place == "input" else tool]})["message"]


@pytest.mark.parametrize(
    "item",
    [
        {"role": "assistant", "content": "y" * 500},
        {"type": "reasoning", "content": "y" * 500},
    ],
)
def test_thousands_of_items_hold_no_others_up(item):
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    functions = [{"type": "function", "name": f"f{number}"} for number in range(3000)]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": functions}
    request = ResponsesRequest(input=[call] + [item] * 8000, tools=functions, tool_choice=choice)
    own = [("input", one) for one in request.input]
    began_s = time.thread_time()
    chat = translated(request, [], own, ClientTools(functions), WITH_TOOLS).chat
    read_tools(chat, "hermes", False)
    assert time.thread_time() - began_s < 0.9
