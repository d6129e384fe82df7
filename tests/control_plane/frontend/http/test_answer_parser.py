"""Parts of an answer: each family's form is read, and any cutting of the text gives the same."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.frontend.http.answer_parser import (
    CALL_FORMS,
    AnswerParser,
    AnswerPart,
    ForcedCallsParser,
    PartKind,
    call_form_of,
)

ARGUMENTS = {"city": "Köln", "days": 3, "deep": {"a": [1, None]}}
WRITTEN = json.dumps(ARGUMENTS, ensure_ascii=False)
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {WRITTEN}}}\n</tool_call>',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    f"```json\n{WRITTEN}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    f"{WRITTEN}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:4"
    f"<|tool_call_argument_begin|>{WRITTEN}<|tool_call_end|><|tool_calls_section_end|>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>deep</arg_key>\n"
    '<arg_value>{"a": [1, null]}</arg_value>\n</tool_call>',
}


def parsed(pieces: list[str], form: str, begins_inside: bool = False) -> list[AnswerPart]:
    """The parts of an answer, neighbours of a kind joined, without ids that are drawn."""
    parser = AnswerParser(CALL_FORMS[form], True, begins_inside)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    joined: list[AnswerPart] = []
    for part in parts:
        if part.call and part.call.id.startswith("chatcmpl-tool-"):
            part = replace(part, call=replace(part.call, id="drawn"))
        if joined and not part.call and joined[-1].kind is part.kind:
            joined[-1] = replace(part, text=joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize("form", CALLS)
def test_each_form_is_read(form: str) -> None:
    text = f"<think>\nHm.\n</think>\n\nI ask.\n{CALLS[form]}\n{CALLS[form]}"
    reasoning, content, *calls = parsed([text], form)
    assert (reasoning.kind, reasoning.text) == (PartKind.REASONING, "Hm.")
    assert (content.kind, content.text) == (PartKind.CONTENT, "I ask.")
    assert [part.kind for part in calls] == [PartKind.CALL] * 2
    for part in calls:
        assert part.call and part.call.name == "weather"
        assert json.loads(part.call.arguments) == ARGUMENTS
        assert part.call.id == ("functions.weather:4" if form == "kimi_k2" else "drawn")


@pytest.mark.parametrize("form", CALLS)
def test_the_text_after_a_call_is_content(form: str) -> None:
    call, content = parsed([CALLS[form] + "\n  Done. "], form)
    assert call.call and content.text == "Done. "


MARKERS = sorted(
    {marker for form in CALL_FORMS.values() for marker in (form.begin, form.end, *form.section)}
)
PIECES = st.sampled_from(
    [
        *CALLS.values(),
        *MARKERS,
        "<think>",
        "</think>",
        "<thi",
        " ",
        "\n",
        "a",
        "<b>",
        '{"',
        "é",
        "<",
    ]
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(PIECES, max_size=8).map("".join),
    st.sampled_from(sorted(CALLS)),
    st.booleans(),
    st.data(),
)
def test_any_cutting_of_a_text_parses_to_what_the_whole_does(
    text: str, form: str, begins_inside: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(pieces, form, begins_inside) == parsed([text], form, begins_inside)
    assert parsed(list(text), form, begins_inside) == parsed([text], form, begins_inside)


@settings(max_examples=100, deadline=None)
@given(st.text("<>/ab \n", max_size=30))
def test_a_text_without_markers_is_the_content(text: str) -> None:
    shown = "".join(part.text for part in parsed(list(text), "hermes"))
    assert shown == text


@pytest.mark.parametrize(
    ("form", "broken"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"a": </tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>[1]</tool_call>"),
        ("hermes", '<tool_call>{"name": "weather"'),
        ("kimi_k2", "<|tool_call_begin|>?<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>weather{}<｜tool▁call▁end｜>"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}<｜tool▁call▁end｜>"),
        ("glm45", "<tool_call>no name here\n</tool_call>"),
    ],
)
def test_what_is_no_call_stays_content(form: str, broken: str) -> None:
    parts = parsed(["Look: ", broken], form)
    assert all(part.kind is PartKind.CONTENT for part in parts)
    assert "".join(part.text for part in parts).replace(" ", "") == f"Look:{broken}".replace(
        " ", ""
    )


def test_a_prompt_may_begin_the_reasoning() -> None:
    reasoning, content = parsed(["so\n</think>\n\nYes"], "hermes", begins_inside=True)
    assert (reasoning.text, content.text) == ("so", "Yes")
    (cut,) = parsed(["so it"], "hermes", begins_inside=True)
    assert (cut.kind, cut.text) == (PartKind.REASONING, "so it")


def test_the_form_is_told_by_the_template() -> None:
    assert call_form_of("{{ '<|tool_calls_section_begin|>' }}") == "kimi_k2"
    assert call_form_of("<｜tool▁calls▁begin｜> ```json") == "deepseek_v3"
    assert call_form_of("<｜tool▁calls▁begin｜>") == "deepseek_v31"
    assert call_form_of("<tool_call> <arg_key>") == "glm45"
    assert call_form_of("<tool_call>") == "hermes"
    assert call_form_of("{{ messages }}") == ""


def test_forced_calls() -> None:
    parser = ForcedCallsParser(None, AnswerParser(None, False, False))
    text = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    assert [part for character in text for part in parser.feed(character)] == []
    calls = [part.call for part in parser.finish()]
    assert [(call.name, call.arguments) for call in calls if call] == [
        ("f", '{"a": 1}'),
        ("g", "{}"),
    ]
    cut = ForcedCallsParser("f", AnswerParser(None, False, False))
    cut.feed('{"a": ')
    assert cut.finish() == [AnswerPart(PartKind.CONTENT, '{"a": ')]
