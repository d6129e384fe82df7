"""Tools and reasoning over HTTP, with OpenAI's own client: whole answers, streams and refusals."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import openai
import pydantic
import pytest
from llguidance import LLMatcher, LLTokenizer

from control_plane.frontend.http.served_model import ServedModel
from control_plane.frontend.http.tools.call_forms import CALL_FORMS
from control_plane.frontend.http.tools.chat_template import ChatTemplate
from harness.services.frontend_fakes import TOKENIZER, Service, params_of, running
from nanocp.config.service import TOOL_CALL_PARSERS
from nanocp.values.plan import FinishReason

TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{{ tools | length if tools }}<tool_call></think>",
    {},
)
MODEL = ServedModel("tiny", "c", TEMPLATE, call_form="hermes", has_reasoning=True)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("weather", city={"type": "string"}), tool("time", zone={"enum": ["UTC", "CET"]})]
ANSWER = (
    "<think>\nI need it.</think>\n\nLet me look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {"zone": "UTC"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running(model=MODEL) as service:
        yield service


def answered(service: Service, ask: Any, text: str, step: int = 7) -> tuple[Any, Any]:
    """What `ask` returns if the model says the text, in batches of tokens; and the submission."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        submission = service.submitted()
        ids = [*TOKENIZER.encode(text, add_special_tokens=False), 1]
        for first in range(0, len(ids), step):
            batch = ids[first : first + step]
            finish = FinishReason.STOP if first + step >= len(ids) else None
            service.instance.deliver(submission.request_id, first, batch, finish)
        return asked.result(60), submission


def create(client: openai.OpenAI, **fields: Any) -> Any:
    messages = fields.pop("messages", [{"role": "user", "content": "x"}])
    extra = {name: fields.pop(name) for name in ("include_reasoning",) if name in fields}
    return client.chat.completions.create(
        model="tiny", messages=messages, extra_body=extra, **fields
    )


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_whole_answer_has_its_reasoning_content_and_calls(service, client, step):
    answer, _ = answered(service, lambda: create(client, tools=TOOLS), ANSWER, step)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.reasoning, choice.message.content) == ("I need it.", "Let me look.\n")
    calls = choice.message.tool_calls
    assert [(call.type, call.function.name) for call in calls] == [
        ("function", "weather"),
        ("function", "time"),
    ]
    assert json.loads(calls[0].function.arguments) == {"city": "Köln"}
    assert len({call.id for call in calls}) == 2


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_stream_adds_up_to_the_whole(service, client, step):
    def streamed() -> list[Any]:
        return list(create(client, tools=TOOLS, stream=True))

    chunks, _ = answered(service, streamed, ANSWER, step)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "Let me look.\n"
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "I need it."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls] == [(0, "weather"), (1, "time")]
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"


def test_only_the_first_call_and_no_reasoning_if_the_client_says_so(service, client):
    def ask() -> Any:
        return create(client, tools=TOOLS, parallel_tool_calls=False, include_reasoning=False)

    answer, _ = answered(service, ask, ANSWER)
    message = answer.choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["weather"]
    assert not hasattr(message, "reasoning")


def test_without_tools_calls_are_text_and_reasoning_still_goes_apart(service, client):
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer, _ = answered(service, lambda fields=fields: create(client, **fields), ANSWER)
        message = answer.choices[0].message
        assert message.content == ANSWER.partition("</think>\n\n")[2]
        assert (message.reasoning, message.tool_calls) == ("I need it.", None)
        assert answer.choices[0].finish_reason == "stop"


def test_a_named_function_is_a_schema_of_the_answer(service, client):
    named = {"type": "function", "function": {"name": "time"}}
    answer, submission = answered(
        service, lambda: create(client, tools=TOOLS, tool_choice=named), '{"zone":"CET"}'
    )
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("time", '{"zone":"CET"}')
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content is None
    grammar = params_of(submission).constraint
    assert '"CET"' in grammar and '"city"' not in grammar


def test_required_calls_are_a_list(service, client):
    text = '[{"name":"weather","parameters":{"city":"Ulm"}}]'
    answer, submission = answered(
        service, lambda: create(client, tools=TOOLS, tool_choice="required"), text
    )
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Ulm"}
    grammar = params_of(submission).constraint
    assert '"weather"' in grammar and '"time"' in grammar


THINKING = replace(MODEL, chat_template=ChatTemplate(
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{{ '<think></think>' if silent else '<think>' if begins }}",
    {},
))  # fmt: skip
"""A model whose prompt ends the reasoning, begins it, or leaves it to the model."""
WEATHER = {"type": "function", "function": {"name": "weather"}}
THOUGHTS = 'Is it {"so"}? </thin no.\n</think>\n\n'
HELD = {
    "named": ({"tools": TOOLS, "tool_choice": WEATHER}, '{"city":"<think>Ulm"}'),
    "required": (
        {"tools": TOOLS, "tool_choice": "required"},
        '[{"name":"weather","parameters":{"city":"<think>Ulm"}}]',
    ),
    "format": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {
            "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}},
        '{"city":"<think>Ulm"}',
    ),
}  # fmt: skip
"""Ways to hold an answer to a form: (fields, an answer)."""


@pytest.fixture(scope="module")
def thinking() -> Iterator[Service]:
    with running(model=THINKING) as service:
        yield service


@pytest.mark.parametrize("how", HELD)
@pytest.mark.parametrize(("asked", "before", "reasoning"), [
    ({"begins": True}, THOUGHTS, 'Is it {"so"}? </thin no.'),
    ({}, "<think>" + THOUGHTS, 'Is it {"so"}? </thin no.'),
    ({}, "", None),
    ({"silent": True}, "", None),
])  # fmt: skip
def test_an_answer_that_is_held_to_a_form_may_come_behind_reasoning(
    thinking, how, asked, before, reasoning
):
    """Markers in the form are text. The row's grammar takes the whole output, token by token."""
    fields, text = HELD[how]
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": asked}
    for step in (1, 1000):
        answer, submission = answered(
            thinking,
            lambda: httpx.post(
                f"{thinking.url}/v1/chat/completions", json=body | fields, timeout=60
            ),
            before + text,
            step,
        )
        message = answer.json()["choices"][0]["message"]
        assert message.get("reasoning") == reasoning, message
        said = message.get("content") or message["tool_calls"][0]["function"]["arguments"]
        assert json.loads(said) == {"city": "<think>Ulm"}
    grammar = params_of(submission).constraint
    matcher = LLMatcher(LLTokenizer(TOKENIZER._tokenizer.to_str(), eos_token=[1]), grammar)
    ids = TOKENIZER.encode(before + text, add_special_tokens=False)
    assert matcher.consume_tokens(ids) and matcher.is_accepting(), matcher.get_error()
    # Until the reasoning has ended, the output cannot.
    matcher.reset()
    for token_id in TOKENIZER.encode(before, add_special_tokens=False):
        assert not matcher.is_accepting()
        matcher.consume_token(token_id)


def test_pydantic_classes_parse(service, client):
    class City(pydantic.BaseModel):
        name: str
        people: int

    answer, submission = answered(
        service,
        lambda: client.chat.completions.parse(
            model="tiny", messages=[{"role": "user", "content": "x"}], response_format=City
        ),
        '{"name":"Ulm","people":129942}',
    )
    assert answer.choices[0].message.parsed == City(name="Ulm", people=129942)
    assert '"people"' in params_of(submission).constraint


def test_earlier_calls_reach_the_template_as_objects(service, client):
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Ulm"}'},
    }
    messages = [
        {"role": "assistant", "content": "q", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "r"},
    ]
    _, submission = answered(service, lambda: create(client, messages=messages), "ok")
    rendered = TOKENIZER.decode(list(submission.prompt_ids))
    assert rendered.startswith('q{"city": "Ulm"}r')


@pytest.mark.parametrize(("fields", "param", "sentence"), [
    ({"tools": [{"type": "x"}]}, "tools", "tools.0 must be"),
    ({"tools": [tool("")]}, "tools", "tools.0 must be"),
    ({"tool_choice": "required"}, "tool_choice", "it needs tools"),
    ({"tool_choice": "required", "tools": []}, "tool_choice", "it needs tools"),
    ({"tool_choice": WEATHER}, "tool_choice", "it needs tools"),
    ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice", "it must be none, auto"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
     "tool_choice", "the tools are weather, time"),
    ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
     "tool_choice", "only one of them can be"),
])  # fmt: skip
def test_a_refusal_names_the_field(client, fields, param, sentence):
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, **fields)
    assert caught.value.param == param and sentence in str(caught.value)


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_no_tools_may_be_chosen_from(service, client, choice, tools):
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    answer, submission = answered(
        service, lambda: create(client, tools=tools, tool_choice=choice), text
    )
    message = answer.choices[0].message
    assert (message.content, message.tool_calls) == (text, None)
    assert not params_of(submission).constraint


def test_a_model_without_a_form_of_calls_says_so():
    plain = ServedModel("tiny", "c", ChatTemplate("{{ messages[0].content }}", {}))
    with running(model=plain) as service:
        client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="EMPTY", max_retries=0)
        with pytest.raises(openai.BadRequestError, match=r"in no known form.*--tool-call-parser"):
            create(client, tools=TOOLS)
        answer, _ = answered(
            service, lambda: create(client, tool_choice="auto"), "<think>x</think> y"
        )
        assert answer.choices[0].message.content == "<think>x</think> y"


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_usage_counts_the_tokens_of_the_reasoning(service, client, step):
    """The tokens between the markers and the last of the marker that ends them, in any batches."""
    whole, _ = answered(service, lambda: create(client, tools=TOOLS), ANSWER, step)
    options = {"include_usage": True}
    *_, last = answered(
        service,
        lambda: list(create(client, tools=TOOLS, stream=True, stream_options=options)),
        ANSWER,
        step,
    )[0]
    reasoning = TOKENIZER.encode("\nI need it.</think>", add_special_tokens=False)
    for usage in (whole.usage, last.usage):
        assert usage.completion_tokens_details.reasoning_tokens == len(reasoning)
        assert usage.completion_tokens > len(reasoning) + 20


@pytest.mark.parametrize("step", [1, 1000])
def test_stop_strings_count_in_the_content_only(service, client, step):
    """Not in reasoning, in markers and in calls: those are whole."""
    stops = ["need", "think>", "city", "</tool_call>", "\n\n"]
    answer, _ = answered(service, lambda: create(client, tools=TOOLS, stop=stops), ANSWER, step)
    (choice,) = answer.choices
    assert (choice.message.reasoning, choice.message.content) == ("I need it.", "Let me look.\n")
    assert len(choice.message.tool_calls) == 2 and choice.finish_reason == "tool_calls"
    for included, content in ((False, "Let me "), (True, "Let me look")):
        extra = {"include_stop_str_in_output": included}
        chunks, _ = answered(
            service,
            lambda extra=extra: list(
                client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": "x"}], tools=TOOLS,
                    stop=["it.", "look"], stream=True, extra_body=extra,
                )
            ),
            ANSWER,
            step,
        )  # fmt: skip
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(delta.content or "" for delta in deltas) == content
        assert "".join(getattr(one, "reasoning", None) or "" for one in deltas) == "I need it."
        assert (chunks[-1].choices[0].finish_reason, chunks[-1].choices[0].stop_reason) == (
            "stop",
            "look",
        )


def test_a_stop_string_does_not_cut_a_call_that_must_be(service, client):
    text = '[{"name":"weather","parameters":{"city":"Ulm"}}]'
    answer, _ = answered(
        service,
        lambda: create(client, tools=TOOLS, tool_choice="required", stop=["Ulm", "{"]),
        f"<think>Ulm</think>\n{text}",
    )
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Ulm"}


@pytest.mark.parametrize("text", ["Write <think> and go </think> on.", "<think>\n\n</think>\n\nHi"])
def test_usage_has_no_reasoning_that_the_answer_has_not(service, client, text):
    answer, _ = answered(service, lambda: create(client), text)
    assert not hasattr(answer.choices[0].message, "reasoning")
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_usage_has_no_reasoning_where_there_can_be_none(service, client):
    answer, _ = answered(service, lambda: create(client, tools=TOOLS, tool_choice="required"), "[]")
    assert answer.usage.completion_tokens_details is None


def test_each_form_of_calls_can_be_chosen_and_nothing_else():
    assert sorted(TOOL_CALL_PARSERS) == sorted(["auto", "none", *CALL_FORMS])
