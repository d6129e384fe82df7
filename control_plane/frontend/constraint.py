"""Structured output: the constraint of a request as one grammar, checked before it goes anywhere.

Enters: a ClientRequest. Leaves: a grammar in llguidance's own form, which the instances read, or a
ValueError that names the field. Does not know: tokens, rows, HTTP.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from control_plane.frontend.client_request import ClientRequest, Reasoning
from control_plane.frontend.grammar_check import GrammarCheck
from control_plane.frontend.tagged_text import tagged_text
from nanocp.values.sampling_fields import CONSTRAINTS

_JSON_OPTIONS: Any = {"whitespace_flexible": False}
"""Whitespace between tokens of JSON is what makes small models loop; a schema's own `x-guidance`
may allow it."""
_OPTIONS = '%llguidance {"no_forcing": true}'
"""The model decides how a literal is cut into tokens. Else the library does, finds special tokens
in it, and may take seconds for a long one."""
_MAX_SENTENCE = 300
"""Characters of the library's sentence that are repeated."""


def constraint_of(
    request: ClientRequest,
    max_grammar_bytes: int,
    has_eos: bool,
    added_tokens: frozenset[str] | None = frozenset(),
    check: GrammarCheck | None = None,
) -> str:
    """The grammar of the request's output; empty if it has no constraint.

    max_grammar_bytes: see BoundsConfig. has_eos: whether the model has an end-of-sequence token.
    added_tokens: see Tokenizer; None without a tokenizer. check: compiles it; None: the grammar is
    read only. Raises ValueError. May take long: call it in a thread.
    """
    given = [name for name in CONSTRAINTS if (value := getattr(request, name)) or value == ""]
    if not given:
        return ""
    name = given[0]
    called = request.constraint_field or name
    if len(given) > 1:
        raise ValueError(f"{called} is given beside {given[1]}; only one of them can be")
    if not max_grammar_bytes:
        raise ValueError(f"{called} cannot be used: structured output is off in this service")
    if added_tokens is None:
        raise ValueError(f"{called} cannot be used: the checkpoint has no tokenizer.json")
    if not has_eos:
        raise ValueError(f"{called} cannot be used: the model has no end-of-sequence token")
    value = getattr(request, name)
    if value == "":
        raise ValueError(f"{called} is empty; it must be a constraint")
    text = json.dumps(list(value)) if name == "choice" else str(value)
    if len(text.encode(errors="replace")) > max_grammar_bytes:
        raise ValueError(f"{called} is too long; it must have at most {max_grammar_bytes} bytes")
    try:
        grammar = _compiled(name, text, request.reasoning, added_tokens, check)
    except ValueError as error:
        raise ValueError(f"{called} cannot be used: {error}") from error
    if len(grammar.encode()) > max_grammar_bytes:
        raise ValueError(
            f"{called} becomes a grammar of {len(grammar.encode())} bytes; it must have at most "
            f"{max_grammar_bytes}"
        )
    return grammar


@lru_cache(maxsize=256)
def _compiled(
    name: str,
    text: str,
    reasoning: Reasoning | None,
    added_tokens: frozenset[str],
    check: GrammarCheck | None,
) -> str:
    """The grammar of a constraint of this kind. Raises ValueError with the library's sentence."""
    from llguidance import LLMatcher

    try:
        if name == "structural_tag":
            tagged = tagged_text(text, added_tokens, _JSON_OPTIONS)
            grammar = LLMatcher.grammar_from_lark(tagged)
        else:
            grammar = _grammar(name, text)
        before = "" if reasoning is None else _thoughts(reasoning, added_tokens)
        grammar = _whole(before or "start: @answer", grammar)
        error = LLMatcher.validate_grammar(grammar)
        if not error and check is not None:
            error = check.error(grammar)
    except Exception as failure:  # The converter of GBNF raises Exception itself.
        error = str(failure)
    if error:
        sentence = " ".join(error.split())
        raise ValueError(sentence[:_MAX_SENTENCE])
    return grammar


def _grammar(name: str, text: str) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    match name:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(text, defaults=_JSON_OPTIONS)
        case "json_object":
            return LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=_JSON_OPTIONS)
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "choice":
            choices = " | ".join(json.dumps(choice) for choice in json.loads(text))
            return LLMatcher.grammar_from_lark(f"start: {choices}")
    return LLMatcher.grammar_from_lark(any_to_lark(text))


def _thoughts(reasoning: Reasoning, added_tokens: frozenset[str]) -> str:
    """Rules of reasoning, which is any text up to its end, and then of the answer."""
    begin, end = (
        marker if marker in added_tokens else json.dumps(marker)
        for marker in (reasoning.begin, reasoning.end)
    )
    text = r"/(.|\n)*/"
    if reasoning.end in added_tokens:
        thoughts = f"thoughts: {text} {end}"
    else:
        thoughts = f"thoughts[suffix={end}]: {text}"
    before = "thoughts GAP?" if reasoning.has_begun else f"({begin} thoughts GAP?)?"
    return "\n".join((f"start: {before} @answer", thoughts, r"GAP: /[ \n]{1,4}/"))


def _whole(rules: str, grammar: str) -> str:
    """Rules that end with the grammar, as `answer`, in the library's own form."""
    # That is JSON, or a Lark grammar as it stands.
    is_json = grammar.startswith("{")
    answer, *others = json.loads(grammar)["grammars"] if is_json else [{"lark_grammar": grammar}]
    whole = [{"lark_grammar": f"{_OPTIONS}\n{rules}"}, {**answer, "name": "answer"}, *others]
    return json.dumps({"grammars": whole})
