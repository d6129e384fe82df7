"""A grammar is compiled away from the service, within a bound of processor time."""

import json

import pytest

from control_plane.frontend.client_request import ClientRequest
from control_plane.frontend.text.constraint import constraint_of
from control_plane.frontend.text.grammar_check import GrammarCheck
from harness.services.frontend_fakes import TOKENIZER
from harness.vllm.constraints import KINDS, request_with


@pytest.fixture(scope="module")
def check():
    return GrammarCheck(TOKENIZER._tokenizer.to_str)


def of(check, **fields):
    request = ClientRequest("x", "prompt", **fields)
    return constraint_of(request, 32_768, True, frozenset(), check)


@pytest.mark.parametrize("kind", KINDS)
def test_what_compiles_is_as_without_the_check(check, kind):
    request = request_with(kind)
    checked = constraint_of(request, 32_768, True, frozenset(), check)
    assert checked == constraint_of(request, 32_768, True)


@pytest.mark.parametrize(("fields", "sentence"), [
    ({"json_schema": '{"type": "integer", "multipleOf": 999983}'}, "it takes more than 0.2 s"),
    ({"regex": "(a{1000}){1000}"}, "more than 40000 bytes of fixed text, or never ends"),
    ({"grammar": 'start: a\na: a "x"'}, "nothing satisfies it"),
    ({"grammar": 'start: "a" <gone>'}, "unknown special token"),
    ({"grammar": "start: /a+/ & /b+/\nX: /c/"}, "grammar cannot be used"),
])  # fmt: skip
def test_what_does_not_is_refused_and_the_next_one_is_answered(check, fields, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        of(check, **fields)
    assert "\n" not in str(caught.value)
    assert of(check, regex=f"a{{1,{len(sentence)}}}")


def test_many_refusals_leave_no_process(check):
    pids = set()
    for number in range(2):
        of(check, regex=f"b{{1,{number + 2}}}")
        process = check._process
        pids.add(process.pid)
        with pytest.raises(ValueError, match="it takes more than"):
            of(check, json_schema=json.dumps({"type": "integer", "multipleOf": 999_961 - number}))
        assert process.returncode is not None and check._process is None
    assert len(pids) == 2
