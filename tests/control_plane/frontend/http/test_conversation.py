"""Conversations reach every template as it reads them, whatever form their clients gave them."""

import json
from typing import Any

import pytest

from control_plane.frontend.http.errors import ApiError
from control_plane.frontend.http.protocol import Message
from control_plane.frontend.http.tools.chat_template import ChatTemplate
from control_plane.frontend.http.tools.conversation import conversation
from control_plane.frontend.http.tools.template_habits import habits_of
from harness.services.frontend_fakes import TOKENIZER
from harness.vllm.call_templates import FORMS, TOOLS, asked, call

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {name: ChatTemplate(source, TOKENS) for name, (source, _) in FORMS.items()}


def rendered(name: str, messages: list[dict[str, Any]], **options: Any) -> str:
    template = TEMPLATES[name]
    prepared = conversation([Message(**one) for one in messages], template)
    return template.render(prepared, tools=TOOLS, **options)


def by_transformers(name: str, messages: list[dict[str, Any]]) -> str:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(
        tokenizer_object=TOKENIZER._tokenizer, chat_template=FORMS[name][0], **TOKENS
    )
    text: str = reference.apply_chat_template(
        messages, tools=TOOLS, tokenize=False, add_generation_prompt=True
    )
    return text


@pytest.mark.parametrize("name", FORMS)
def test_the_form_of_calls_is_the_one_that_reads_what_the_template_writes(name):
    assert habits_of(TEMPLATES[name]).call_form == FORMS[name][1]


OPEN_EXAMPLES = {
    "glm": "<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>",
    "qwen": "<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n...\n</tool_call>",
    "name": "Begin with <function=name><parameter=key>.",
    "hermes": 'Begin with <tool_call>{"name.',
    "kimi": "Begin with <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{",
    "deepseek": "Begin with <｜tool▁call▁begin｜>name<｜tool▁sep｜>{",
}


@pytest.mark.parametrize("example", OPEN_EXAMPLES)
@pytest.mark.parametrize("name", FORMS)
def test_an_example_that_does_not_end_hides_no_form(name, example):
    source, form = FORMS[name]
    shown = "{% raw %}" + OPEN_EXAMPLES[example] + "\n{% endraw %}"
    assert habits_of(ChatTemplate(shown + source, TOKENS)).call_form == form


WRITTEN = '{"city": "Köln", "deep": {"a": [1, null]}}'


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("content", [None, "", "So."])
def test_a_second_turn_renders_as_transformers_does(name, content):
    """Arguments are objects, as transformers documents it, or a text where only that renders."""
    takes_text = name in ("deepseek_r1", "functionary")
    plain = asked(WRITTEN if takes_text else json.loads(WRITTEN), content or "")
    expected = by_transformers(name, plain)
    if (name, content) == ("deepseek_r1", None):
        # transformers leaves a null out, and the template then prints no call.
        expected = TEMPLATES[name].render([*plain[:2], {**plain[2], "content": None}, plain[3]],
                                          tools=TOOLS)  # fmt: skip
    assert rendered(name, asked(WRITTEN, content)) == expected
    assert rendered(name, asked(f" {WRITTEN}\n", content)) == expected
    assert rendered(name, asked(json.loads(WRITTEN), content)) == expected
    if FORMS[name][1] and (name, content) not in (("deepseek_r1", ""), ("deepseek_r1", "So.")):
        assert "Köln" in expected and "None" not in expected


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("sent", ["", "null", "[]", '"a"', "5", '{"city": ', None, [], "[" * 5000])
def test_arguments_that_are_no_object_are_none(name, sent):
    assert rendered(name, asked(sent)) == rendered(name, asked("{}"))


@pytest.mark.parametrize("name", FORMS)
def test_what_clients_echo_renders_as_if_it_was_not_there(name):
    answer = {"role": "assistant", "content": "Yes."}
    echoed = {**answer, "tool_calls": [], "refusal": None, "function_call": None, "audio": None}
    user = {"role": "user", "content": "So?"}
    assert rendered(name, [user, echoed, user]) == rendered(name, [user, answer, user])
    bare = [{"function": {"name": "weather", "arguments": WRITTEN}, "id": "functions.weather:0"}]
    whole = asked(WRITTEN)
    assert rendered(name, [*whole[:2], {**whole[2], "tool_calls": bare}]) == rendered(
        name, whole[:3]
    )


PARTS = [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_parts_are_passed_to_templates_that_take_them(name, role):
    messages = [{"role": role, "content": PARTS}, {"role": "user", "content": "So?"}]
    takes = name == "glm45" or (name, role) == ("glm47", "user")
    joined = [{"role": role, "content": "OneTwo" if takes else "One\nTwo"}, messages[1]]
    assert rendered(name, messages) == rendered(name, joined)
    one = [{"role": role, "content": PARTS[:1]}, messages[1]]
    assert rendered(name, one) == rendered(name, [{"role": role, "content": "One"}, messages[1]])
    none = [{"role": role, "content": []}, messages[1]]
    assert rendered(name, none) == rendered(name, [{"role": role, "content": ""}, messages[1]])


def test_a_developer_is_the_system_for_templates_that_do_not_know_one():
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "So?"}]
    as_system = [{**messages[0], "role": "system"}, messages[1]]
    for name in FORMS:
        assert rendered(name, messages) == rendered(name, as_system)
        assert "Be brief." in rendered(name, messages)
    source = FORMS["qwen3"][0].replace("<tools>", "<tools of the developer>")
    knows = ChatTemplate(source, {})
    assert "<developer>" in knows.render(conversation([Message(**m) for m in messages], knows))


def test_a_refusal_of_the_assistant_is_its_text():
    refusal = [{"type": "refusal", "refusal": "No."}]
    assert "<assistant>No." in rendered("qwen3", [{"role": "assistant", "content": refusal}])


@pytest.mark.parametrize(("message", "sentence"), [
    ({"role": "user", "content": [{"type": "refusal", "refusal": "No."}]},
     "messages.0.content has a part of type 'refusal'; only text parts are supported"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
     "has a part of type 'image_url'; only text parts"),
    ({"role": "assistant", "content": [{"type": "image_url"}]},
     "only text and refusal parts are supported"),
    ({"role": "user", "content": [{"type": "text"}]},
     "has a part of type 'text' without text; it must be a text"),
    ({"role": "assistant", "tool_calls": ["a"]}, "messages.0.tool_calls.0 is no call"),
    ({"role": "assistant", "tool_calls": [call("{}"), {"function": 5}]}, "tool_calls.1 is no"),
])  # fmt: skip
def test_what_is_no_message_is_named(message, sentence):
    with pytest.raises(ApiError, match=sentence):
        conversation([Message(**message)], TEMPLATES["qwen3"])
