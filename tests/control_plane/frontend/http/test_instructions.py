"""System and developer messages reach templates that refuse or lose them, at their place."""

import random
from itertools import pairwise
from typing import Any

import pytest

from control_plane.frontend.http.protocol import Message
from control_plane.frontend.http.tools.chat_template import ChatTemplate
from control_plane.frontend.http.tools.conversation import conversation
from control_plane.frontend.http.tools.template_habits import habits_of
from harness.services.tale_models import TEMPLATES as FOLDER
from harness.vllm.call_templates import FORMS, TOOLS, call

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
# Takes the two roles, and only one message of them, as those of the harmony form do.
ONE_DEVELOPER = """{%- if messages[0].role in ['system', 'developer'] %}{{ messages[0].content }}
{%- endif %}{%- for m in messages %}{%- if m.role not in ['system', 'developer'] %}
{{- '<' + m.role + '>' + m.content }}{%- for c in m.tool_calls or [] %}{{ c.function.arguments }}
{%- endfor %}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<assistant>{% endif %}"""
SOURCES = {
    **{path.stem: path.read_text() for path in FOLDER.glob("*.jinja")},
    **{name: source for name, (source, _) in FORMS.items() if name not in ("words", "mistral")},
    "one_developer": ONE_DEVELOPER,
}
ALL = {name: ChatTemplate(source, TOKENS) for name, source in sorted(SOURCES.items())}
MOVES = {"late_refused", "late_lost", "one_developer"}
"""Templates that refuse or lose such messages behind the first one."""
KEEPS = sorted(ALL.keys() - MOVES - {"late_hoisted"})
"""Those that write all such messages at their place."""
Talk = list[dict[str, Any]]


def talk(seed: int) -> Talk:
    """A conversation of several turns; its texts are the numbers of its messages."""
    dice = random.Random(seed)
    roles = [dice.choice(["system", "developer"]) for _ in range(dice.randrange(4))]
    for _ in range(dice.randrange(1, 5)):
        turn = ["user", *["system", "developer"][: dice.randrange(3)]]
        dice.shuffle(turn)
        roles += [*turn, *["call", "tool"] * dice.randrange(3), "assistant"]
    messages: Talk = []
    for number, role in enumerate(roles):
        message = {"role": role, "content": f"text{number}."}
        if role == "call":
            message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [call(f'{{"c": {number}}}')],
            }
        elif role == "tool":
            message |= {"tool_call_id": "functions.weather:0", "name": "weather"}
        messages.append(message)
    return messages


def prepared(name: str, messages: Talk) -> Talk:
    return conversation([Message(**one) for one in messages], ALL[name])


def rendered(name: str, messages: Talk) -> str:
    return ALL[name].render(prepared(name, messages), tools=TOOLS)


def test_habits_are_found_by_rendering():
    for name, template in ALL.items():
        habits = habits_of(template)
        assert ("system" in habits.late_roles) == (name in KEEPS), name
        assert (("system", "system") in habits.pairs) == (name not in MOVES), name
    assert habits_of(ALL["one_developer"]).knows_developer


@pytest.mark.parametrize("name", ALL)
def test_every_text_is_rendered_once_and_in_its_order(name):
    for seed in range(60):
        messages = talk(seed)
        text = rendered(name, messages)
        shown = [one["content"] for one in messages if one["content"]]
        places = [text.find(one) for one in shown]
        assert all(text.count(one) == 1 for one in shown), (seed, text)
        assert places == sorted(places), (seed, text)


@pytest.mark.parametrize("name", ALL)
def test_a_conversation_begins_as_it_did_before_its_last_turns(name):
    for seed in range(60):
        messages = talk(seed)
        whole = rendered(name, messages)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                assert whole.startswith(rendered(name, messages[:number])), (seed, number)


@pytest.mark.parametrize("name", ALL)
def test_a_part_is_rendered_as_a_text_is(name):
    for seed in range(60):
        messages = talk(seed)
        dice = random.Random(seed)
        parts = [
            {**one, "content": [{"type": "text", "text": one["content"]}]}
            if one["content"] and dice.random() < 0.5
            else one
            for one in messages
        ]
        assert rendered(name, parts) == rendered(name, messages)


@pytest.mark.parametrize("name", ALL)
def test_what_a_template_does_right_is_left_to_it(name):
    for seed in range(60):
        messages = talk(seed)
        if name not in KEEPS:
            # One message of instructions, and it is the first.
            rest = [one for one in messages if one["role"] not in ("system", "developer")]
            messages = [{"role": "system", "content": "text."}, *rest]
        roles = [
            "system"
            if one["role"] == "developer" and not habits_of(ALL[name]).knows_developer
            else one["role"]
            for one in messages
        ]
        found = prepared(name, messages)
        assert [one["role"] for one in found] == roles
        assert [one["content"] for one in found if one["content"]] == [
            one["content"] for one in messages if one["content"]
        ]


@pytest.mark.parametrize("name", ["late_lost", "one_developer"])
def test_users_texts_are_joined_only_where_one_was_moved(name):
    two = [{"role": "user", "content": text} for text in ("One", "Two")]
    late = {"role": "system", "content": "Late"}
    for messages, joined in [
        (two, ["One", "Two"]),
        ([*two, late], ["One", "Two\n\nLate"]),
        ([two[0], late, late, *two], ["One\n\nLate\n\nLate\n\nOne", "Two"]),
    ]:
        assert [one["content"] for one in prepared(name, messages)] == joined


@pytest.mark.parametrize("name", ALL)
def test_users_texts_in_a_row_are_joined_for_templates_that_refuse_them(name):
    first = [{"role": "user", "content": text} for text in ("One", "Two")]
    if name == "late_refused":
        assert rendered(name, first) == rendered(name, [{"role": "user", "content": "One\n\nTwo"}])
    else:
        assert rendered(name, first) == ALL[name].render(first, tools=TOOLS)


@pytest.mark.parametrize("name", sorted(MOVES))
def test_no_role_stands_where_the_template_would_refuse_it(name):
    for seed in range(60):
        roles = [one["role"] for one in prepared(name, talk(seed))]
        assert ("user", "user") not in pairwise(roles)
        assert not {"system", "developer"}.intersection(roles[1:])


def test_several_parts_stay_parts_where_the_template_takes_them():
    parts = [{"type": "text", "text": text} for text in ("One", "Two")]
    messages = [{"role": "user", "content": parts}, {"role": "system", "content": parts}]
    assert "OneTwo\n\nOneTwo" in rendered("late_refused", messages)
    assert "One\nTwo\n\nOne\nTwo" in rendered("late_lost", messages)
    for empty in (None, "", []):
        talk = [messages[0], {"role": "system", "content": empty}]
        assert rendered("late_refused", talk) == rendered("late_refused", talk[:1])
