"""Answers with calls whose values hold calls of every form, and what is right of each.

Each is read whole, in pieces and character by character, and cut anywhere.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from control_plane.frontend.http.tools.answer_parser import AnswerParser, AnswerPart, CallContext
from control_plane.frontend.http.tools.call_forms import CALL_FORMS

Call = tuple[str, dict[str, Any]]
_TEXT = {"type": "string"}
TOOLS = {
    "write_file": {"properties": {"path": _TEXT, "text": _TEXT, "lines": {"type": "array"}}},
    "delete_file": {"properties": {"path": _TEXT}},
    "now": {"properties": {}},
}
_WORDS = ("a", "an example:", "é 😀", '"', "it's", "\\", "{", "}]", "[1, 2]", "<b>", "a < b", "\t",
          "a\n\nb", "<", "</", "<tool", "null", "12", "```", "\\n")  # fmt: skip
_THINK = ("<think>", "</think>")
_TAGS = sorted({tag for form in CALL_FORMS.values() for tag in form.tags if tag[-1] != "="}
               | {"<parameter=q>", "<function=delete_file>", "<arg_key>q</arg_key>\n<arg_value>",
                  "</parameter>\n</function>", "</parameter></parameter>", *_THINK})  # fmt: skip
"""Tags that stand alone in a value. A name that no tool has begins no argument."""


def _dumped(random: Random, value: Any) -> str:
    return json.dumps(value, ensure_ascii=random.random() < 0.5, indent=random.choice((None, 1)))


def _hermes(random: Random, call: Call) -> str:
    gap, (name, arguments) = random.choice(("", "\n", " \n")), call
    body = f'{{"name": "{name}", "arguments": {_dumped(random, arguments)}}}'
    return f"<tool_call>{gap}{body}{gap}</tool_call>"


def _deepseek_v3(random: Random, call: Call) -> str:
    name, arguments = call
    block = f"```json\n{_dumped(random, arguments)}\n```"
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n{block}<｜tool▁call▁end｜>"


def _deepseek_v31(random: Random, call: Call) -> str:
    name, arguments = call
    written = _dumped(random, arguments)
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{written}<｜tool▁call▁end｜>"


def _kimi_k2(random: Random, call: Call) -> str:
    name, arguments = call
    head = f"<|tool_call_begin|>functions.{name}:{random.randrange(20)}"
    written = _dumped(random, arguments)
    return f"{head}<|tool_call_argument_begin|>{written}<|tool_call_end|>"


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _glm(random: Random, call: Call) -> str:
    gap, (name, arguments) = random.choice(("", "\n")), call
    pairs = (
        f"{gap}<arg_key>{key}</arg_key>{gap}<arg_value>{_bare(value)}</arg_value>"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{''.join(pairs)}{gap}</tool_call>"


def _qwen3_coder(random: Random, call: Call) -> str:
    name, arguments = call
    quote, gap = random.choice(("", "", '"', "'")), random.choice(("", "\n", "\n"))
    pairs = [
        f"<parameter={quote}{key}{quote}>\n{_bare(value)}\n</parameter>{gap}"
        for key, value in arguments.items()
    ]
    body = f"<function={quote}{name}{quote}>{gap}{''.join(pairs)}</function>{gap}</tool_call>"
    # What ends within a value where no call has begun would end one that begins so.
    is_whole = "</function>" in "".join(pairs) or random.random() < 0.8
    return f"<tool_call>{gap}{body}" if is_whole else body


WRITERS: dict[str, Callable[[Random, Call], str]] = {
    "hermes": _hermes, "deepseek_v3": _deepseek_v3, "deepseek_v31": _deepseek_v31,
    "kimi_k2": _kimi_k2, "glm45": _glm, "glm47": _glm, "qwen3_coder": _qwen3_coder,
}  # fmt: skip


def _value(random: Random, depth: int) -> str:
    """Words, and between them tags and whole calls."""
    pieces = [random.choice(_WORDS)]
    for _ in range(random.randrange(4)):
        if random.random() < 0.4 and depth:
            form = random.choice(list(WRITERS))
            written = [WRITERS[form](random, _call(random, depth - 1)) for _ in range(2)]
            pieces.append(random.choice(("", " ", "\n")).join(written[: random.choice((1, 1, 2))]))
        elif random.random() < 0.6:
            pieces.append(random.choice(_TAGS))
        pieces += [random.choice(("x", " x ", "x\n")), random.choice(_WORDS)]
    return "".join(pieces)


def _call(random: Random, depth: int) -> Call:
    name = random.choice(list(TOOLS))
    keys = list(TOOLS[name]["properties"])
    chosen = keys[: random.randrange(len(keys) + 1)]
    values = {
        key: [_value(random, depth), 3] if key == "lines" else _value(random, depth)
        for key in chosen
    }
    return name, values


@dataclass
class Answer:
    """An answer, and its parts."""

    form: str
    text: str = ""
    begins_inside: bool = False
    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Where each call ends in the text."""
    is_plain: bool = True
    """Whether no reasoning has a call in it, or ends with one."""


def make_answer(random: Random) -> Answer:
    """An answer of one form: reasoning with drafts, text and calls."""
    answer = Answer(random.choice(list(WRITERS)))
    write = WRITERS[answer.form]
    way = random.choice(("none", "thinks", "inside", "unended"))
    if way != "none":
        answer.begins_inside = way == "inside" or random.random() < 0.5
        answer.text = "" if answer.begins_inside else "<think>"
        answer.reasoning = "hm" + random.choice(("", " so x"))
        answer.is_plain = way != "unended" and random.random() < 0.5
        if way != "unended" and not answer.is_plain:
            answer.reasoning += f" {write(random, _call(random, 1))} no"
        answer.text += answer.reasoning + ("\n" if way == "unended" else "</think>")
    if way != "unended" and random.random() < 0.5:
        answer.content = "Look: "
    answer.text += answer.content
    section = CALL_FORMS[answer.form].section
    answer.text += section[0] if section else ""
    for _ in range(random.randrange(1, 3)):
        call = _call(random, 2)
        answer.calls.append(call)
        answer.text += write(random, call)
        answer.ends.append(len(answer.text))
    answer.text += section[1] if section else ""
    if random.random() < 0.3:
        answer.text += " Done."
        answer.content += " Done."
    return answer


def parts_of(answer: Answer, pieces: list[str], is_cut: bool | None = None) -> list[AnswerPart]:
    """The parts of an answer that comes in pieces. is_cut: None if nobody says it."""
    context = CallContext(CALL_FORMS[answer.form], TOOLS)
    has_reasoning = bool(answer.reasoning)
    parser = AnswerParser(context, has_reasoning, answer.begins_inside)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return parts + (parser.finish() if is_cut is None else parser.finish(is_cut))


def read(parts: list[AnswerPart]) -> tuple[str, str, list[Call]]:
    """Reasoning, content, and calls."""
    texts = ["".join(one.text for one in parts if one.kind.value == kind)
             for kind in ("reasoning", "content")]  # fmt: skip
    calls = [(one.call.name, json.loads(one.call.arguments)) for one in parts if one.call]
    return texts[0], texts[1], calls


def play(seed: int) -> Answer:
    """Check one answer. Raises AssertionError."""
    random = Random(seed)
    answer = make_answer(random)
    text, shown = answer.text, f"{answer}"
    whole = read(parts_of(answer, [text]))
    assert whole[2] == answer.calls, shown
    assert whole[:2] == (answer.reasoning, answer.content), shown
    cuts = sorted(random.choices(range(len(text) + 1), k=8))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(parts_of(answer, pieces)) == whole == read(parts_of(answer, list(text))), shown
    for end in random.choices(range(len(text)), k=6):
        num_ended = sum(one <= end for one in answer.ends)
        for is_cut in (None, True) if answer.is_plain else (True,):
            found = read(parts_of(answer, [text[:end]], is_cut))[2]
            # The last one may be whole before its last tag; those within reasoning may be drafts.
            allowed = [answer.calls[:num_ended], answer.calls[: num_ended + 1]]
            assert found in allowed or (not answer.is_plain and not found), (end, is_cut, shown)
    return answer
