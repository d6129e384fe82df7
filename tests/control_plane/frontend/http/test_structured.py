"""Structured output over HTTP: OpenAI's and vLLM's fields become one grammar of the row."""

import json
import time
from collections.abc import Iterator
from threading import Thread
from typing import Any

import httpx
import pytest

from control_plane.frontend.http.served_model import ServedModel
from control_plane.frontend.http.tools.chat_template import ChatTemplate
from harness.services.frontend_fakes import Service, params_of, running
from harness.vllm.constraints import SCHEMA
from nanocp.values.plan import FinishReason

TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})

TAGS: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=weather>", "schema": {"type": "object", "required": ["city"]}, "end": "</f>"}
    ],
    "triggers": ["<f="],
}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running(model=ServedModel("tiny", "checkpoints/tiny", TEMPLATE)) as service:
        yield service


def grammar_for(service: Service, path: str = "completions", **fields: Any) -> str:
    """The grammar that the request's row gets."""
    body: dict[str, Any] = {"prompt": "x"}
    if path == "chat/completions":
        body = {"messages": [{"role": "user", "content": "x"}]}
    with httpx.Client(timeout=30) as client:
        request = client.build_request(
            "POST", f"{service.url}/v1/{path}", json=body | fields | {"stream": True}
        )
        thread = Thread(target=lambda: client.send(request))
        thread.start()
        submission = service.submitted()
        service.instance.deliver(submission.request_id, 0, [5], FinishReason.LENGTH)
        thread.join()
    params = params_of(submission)
    assert 1 in params.stop_token_ids, "the end of sequence"
    return params.constraint


def schema_of(grammar: str) -> Any:
    return json.loads(grammar)["grammars"][1]["json_schema"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_schema_by_either_field(service, path):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    first = grammar_for(service, path, response_format=form)
    second = grammar_for(service, path, structured_outputs={"json": SCHEMA}, ignore_eos=True)
    third = grammar_for(service, path, structured_outputs={"json": json.dumps(SCHEMA)})
    assert first == second == third
    assert schema_of(first)["x-guidance"] == {"whitespace_flexible": False}
    assert schema_of(first)["properties"] == SCHEMA["properties"]


def test_other_kinds(service):
    any_object = grammar_for(service, response_format={"type": "json_object"})
    assert any_object == grammar_for(service, structured_outputs={"json_object": True})
    assert grammar_for(service, response_format={"type": "text"}) == ""
    assert "a+" in grammar_for(service, structured_outputs={"regex": "a+"})
    chosen = grammar_for(service, structured_outputs={"choice": ["yes", "no"]})
    assert '"yes"' in json.loads(chosen)["grammars"][1]["lark_grammar"]
    assert "start" in grammar_for(service, structured_outputs={"grammar": 'root ::= "a"'})


def test_tags_by_either_field(service):
    first = grammar_for(service, response_format=TAGS)
    fields = {name: TAGS[name] for name in ("structures", "triggers")}
    assert first == grammar_for(service, structured_outputs={"structural_tag": json.dumps(fields)})
    assert "<f=" in first and "city" in first


def test_the_empty_schema_is_one(service):
    """JSON of any kind; a field that is absent is none."""
    first = grammar_for(service, structured_outputs={"json": {}})
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
    assert first == grammar_for(service, response_format=form) != ""
    assert first == grammar_for(service, structured_outputs={"json": "{}"})


def test_whitespace_by_request(service):
    outputs = {"json": {"type": "object"}, "disable_any_whitespace": False}
    assert schema_of(grammar_for(service, structured_outputs=outputs))["x-guidance"] == {
        "whitespace_flexible": True
    }
    outputs = {"json_object": True, "whitespace_pattern": "[ ]?"}
    guidance = schema_of(grammar_for(service, structured_outputs=outputs))["x-guidance"]
    assert guidance["whitespace_pattern"] == "[ ]?"


@pytest.mark.parametrize(("fields", "param", "sentence"), [
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of json, regex"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "regex cannot be used"),
    ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar", "is empty"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "is empty"),
    ({"structured_outputs": {"json": ""}}, "structured_outputs.json", "is empty"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "is no JSON"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1 item"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag",
     "structured_outputs.structural_tag cannot be used: it must have lists of structures"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
     "response_format", '"format" is not supported'),
    ({"response_format": TAGS | {"triggers": ["<other"]}}, "response_format",
     "structures.0 must have a begin that starts with a trigger"),
    ({"response_format": TAGS | {"structures": [7]}}, "response_format", "structures.0 must"),
    ({"response_format": TAGS | {"structures": []}}, "response_format", "lists of structures"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
     "structured_outputs", "only one of them can be"),
    ({"guided_json": {}}, "guided_json", "give structured_outputs.json"),
    ({"guided_grammar": "x"}, "guided_grammar", "give structured_outputs.grammar"),
])  # fmt: skip
def test_a_refusal_names_the_field(service, fields, param, sentence):
    answer = httpx.post(f"{service.url}/v1/completions", json={"prompt": "x"} | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert sentence in error["message"] and error["param"] == param, error


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


BAD_SCHEMAS = {
    "deep": nested(150),
    "gone": {"$ref": "#/$defs/gone"},
    "elsewhere": {"$ref": "https://elsewhere.example/schema"},
    "no type": {"type": "float"},
    "kinds": {"type": "object", "properties": []},
    "pattern": {"type": "string", "pattern": "(?<=a)b"},
    "empty": {"type": "integer", "minimum": 3, "maximum": 1},
    "negative": {"type": "array", "maxItems": -1},
    "many": {"enum": ["x" * 50 for _ in range(1000)]},
    "crossed": {"type": "string", "minLength": 9, "maxLength": 3},
}


def forms_of(schema: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(path, field that a refusal names, fields of the body), for each way to send a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    function = {"type": "function", "function": {"name": "f", "parameters": schema}}
    chosen = {"type": "function", "function": {"name": "f"}}
    yield "completions", "response_format", {"response_format": form}
    yield "completions", "structured_outputs.json", {"structured_outputs": {"json": schema}}
    yield "chat/completions", "response_format", {"response_format": form}
    yield "chat/completions", "tools", {"tools": [function], "tool_choice": chosen}
    yield "chat/completions", "tools", {"tools": [function], "tool_choice": "required"}


@pytest.mark.parametrize("name", BAD_SCHEMAS)
def test_a_schema_that_cannot_be_used_is_refused_at_once_by_its_field(service, name):
    """CPU time of the whole service, which runs in this process, and of its client.

    The least of three: whoever else works in this process meanwhile counts too.
    """
    with httpx.Client(timeout=60) as client:
        client.get(f"{service.url}/health")
        for path, field, fields in forms_of(BAD_SCHEMAS[name]):
            body = {"prompt": "x"} if path == "completions" else {"messages": [MESSAGE]}
            times_s = []
            for _ in range(3):
                began_s = time.process_time()
                answer = client.post(f"{service.url}/v1/{path}", json=body | fields)
                times_s.append(time.process_time() - began_s)
            assert min(times_s) < 0.1
            error = answer.json()["error"]
            assert answer.status_code == 400, (path, fields, answer.text)
            assert error["param"] == field, error


MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize("tools", [
    [{}],
    [{"type": "function"}],
    [{"type": "function", "function": {"name": ""}}],
    [{"type": "function", "function": {"name": "f", "parameters": []}}],
    [{"type": "retrieval", "function": {"name": "f"}}],
    "f",
    [1],
])  # fmt: skip
def test_tools_that_are_none_are_refused_by_their_field(service, tools):
    body = {"messages": [MESSAGE], "tools": tools, "tool_choice": "required"}
    answer = httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("tools")
