"""Structured output: the constraint of a request as one grammar for llguidance."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from control_plane.frontend.client_request import ClientRequest, Reasoning
from control_plane.frontend.text.grammar_check import GrammarCheck
from control_plane.frontend.text.tagged_text import tagged_text
from nanocp.values.sampling_fields import CONSTRAINTS

_JSON_OPTIONS: Any = {"whitespace_flexible": False}
"""Free whitespace makes small models loop; a schema's own `x-guidance` may allow it."""
_OPTIONS = '%llguidance {"no_forcing": true}'
"""The model cuts literals into tokens.

Otherwise the library does, finds special tokens in them, and may take seconds for a long one.
"""
_MAX_SENTENCE = 300
"""Characters of the library's sentence that are repeated."""
_ONE_OF = "oneOf has choices that may both fit a value; give anyOf, or set them apart by a const"
"""Replaces the library's error, which names an option of its own."""
Schema = dict[str, Any]
FOR_PEOPLE = frozenset({"title", "description", "$schema", "$id", "$comment", "examples"})
"""Words of a schema that do not constrain a value."""
_MAPS = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
"""Words whose value has schemas by name."""
_DATA = ("const", "enum", "default", "examples")
"""Words whose value is no schema."""
_DEEPEST_REFERENCE = 32
_LARGEST_INTEGER, _LARGEST_NUMBER = (1 << 63) - 1024, 9.2e18
"""Library holds numbers to bounds up to these, which it reads as doubles."""
_BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}


def constraint_of(
    request: ClientRequest,
    max_grammar_bytes: int,
    has_eos: bool,
    added_tokens: frozenset[str] | None = frozenset(),
    check: GrammarCheck | None = None,
) -> str:
    """Return the grammar of the request's output; empty if it has no constraint.

    max_grammar_bytes: see BoundsConfig. has_eos: the model has an end of sequence. added_tokens:
    see Tokenizer. check: compiles it, if given. Raises ValueError. Takes long: call it in a thread.
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
    from llguidance import LLMatcher

    try:
        if name == "structural_tag":
            tagged = tagged_text(text, added_tokens, _held)
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
        sentence = _ONE_OF if "coerce_one_of" in error else " ".join(error.split())
        raise ValueError(sentence[:_MAX_SENTENCE])
    return grammar


def _grammar(name: str, text: str) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    match name:
        case "json_schema":
            schema = json.loads(text)
            text = _held(schema) if isinstance(schema, dict) else text
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
    # That is JSON, or a Lark grammar as it stands.
    is_json = grammar.startswith("{")
    answer, *others = json.loads(grammar)["grammars"] if is_json else [{"lark_grammar": grammar}]
    whole = [{"lark_grammar": f"{_OPTIONS}\n{rules}"}, {**answer, "name": "answer"}, *others]
    return json.dumps({"grammars": whole})


def parts_of(schema: Schema) -> Iterator[tuple[Schema, bool]]:
    """Yield every schema within this one, itself first.

    With each: True unless references in it are to one with its own $id.
    """
    parts: list[tuple[Any, bool]] = [(schema, True)]
    while parts:
        part, is_own = parts.pop()
        if isinstance(part, list):
            parts += [(one, is_own) for one in part]
        if not isinstance(part, dict):
            continue
        is_own = is_own and (part is schema or "$id" not in part)
        yield part, is_own
        for word, value in part.items():
            if word in _MAPS and isinstance(value, dict):
                parts += [(one, is_own) for one in value.values()]
            elif word not in _DATA:
                parts.append((value, is_own))


def resolved(schema: Any, root: Schema) -> Any:
    """Return the schema, or its target within root if it is only a reference."""
    for _ in range(_DEEPEST_REFERENCE):
        match schema:
            case {"$ref": str(reference)} if reference.startswith("#"):
                schema = _at(reference, root)
            case {"allOf": [one]} if set(schema) <= {"allOf", "default", *FOR_PEOPLE}:
                schema = one
            case _:
                break
    return schema


def _at(reference: str, root: Schema) -> Any:
    place: Any = root
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        else:
            place = place.get(name) if isinstance(place, dict) else None
    return place


def _held(schema: Schema) -> str:
    """Leave out formats without a grammar, which only describe a value. Raises ValueError."""
    schema = json.loads(json.dumps({"x-guidance": _JSON_OPTIONS} | schema))
    for part, _ in parts_of(schema):
        if isinstance(name := part.get("format"), str) and not _is_known_format(name):
            del part["format"]
        if "propertyNames" in part and (names := _names(part.pop("propertyNames"), schema)):
            part["allOf"] = [*part.get("allOf", ()), names | {"additionalProperties": False}]
        most = _LARGEST_INTEGER if part.get("type") == "integer" else _LARGEST_NUMBER
        for word, sign in _BOUNDS.items():
            if isinstance(bound := part.get(word), int | float) and not isinstance(bound, bool):
                if sign * bound < -most:
                    least = "at most " if sign < 0 else "at least -"
                    raise ValueError(f"{word} is {bound}; it must be {least}{most}")
                held = min(sign * bound, most)
                if (double := float(held)) != held:
                    double = math.nextafter(double, -math.inf) if double > held else double
                    held = int(double)
                part[word] = sign * held
    return json.dumps(schema)


@lru_cache(maxsize=256)
def _is_known_format(name: str) -> bool:
    from llguidance import LLMatcher

    schema = {"type": "string", "format": name}
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return not LLMatcher.validate_grammar(grammar)


def _names(schema: Any, root: Schema) -> Schema:
    """Empty if the schema of names allows all.

    Raises ValueError unless the names are a list, or follow one pattern.
    """
    schema = resolved(schema, root)
    if isinstance(schema, bool):
        return {} if schema else {"properties": {}}
    words = schema if isinstance(schema, dict) else {"": schema}
    words = {word: words[word] for word in words.keys() - {"default", *FOR_PEOPLE}}
    if "string" not in (words.pop("type", None) or "string"):
        return {"properties": {}}
    if "pattern" in words or not _is_known_format(str(words.get("format"))):
        words.pop("format", None)
    match words:
        case {"anyOf": list(some)} | {"oneOf": list(some)} if len(words) == 1:
            allowed = [_names(one, root) for one in some]
            listed = [each for one in allowed for each in one.get("properties", {})]
            patterns = [f"(?:{p})" for one in allowed for p in one.get("patternProperties", {})]
            is_any = "anyOf" in words
            if is_any and not all(allowed):
                return {}
            if not patterns and all(allowed) and (is_any or len({*listed}) == len(listed)):
                return {"properties": {each: {} for each in listed}}
            if is_any:
                patterns += [f"^{re.escape(each)}$" for each in listed]
                return {"patternProperties": {"|".join(patterns): {}}}
        case {"enum": list(listed)} | {"const": listed} if len(words) == 1:
            listed = listed if isinstance(listed, list) else [listed]
            return {"properties": {name: {} for name in listed if isinstance(name, str)}}
        case {"pattern": str(pattern)} if len(words) == 1:
            return {"patternProperties": {pattern: {}}}
        case _ if words.keys() <= {"minLength", "maxLength"}:
            low, high = words.get("minLength", 0), words.get("maxLength", "")
            return {"patternProperties": {f"(?s:^.{{{low},{high}}}$)": {}}} if words else {}
    raise ValueError("propertyNames must be a list of names, a pattern, lengths, or any of these")
