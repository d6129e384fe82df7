#!/usr/bin/env bash
# llguidance 1.9.1: integers of a JSON schema beyond 2^53 are read as doubles.
# Guess: a schema that is one integer accepts this integer, and a bound of an integer is exact.
# Seen: {"const": 9007199254740993} refuses 9007199254740993, and {"minimum": 9007199254740993}
# accepts 9007199254740992, one less. No error says so. Below 2^53 both are exact.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check llguidance==1.9.1
"$folder/venv/bin/python" - <<'PY'
import json
from llguidance import LLMatcher, LLTokenizer

TOKENIZER = LLTokenizer("byte")


def accepts(schema, text):
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    return matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()


large = 2**53 + 1
seen = {
    "a constant accepts itself below 2^53": accepts({"const": 2**53 - 1}, str(2**53 - 1)),
    "a constant accepts itself at 2^53 + 1": accepts({"const": large}, str(large)),
    "a least integer of 2^53 + 1 accepts 2^53": accepts(
        {"type": "integer", "minimum": large}, str(large - 1)
    ),
}
for what, holds in seen.items():
    print(f"{what}: {holds}")
assert list(seen.values()) == [True, False, True], "this has changed"
PY
