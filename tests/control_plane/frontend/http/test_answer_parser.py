"""Parts of an answer: each family's form is read, and any cutting of the text gives the same."""

import json
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.frontend.http.tools.answer_parser import (
    AnswerParser,
    AnswerPart,
    CallContext,
    PartKind,
)
from control_plane.frontend.http.tools.call_forms import CALL_FORMS
from control_plane.frontend.http.tools.forced_calls import ForcedCallsParser
from harness.services.nested_calls import play

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
    "glm47": "<tool_call>weather<arg_key>city</arg_key><arg_value>Köln</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value><arg_key>deep</arg_key>"
    '<arg_value>{"a": [1, null]}</arg_value></tool_call>',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n"
    '<parameter=deep>\n{"a": [1, null]}\n</parameter>\n</function>\n</tool_call>',
}
TOOLS = {
    "weather": {"type": "object",
                "properties": {"city": {"type": "string"},
                               "days": {"$ref": "#/$defs/days"},
                               "deep": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                               "either": {"type": ["string", "integer", "boolean", "null"]},
                               "one": {"enum": ["1", "one"]},
                               "mixed": {"enum": ["1", 2]},
                               "flag": {"type": "boolean"},
                               "list": {"allOf": [{"type": "array"}], "description": "Some."},
                               "number": {"type": "number"},
                               "odd": {"type": "float"}},
                "$defs": {"days": {"type": "integer"}}}
}  # fmt: skip


def parsed(pieces: list[str], form: str, begins_inside: bool = False) -> list[AnswerPart]:
    """The parts of an answer, neighbours of a kind joined, without ids that are drawn."""
    parser = AnswerParser(CallContext(CALL_FORMS[form], TOOLS, 7), True, begins_inside)
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
def test_each_form_is_read(form):
    text = f"<think>\nHm.\n</think>\n\nI ask.\n{CALLS[form]}\n{CALLS[form]}"
    reasoning, content, *calls = parsed([text], form)
    assert (reasoning.kind, reasoning.text) == (PartKind.REASONING, "Hm.")
    assert (content.kind, content.text) == (PartKind.CONTENT, "I ask.\n")
    assert [part.kind for part in calls] == [PartKind.CALL] * 2
    for part in calls:
        assert part.call and part.call.name == "weather"
        assert json.loads(part.call.arguments) == ARGUMENTS
        assert part.call.id == ("functions.weather:4" if form == "kimi_k2" else "drawn")


@pytest.mark.parametrize("form", CALLS)
def test_the_text_around_calls_is_content_with_its_white_space(form):
    before, call, behind = parsed([f" Look \n{CALLS[form]}\n  Done. "], form)
    assert call.call and (before.text, behind.text) == (" Look \n", "\n  Done. ")
    # What is between calls, and nothing but white space, is layout.
    parts = parsed([f"\n\n{CALLS[form]}\n{CALLS[form]}\n"], form)
    assert [part.kind for part in parts] == [PartKind.CALL] * 2
    assert parsed(["<think>a</think>\n\n" + CALLS[form] + " "], form)[1:] == parts[:1]


MARKERS = sorted(
    {marker for form in CALL_FORMS.values() for marker in (*form.begins, form.end, *form.section)}
)
PIECES = st.sampled_from([
    *CALLS.values(), *MARKERS, "<think>", "</think>", "<thi", " ", "\n", "a", "<b>", '{"',
    '{"name": "f", "arguments": {"a": "', "</arg_value>", "</parameter>", "é", "<",
])  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.lists(PIECES, max_size=8).map("".join), st.sampled_from(sorted(CALLS)), st.booleans(),
    st.data(),
)  # fmt: skip
def test_any_cutting_of_a_text_parses_to_what_the_whole_does(text, form, begins_inside, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(pieces, form, begins_inside) == parsed([text], form, begins_inside)
    assert parsed(list(text), form, begins_inside) == parsed([text], form, begins_inside)


@settings(max_examples=100, deadline=None)
@given(st.text("<>/ab \n", max_size=30))
def test_a_text_without_markers_is_the_content(text):
    shown = "".join(part.text for part in parsed(list(text), "hermes"))
    assert shown == text


BROKEN = {
    "hermes": [
        '<tool_call>{"name": "weather", "arguments": {"a": </tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"name": 5}</tool_call>',
        "<tool_call>[1]</tool_call>", '<tool_call>{"name": "weather"',
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": -Infinity}}</tool_call>',
        '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{\\"s\\": \\"\\ud83d\\"}"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>',
        f'<tool_call>{{"name": "f", "arguments": {{"x": {"[" * 5000}{"]" * 5000}}}}}</tool_call>',
    ],
    "kimi_k2": [
        "<|tool_call_begin|>? !<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "<|tool_call_begin|>functions.f:0{}<|tool_call_end|>",
        '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": NaN}<|tool_call_end|>',
    ],
    "deepseek_v31": ["<｜tool▁call▁begin｜>weather{}<｜tool▁call▁end｜>",
                     "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[]<｜tool▁call▁end｜>"],
    "deepseek_v3": ["<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}<｜tool▁call▁end｜>",
                    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}<｜tool▁call▁end｜>"],
    "glm45": ["<tool_call>no name here\n</tool_call>",
              "<tool_call>delete\n<arg_key>dir</arg_key>\n<arg_value>/</arg_value>\n"
              "<arg_key>only</arg_key>\n<arg_value>*.tmp\n</tool_call>",
              "<tool_call>delete\n<arg_key>dir</arg_key>\n<arg_value>/\n"
              "<arg_key>only</arg_key>\n<arg_value>*.tmp</arg_value>\n</tool_call>",
              "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\nthat is\n</tool_call>",
              "<tool_call>f\n<arg_key>a</arg_key><arg_value>1</arg_value>"
              "<arg_key>a</arg_key><arg_value>2</arg_value></tool_call>",
              "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>"],
    "qwen3_coder": [
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>",
        "<tool_call>\n<function=f\n<parameter=a>1</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        "the <function=NAME> tag",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("form", "broken"), [(f, one) for f in BROKEN for one in BROKEN[f]])
def test_what_is_no_call_stays_content(form, broken):
    assert parsed(["Look:  ", broken, " "], form) == [
        AnswerPart(PartKind.CONTENT, f"Look:  {broken} ")
    ]
    if not broken.endswith(("<arg_value>1</arg_value>", '"weather"')):
        # A whole call behind it is one.
        *_, call = parsed([broken, CALLS[form]], form)
        assert call.call and call.call.name == "weather"


HERMES = '<tool_call>{{"name": "f", "arguments": {}}}</tool_call>'
KIMI = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
GLM = "<tool_call>weather<arg_key>{}</arg_key><arg_value>{}</arg_value></tool_call>"
QWEN = "<tool_call>\n<function=weather>\n<parameter={}>{}</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(("form", "text", "arguments"), [
    # As the model wrote it, whatever a number is.
    ("hermes", HERMES.format('{"x":  1e999, "s": "\\ud83d"}'), '{"x":  1e999, "s": "\\ud83d"}'),
    ("hermes", HERMES.format('{"x": ' + "9" * 6000 + "}"), '{"x": ' + "9" * 6000 + "}"),
    # No arguments, and an object in a string.
    ("hermes", HERMES.format("null"), "{}"),
    ("hermes", HERMES.format('""'), "{}"),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "{}"),
    ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', '{"a": 1}'),
    ("hermes", HERMES.format('"{\\"a\\": 1}"'), '{"a": 1}'),
    ("kimi_k2", KIMI.format("functions.weather:4", " "), "{}"),
    ("deepseek_v31", CALLS["deepseek_v31"].replace(WRITTEN, ""), "{}"),
    ("deepseek_v3", CALLS["deepseek_v3"].replace(WRITTEN, "null"), "{}"),
    # An end marker in a string, and none at the end of the answer.
    ("hermes", HERMES.format('{"a": "</tool_call>"}'), '{"a": "</tool_call>"}'),
    ("hermes", HERMES.format('{"a": 1}').removesuffix("</tool_call>"), '{"a": 1}'),
    ("glm47", GLM.format("city", "</tool_call> "), '{"city": "</tool_call> "}'),
    ("qwen3_coder", QWEN.format("city", "</tool_call>"), '{"city": "</tool_call>"}'),
    ("qwen3_coder", QWEN.format("city", "Ulm").removesuffix("</tool_call>"), '{"city": "Ulm"}'),
    ("qwen3_coder", QWEN.format("city", "Ulm").removeprefix("<tool_call>"), '{"city": "Ulm"}'),
    ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>", "{}"),
    ("glm47", "<tool_call>f</tool_call>", "{}"),
    ("glm45", "<tool_call>f\n</tool_call>", "{}"),
    # Types are the schema's.
    ("glm47", GLM.format("city", "12345"), '{"city": "12345"}'),
    ("glm47", GLM.format("city", "true"), '{"city": "true"}'),
    ("glm47", GLM.format("city", "null"), '{"city": "null"}'),
    ("glm47", GLM.format("city", '{"a": 1}'), '{"city": "{\\"a\\": 1}"}'),
    ("glm47", GLM.format("city", '"\\ud83d"'), '{"city": "\\"\\\\ud83d\\""}'),
    ("glm47", GLM.format("city", " a "), '{"city": " a "}'),
    ("glm47", GLM.format("days", " 5\n"), '{"days": 5}'),
    ("glm47", GLM.format("days", "5.0"), '{"days": 5.0}'),
    ("glm47", GLM.format("days", "5.5"), '{"days": "5.5"}'),
    ("glm47", GLM.format("days", "five"), '{"days": "five"}'),
    ("glm47", GLM.format("number", "5"), '{"number": 5}'),
    ("glm47", GLM.format("number", "1e999"), '{"number": 1e999}'),
    ("glm47", GLM.format("number", "NaN"), '{"number": "NaN"}'),
    ("glm47", GLM.format("either", "5"), '{"either": 5}'),
    ("glm47", GLM.format("either", "null"), '{"either": null}'),
    ("glm47", GLM.format("either", "5.5"), '{"either": "5.5"}'),
    ("glm47", GLM.format("one", "1"), '{"one": "1"}'),
    ("glm47", GLM.format("mixed", "2"), '{"mixed": 2}'),
    ("glm47", GLM.format("deep", "null"), '{"deep": null}'),
    ("glm47", GLM.format("deep", "[1]"), '{"deep": "[1]"}'),
    ("glm47", GLM.format("list", "[NaN]"), '{"list": "[NaN]"}'),
    ("glm47", GLM.format("odd", "3.14"), '{"odd": 3.14}'),
    ("glm47", GLM.format("unknown", "NaN"), '{"unknown": "NaN"}'),
    ("glm47", GLM.format("unknown", "[1]"), '{"unknown": [1]}'),
    ("qwen3_coder", QWEN.format("flag", "True"), '{"flag": true}'),
    ("qwen3_coder", QWEN.format("deep", "None"), '{"deep": null}'),
    ("qwen3_coder", QWEN.format("city", "None"), '{"city": "None"}'),
    ("qwen3_coder", QWEN.format("city", "\n  a\n\n"), '{"city": "  a\\n"}'),
    ("qwen3_coder", QWEN.format("city", "\n\n"), '{"city": ""}'),
])  # fmt: skip
def test_arguments_are_json_of_the_tools_types(form, text, arguments):
    (part,) = parsed([text], form)
    assert part.call and part.call.arguments == arguments
    assert parsed(list(text), form) == [part]


def test_a_value_that_holds_tags_and_calls_of_every_form_is_one_value():
    """`make seeds KIND=calls` plays more."""
    for seed in range(500):
        play(seed)


NOW = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
ONE = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"


@pytest.mark.parametrize(
    ("form", "key", "text", "expected"),
    [
        # Names that the tool does not know are text, and so are those that it has already.
        ("qwen3_coder", "city", "a</parameter>\n<parameter=q>\nb", "whole"),
        ("qwen3_coder", "city", "see <parameter=city> and <parameter=q>", "whole"),
        ("glm47", "city", "a</arg_value><arg_key>q</arg_key><arg_value>b", "whole"),
        # Calls and arguments that are whole belong to the value.
        ("qwen3_coder", "city", f"{NOW} and {NOW.removeprefix('<tool_call>')}", "whole"),
        ("qwen3_coder", "city", "<parameter=days>1</parameter>\n<parameter=days>2</parameter>",
         "whole"),
        ("glm47", "city", f"{ONE}{ONE} </tool_call> {ONE}", "whole"),
        # An end that is missing is not guessed.
        ("qwen3_coder", "city", "a <parameter=days> b", "none"),
        ("glm47", "city", "a<arg_key>days</arg_key><arg_value>1", "none"),
        # A call that has begun and does not end leaves it open which end is whose.
        ("qwen3_coder", "city", NOW[: NOW.index("</parameter>")], "none"),
        ("glm47", "city", ONE[: ONE.index("</arg_value>")], "none"),
    ],
)  # fmt: skip
def test_what_a_tag_within_a_value_means(form, key, text, expected):
    whole = (QWEN if form == "qwen3_coder" else GLM).format(key, text)
    for parts in (parsed([whole], form), parsed(list(whole), form)):
        calls = [json.loads(part.call.arguments) for part in parts if part.call]
        assert calls == ([{key: text}] if expected == "whole" else [])


def test_quotes_around_a_name_are_none_of_it():
    for quote in "'\"":
        text = QWEN.replace("=weather", f"={quote}weather{quote}").format(f"{quote}days{quote}", 3)
        (part,) = parsed([text], "qwen3_coder")
        assert part.call and (part.call.name, part.call.arguments) == ("weather", '{"days": 3}')


def test_a_call_that_max_tokens_cut_is_none():
    cut = {
        "kimi_k2": "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>",
        "deepseek_v31": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>",
        # What ends here may be a value's.
        "glm45": f"<tool_call>f<arg_key>a</arg_key><arg_value>{ONE}",
        "qwen3_coder": QWEN.format("city", NOW).rpartition("\n</tool_call>")[0],
    }
    for form, text in cut.items():
        parser = AnswerParser(CallContext(CALL_FORMS[form], TOOLS))
        parts = parser.feed(text) + parser.finish(is_cut=True)
        assert [(part.kind, part.text) for part in parts] == [(PartKind.CONTENT, text)]


@pytest.mark.parametrize("form", CALLS)
def test_the_end_of_reasoning_within_a_value_is_the_values(form):
    call = CALLS[form].replace("Köln", "a </think> b")
    reasoning, found = parsed([f"hm\n{call}"], form, begins_inside=True)
    assert reasoning.text == "hm" and found.call and "</think>" in found.call.arguments
    # A call that does not go on is a draft, and the reasoning ends there.
    draft = call.partition(" </think>")[0]
    reasoning, content, found = parsed([f"hm\n{draft}</think>Yes{CALLS[form]}"], form, True)
    assert (reasoning.text, content.text) == (f"hm\n{draft}", "Yes") and found.call


@pytest.mark.parametrize("form", CALLS)
def test_a_value_of_a_megabyte_is_read_in_the_time_of_its_length(form):
    tags = {"qwen3_coder": "</parameter></function>", "glm47": "</arg_value> <arg_key>"}
    tag = tags.get(form, CALL_FORMS[form].end) + " "
    seconds = []
    for size in (20_000, 160_000):
        text = CALLS[form].replace("Köln", tag * (size // len(tag)) + "x")
        begin_s = time.process_time()
        (part,) = parsed([text[at : at + 4] for at in range(0, len(text), 4)], form)
        seconds.append(time.process_time() - begin_s)
        assert part.call and len(part.call.arguments) > size - 100
    # Eight times the length takes 64 times as long if each piece is looked at again.
    assert seconds[1] < 24 * seconds[0]


def test_an_id_that_the_model_writes_is_kept_and_an_odd_one_becomes_one():
    ids = {
        "functions.weather:4": "functions.weather:4",
        "weather:0": "weather:0",
        "functionsweather5": "functions.weather:7",
        "functions_weather_1": "functions.weather:7",
        "weather": "functions.weather:7",
    }
    for written, expected in ids.items():
        (part,) = parsed([KIMI.format(written, "{}")], "kimi_k2")
        assert part.call and (part.call.id, part.call.name) == (expected, "weather")


def test_a_call_ends_the_reasoning_if_nothing_else_does():
    for form, call in CALLS.items():
        reasoning, found = parsed([f"<think>hm\n{call}"], form)
        assert (reasoning.kind, reasoning.text) == (PartKind.REASONING, "hm")
        assert found.call and found.call.name == "weather"
        reasoning, found, content = parsed([f"hm {call} So."], form, begins_inside=True)
        assert (reasoning.text, content.text) == ("hm", " So.") and found.call
        draft, content = parsed([f"hm {call} no</think>Yes"], form, begins_inside=True)
        assert (draft.text, content.text) == (f"hm {call} no", "Yes")
    mention = 'the <tool_call> of <tool_call>{"name": no, </tool_call> '
    (thought,) = parsed([mention], "hermes", begins_inside=True)
    assert thought == AnswerPart(PartKind.REASONING, mention)


def test_a_prompt_may_begin_the_reasoning():
    reasoning, content = parsed(["so\n</think>\n\nYes"], "hermes", begins_inside=True)
    assert (reasoning.text, content.text) == ("so", "Yes")
    (cut,) = parsed(["so it"], "hermes", begins_inside=True)
    assert (cut.kind, cut.text) == (PartKind.REASONING, "so it")


LIST = '[{"name":"f","parameters":{"a":"}]\\""}},{"name":"g","parameters":{}}]'


def forced(text: str, name: str | None = None) -> list[list[AnswerPart]]:
    """The parts that each character completes, and at last what is left."""
    plain = AnswerParser(CallContext(), False)
    parser = ForcedCallsParser(name, plain, CALL_FORMS["kimi_k2"].new_id, 3)
    return [parser.feed(character) for character in text] + [parser.finish()]


def test_each_forced_call_comes_when_it_is_complete():
    parts = forced(LIST)
    calls = [(at, part.call) for at, some in enumerate(parts) for part in some]
    first, last = LIST.index("}},{"), len(LIST) - 1
    assert [at for at, _ in calls] == [first + 1, last - 1]
    assert [(call.id, call.name, call.arguments) for _, call in calls if call] == [
        ("functions.f:3", "f", '{"a":"}]\\""}'),
        ("functions.g:4", "g", "{}"),
    ]
    (*_, (call,), _) = forced('{"a":1}', "f")
    assert call.call and (call.call.name, call.call.arguments) == ("f", '{"a":1}')


def test_what_max_tokens_cut_of_forced_calls_is_content():
    (*_, rest) = forced('{"a": ', "f")
    assert rest == [AnswerPart(PartKind.CONTENT, '{"a": ')]
    (*_, rest) = forced(LIST[:-4])
    assert rest == [AnswerPart(PartKind.CONTENT, '{"name":"g","parameters":')]
    assert sum(bool(some) for some in forced(LIST[:-4])) == 2
    (*_, rest) = forced('[{"na')
    assert rest == [AnswerPart(PartKind.CONTENT, '[{"na')]


def test_forced_arguments_may_be_nested_as_deep_as_they_are():
    deep = '{"x":' + "[" * 5000 + "]" * 5000 + "}"
    (*_, (call,), _) = forced(deep, "f")
    assert call.call and call.call.arguments == deep


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "glm45"])
def test_markers_without_end_cost_no_more_than_their_length(form):
    """What is held is looked at a bounded number of times."""
    for text in ("<tool_call>" * 50_000, '<tool_call>{"a": "' + "</tool_call>" * 5_000):
        (part,) = parsed([text[at : at + 1000] for at in range(0, len(text), 1000)], form)
        assert part == AnswerPart(PartKind.CONTENT, text)
    *_, call = parsed(["<tool_call>" * 9 + CALLS[form]], form)
    assert call.call and call.call.name == "weather"
