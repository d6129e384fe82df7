"""OpenAI's Responses API: items in and out, streams that add up to the whole, and refusals."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import openai
import pydantic
import pytest

from control_plane.frontend.http.answers.deltas import Delta
from control_plane.frontend.http.responses_api.client_tools import ClientTools
from control_plane.frontend.http.responses_api.protocol import ResponsesRequest
from control_plane.frontend.http.responses_api.writer import ResponsesWriter, begun
from control_plane.frontend.http.tools.answer_parser import AnswerParser, CallContext
from control_plane.frontend.http.tools.call_forms import CALL_FORMS
from control_plane.frontend.open_requests import RequestError
from harness.services.agent_talks import codex
from harness.services.cases import joined_response, strict_json
from harness.services.frontend_fakes import TOKENIZER, Service, running
from harness.services.openai_service import (
    SAID,
    SEARCH,
    TOOLS,
    WITH_TOOLS,
    asked,
    posted,
    refused,
    say,
)
from harness.waits import WAIT_S
from nanocp.values.plan import FinishReason


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running(model=WITH_TOOLS) as service:
        yield service


# --- answers ---


def writer(**fields: Any) -> ResponsesWriter:
    request = ResponsesRequest(input="x", tools=TOOLS, **fields)
    kimi = CALL_FORMS["kimi_k2"]
    answer = begun(request, "resp_0", "tale", False)
    return ResponsesWriter(
        request,
        answer,
        ClientTools(TOOLS),
        None,
        partial(AnswerParser, CallContext(kimi), has_reasoning=True),
    )


def kimi_call(name: str, arguments: str) -> str:
    return (
        f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|>"
    )


def random_answer(dice: random.Random) -> str:
    parts = ["One.", "\n", "<|tool", "ö ", *(
        kimi_call(name, arguments)
        for name, arguments in [("run", '{"cmd": "ls"}'), ("patch", '{"input": "+a"}'),
                                ("notes__keep", "{}"), ("tool_search", '{"q": 1}'),
                                ("patch", '{"no": 1}'), ("run", "{")]
    )]  # fmt: skip
    thought = "<think>" * dice.randrange(2) + "Hm." * dice.randrange(2)
    end = "</think>" * ("<think>" in thought)
    return thought + end + "".join(dice.choices(parts, k=dice.randrange(6)))


def cut(dice: random.Random, text: str) -> list[str]:
    pieces = []
    while text:
        size = dice.randrange(1, 12)
        pieces.append(text[:size])
        text = text[size:]
    return pieces or [""]


def events_of(written: ResponsesWriter, chunks: list[pydantic.BaseModel]) -> list[Any]:
    events = []
    for chunk in chunks:
        name, data = written.event(chunk).decode().removesuffix("\n\n").split("\n")
        events.append(strict_json(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@pytest.mark.parametrize("seed", range(300))
def test_a_stream_adds_up_to_the_whole_for_any_cutting(seed):
    dice = random.Random(seed)
    text, finish = random_answer(dice), dice.choice(["stop", "length", "abort"])
    fields = {
        "include": dice.choice([[], ["reasoning.encrypted_content"]]),
        "reasoning": dice.choice([None, {"summary": "auto"}]),
        "parallel_tool_calls": dice.choice([None, False]),
    }
    whole = writer(**fields)
    whole.add(Delta(0, 0, [1], token_ids=[5], text=text, finish_reason=finish))
    streamed, chunks = writer(**fields), list[pydantic.BaseModel]()
    pieces = cut(dice, text)
    for number, piece in enumerate(pieces):
        end = finish if number == len(pieces) - 1 else None
        ids = [5] if number == 0 else []
        delta = Delta(0, 0, [1], token_ids=ids, text=piece, finish_reason=end)
        chunks += streamed.chunks(delta)
    events = events_of(streamed, chunks + streamed.last_chunks())
    body = strict_json(whole.body().model_dump_json(exclude_unset=True))
    assert joined_response(events) | {"created_at": 0} == body | {"created_at": 0}


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_the_official_client_streams_every_kind_of_item(service, client, step):
    def stream() -> tuple[list[Any], Any]:
        with client.responses.stream(
            model="tale", input="Go.", tools=TOOLS, include=["reasoning.encrypted_content"]
        ) as events:
            return list(events), events.get_final_response()

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stream)
        say(service, SAID, step)
        events, final = answer.result(WAIT_S)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [one.type for one in final.output] == [
        "reasoning", "message", "function_call", "custom_tool_call", "function_call",
        "tool_search_call",
    ]  # fmt: skip
    reasoning, message, run, patch, keep, search = final.output
    assert [one.text for one in reasoning.content] == ["I look."]
    assert final.output_text == "A file.\n" and message.status == "completed"
    assert (run.name, json.loads(run.arguments), run.namespace) == ("run", {"cmd": "ls"}, None)
    assert (patch.name, patch.input) == ("patch", "+ö\n")
    assert (keep.name, keep.namespace) == ("keep", "notes")
    assert (search.execution, search.arguments) == ("client", {"query": "q"})
    prefixes = [one.id.split("_")[0] for one in final.output]
    assert prefixes == ["rs", "msg", "fc", "ctc", "fc", "tsc"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [one.id for one in done] == [one.id for one in final.output]
    assert final.usage.output_tokens_details.reasoning_tokens > 0
    assert final.usage.total_tokens == final.usage.input_tokens + final.usage.output_tokens


def test_a_format_is_parsed(service, client):
    class Place(pydantic.BaseModel):
        city: str

    answer, _ = asked(
        service,
        lambda: client.responses.parse(model="tale", input="x", text_format=Place),
        '{"city": "Ulm"}',
    )
    assert answer.output_parsed == Place(city="Ulm")


def test_fields_come_back(service):
    fields = {
        "metadata": {"a": "b"}, "instructions": "Be brief.", "max_output_tokens": 10**9,
        "reasoning": {"effort": "low"}, "text": {"verbosity": "low"}, "tools": TOOLS,
        "parallel_tool_calls": False, "temperature": 0.5, "tool_choice": "none",
    }  # fmt: skip
    answer, prompt = posted(service, {"input": "x", **fields})
    for name in fields.keys() - {"reasoning", "text"}:
        assert answer[name] == fields[name]
    assert answer["reasoning"]["effort"] == "low"
    assert (answer["object"], answer["status"], answer["store"]) == ("response", "completed", True)
    assert prompt.index("Be brief.") < prompt.index("x")


def test_length_ends_incomplete(service, client):
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.responses.create, model="tale", input="x", max_output_tokens=1)
        ids = TOKENIZER.encode("fox", add_special_tokens=False)[:1]
        service.answer(ids, FinishReason.LENGTH)
        got = answer.result(WAIT_S)
    assert (got.status, got.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert got.output[-1].status == "incomplete"


def test_a_summary_is_asked_for(service):
    body = {"input": "x", "reasoning": {"summary": "auto"}}
    answer, _ = posted(service, body, "<think>Hm.</think>Yes.")
    assert answer["output"][0]["summary"] == [{"type": "summary_text", "text": "Hm."}]
    assert "content" not in answer["output"][0]


def test_a_lost_instance_ends_a_stream_with_the_error_that_clients_raise(service, client):
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(
            lambda: list(client.responses.create(model="tale", input="x", stream=True))
        )
        request = service.submitted().request_id
        ids = TOKENIZER.encode("fox", add_special_tokens=False)
        service.instance.deliver(request, 0, ids, FinishReason.INVALID)
        with pytest.raises(openai.APIError, match="cannot be followed"):
            answer.result(WAIT_S)


def test_an_error_stands_before_the_failed_response():
    failing = writer()
    delta = Delta(0, 0, [1], token_ids=[5], text="One.")
    events = events_of(failing, failing.chunks(delta))
    error = RequestError(FinishReason.FAILED, "instance 2 was lost")
    events += events_of(failing, [failing.error_chunk(error)])
    last = strict_json(failing.end.decode().split("data: ")[1])
    assert events[-1]["type"] == "error" and "instance 2 was lost" in events[-1]["message"]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"
    numbers = [one["sequence_number"] for one in [*events, last]]
    assert numbers == [*range(len(numbers))]


# --- items ---


def test_what_came_back_is_sent_again(service, client):
    include: Any = ["reasoning.encrypted_content"]
    first, before = asked(
        service,
        lambda: client.responses.create(model="tale", input="Go.", tools=TOOLS, include=include),
        SAID,
    )
    items: list[Any] = [
        {"role": "user", "content": "Go."},
        *(one.to_dict() for one in first.output),
    ]
    results = [
        {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "out1"},
        {"type": "custom_tool_call_output", "call_id": first.output[3].call_id, "output": [
            {"type": "input_text", "text": "out2"}, {"type": "input_image", "image_url": "x"}]},
        {"type": "function_call_output", "call_id": first.output[4].call_id, "output": "out3"},
        {"type": "tool_search_output", "call_id": first.output[5].call_id, "tools": [
            {"type": "function", "name": "new", "description": "found", "parameters": {}}]},
    ]  # fmt: skip
    last, after = asked(
        service,
        lambda: client.responses.create(model="tale", input=[*items, *results], tools=TOOLS),
        '<tool_call>\n{"name": "new", "arguments": {}}\n</tool_call>',
    )
    assert after.startswith(before)
    rest = after[len(before) :]
    places = [rest.index(text) for text in
              ("A file.", '"run"', '"patch"', "notes__keep", "out1", "out2", "a picture was here",
               "out3", '"description": "found"')]  # fmt: skip
    assert places == sorted(places)
    assert "+ö" in rest
    assert last.output[0].name == "new"


def test_an_answer_in_pieces_is_one_message(service):
    items = [
        {"role": "user", "content": "x"},
        {"type": "reasoning", "content": "A."}, {"type": "reasoning", "content": "B."},
        {"type": "function_call", "call_id": "a", "name": "run", "arguments": "{}"},
        {"role": "assistant", "content": "C."}, {"role": "assistant", "content": "D."},
    ]  # fmt: skip
    _, prompt = posted(service, {"input": items, "tools": TOOLS})
    assert "A.\nB." in prompt and "C.D." in prompt


@pytest.mark.parametrize("without", ["content", "encrypted_content"])
def test_reasoning_comes_back_by_either_field(service, without):
    answer, _ = posted(
        service, {"input": "x", "include": ["reasoning.encrypted_content"]}, "<think>Hm.</think>A"
    )
    item = answer["output"][0]
    assert item.pop(without)
    call = {"type": "function_call", "call_id": "a", "name": "run", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "a", "output": "o"}
    user = {"role": "user", "content": "x"}
    _, prompt = posted(service, {"input": [user, item, call, output], "tools": TOOLS})
    assert prompt.count("Hm.") == 1
    item = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    _, prompt = posted(service, {"input": [user, item, call, output], "tools": TOOLS})
    assert "gAAAA" not in prompt


def test_turns_of_an_agent_go_on_where_the_last_one_ended(service):
    prompts = [asked(service, lambda turn=turn: service.post("responses", codex(turn)))[1]
               for turn in (1, 2, 3, 4)]  # fmt: skip
    for before, after in pairwise(prompts):
        assert after.startswith(before[: int(0.95 * len(before))])
    assert "keep_note" not in prompts[0]
    assert prompts[-1].count('"name": "notes__keep_note"') == 2


def test_deferred_tools_wait_only_for_a_search(service):
    late = {"type": "function", "name": "late", "defer_loading": True, "parameters": {}}
    _, prompt = posted(service, {"input": "x", "tools": [late, SEARCH]})
    assert '"late"' not in prompt
    _, prompt = posted(service, {"input": "x", "tools": [late]})
    assert '"late"' in prompt


def test_hosted_tools_are_left_out_and_grammars_shown(service, caplog):
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    tools = [
        {"type": "web_search"}, {"type": "custom", "name": "p", "format": grammar},
    ]  # fmt: skip
    _, prompt = posted(service, {"input": "x", "tools": tools})
    assert "web_search" not in prompt and 'start: \\"a\\"' in prompt


def test_allowed_tools_are_the_only_ones(service):
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "custom", "name": "patch"}],
    }
    _, prompt = posted(service, {"input": "x", "tools": TOOLS, "tool_choice": choice})
    assert '"patch"' in prompt and '"run"' not in prompt


@pytest.mark.parametrize(
    ("choice", "text", "name", "namespace"),
    [
        ({"type": "custom", "name": "patch"}, '{"input": "a"}', "patch", None),
        ({"type": "function", "name": "keep", "namespace": "notes"}, "{}", "keep", "notes"),
        ({"type": "function", "name": "keep"}, "{}", "keep", "notes"),
        ("required", '[{"name": "notes__keep", "parameters": {}}]', "keep", "notes"),
    ],
)
def test_a_tool_must_be_called(service, choice, text, name, namespace):
    answer, _ = posted(service, {"input": "x", "tools": TOOLS, "tool_choice": choice}, text)
    (item,) = answer["output"]
    assert (item["name"], item.get("namespace")) == (name, namespace)


def test_tokens_of_the_input_are_counted(service, client):
    fields = {"input": "Go.", "tools": TOOLS, "instructions": "Be brief."}
    _, prompt = posted(service, fields)
    counted = client.responses.input_tokens.count(model="tale", **fields)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == len(TOKENIZER.encode(prompt, add_special_tokens=False))


# --- refusals ---


@pytest.mark.parametrize(
    ("fields", "param", "instead"),
    [
        ({"prompt": {"id": "p"}}, "prompt", "instructions"),
        ({"conversation": "c"}, "conversation", "input"),
        ({"context_management": [{"type": "compaction"}]}, "context_management", "shorter"),
        ({"max_tool_calls": 1}, "max_tool_calls", "leave it out"),
        ({"moderation": {"model": "m"}}, "moderation", "leave it out"),
        ({"image": {"context_compression": "enabled"}}, "image", "leave it out"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"include": ["message.output_text.logprobs"]}, "include", "leave it out"),
        ({"top_logprobs": 2}, "top_logprobs", "leave it out"),
        ({"input": []}, "input", "at least one item"),
        ({"input": [{}]}, "input.0", "role"),
        ({"input": [{"role": "user", "content": 1}]}, "input.0.content", "text"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input.0.content.0", "input_text"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input.0", "'compaction'"),
        ({"input": [{"type": "agent_message"}]}, "input.0", "'agent_message'"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0", "'function_call'"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.id", "send all items"),
        ({"previous_response_id": "resp_0_a"}, "previous_response_id", "send all items"),
        ({"previous_response_id": "resp_3_a"}, "previous_response_id", "front end 3"),
        ({"background": True, "store": False}, "background", "store must be true"),
        ({"background": True, "stream": True}, "background", "stream false"),
        ({"tools": [{"type": "function"}]}, "tools.0", "name"),
        ({"tools": [{"type": "namespace", "name": "a"}]}, "tools.0", "list of tools"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 1}]},
         "tools.0.parameters", "JSON schema"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools.1", "another tool"),
        ({"tool_choice": {"type": "web_search"}, "tools": [{"type": "web_search"}]},
         "tool_choice.type", "function"),
        ({"tool_choice": {"type": "function", "name": "f"}, "tools": TOOLS},
         "tool_choice.name", "run, patch"),
        ({"tool_choice": "run"}, "tool_choice", '{"type": "function", "name": ...}'),
        ({"tool_choice": {"type": "function", "name": "f"}, "tools": [
            {"type": "namespace", "name": name, "tools": [{"type": "function", "name": "f"}]}
            for name in "ab"]}, "tool_choice.name", "a__f, b__f"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]},
          "tools": TOOLS}, "tool_choice.tools.0.type", "function"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "required"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater"),
        ({"temperature": -1}, "temperature", "0 (greedy) or more"),
        ({"seed": "x"}, "seed", "integer"),
        ({"model": "gpt"}, "model", "tale"),
    ],
)  # fmt: skip
def test_refusals_name_the_field_and_what_to_send(service, fields, param, instead):
    error = refused(service, **fields)
    assert error["param"] == param
    assert error["message"].startswith((param, "the model")) and instead in error["message"]


def test_a_reference_to_reasoning_that_is_not_kept_is_left_out(service):
    items = [{"type": "item_reference", "id": "rs_1"}, {"role": "user", "content": "Go."}]
    _, prompt = posted(service, {"input": items})
    assert "rs_1" not in prompt


@pytest.mark.parametrize("path", ["responses/compact", "conversations"])
def test_what_is_not_built_is_not_found(service, path):
    assert service.post(path, {"input": "x"}).status_code == 404
