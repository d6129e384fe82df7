"""Requests of two coding agents in the shapes that they send, with texts of our own.

Enters: a turn's number. Leaves: the body of that turn. Each body continues the one before it, and
the longest has fewer than 4,096 tokens of models/tale.
"""

import json
import random
from typing import Any

_WORDS = ["the", "each", "file", "line", "folder", "test", "name", "answer", "reads", "writes",
          "keeps", "finds", "small", "new", "plain", "long", "before", "after", "with", "into",
          "when", "where", "only", "again", "word", "page", "number"]  # fmt: skip
Json = dict[str, Any]


def prose(name: str, num_sentences: int) -> str:
    """Sentences that are the same for the same name, and others for another."""
    dice = random.Random(name)
    sentences = [" ".join(dice.choices(_WORDS, k=9)).capitalize() for _ in range(num_sentences)]
    return f"About {name}. " + ". ".join(sentences) + "."


def _schema(*fields: str) -> Json:
    properties = {name: {"type": "string"} for name in fields}
    return {
        "type": "object",
        "properties": properties,
        "required": [*fields[:1]],
        "additionalProperties": False,
    }


def _tool(name: str, **fields: Any) -> Json:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **_schema("path")}
    return {"name": name, "description": prose(name, 1), "input_schema": schema, **fields}


_LOADED = ["Ask", "Edit", "Find", "List", "Plan", "Read", "Report", "Run", "ToolSearch", "Write"]
DEFERRED = ["CatNotes", "DogNotes", "EggTimer", "Fetch", "Graph", "Mail", "Notebook", "Outline",
            "Paint", "Query", "Rename", "Sketch", "Sort", "Table", "Undo", "Vote", "Wait",
            ]  # fmt: skip
"""Names of the tools that a ToolSearch of Claude Code can load."""
FOUND = ["EggTimer", "Fetch"]
"""Those that it loads in turn 1."""
_PLACEHOLDER = {
    "name": "PlaceOfDeferred",
    "description": "It stands for tools that are loaded later.",
    "input_schema": {"type": "object", "properties": {}},
    "defer_loading": True,
}
_ASKED = "Read note.txt and write its number to out.txt."
_CACHED = {"cache_control": {"type": "ephemeral"}}


def claude_code(turn: int, talk: str = "d99", sends_all: bool = False) -> Json:
    """The body for POST /v1/messages of turn 1, 2 or 3, in the shape of Claude Code 2.1.332.

    Before turn 2 a ToolSearch loaded two tools, one of which was called before turn 3. Another
    `talk` has another billing header. sends_all: with all deferred tools, as after faults.
    """
    loaded = DEFERRED if sends_all else FOUND if turn > 1 else []
    # Loaded tools stand among the others in the order of names, and stay deferred.
    tools = [_tool(name, defer_loading=True) if name in loaded else _tool(name)
             for name in sorted([*_LOADED, *loaded])]  # fmt: skip
    late = prose("the place of work", 12) + " Deferred tools: " + ", ".join(DEFERRED) + "."
    messages: list[Json] = [
        {"role": "user", "content": [_text(prose("commits", 3)), _text(_ASKED)]},
        # The first request has it as a block, the next ones as a text.
        {"role": "system", "content": [_text(late) | _CACHED] if turn == 1 else late},
    ]
    references = [{"type": "tool_reference", "tool_name": name} for name in FOUND]
    thinking = {"type": "thinking", "thinking": prose("thoughts", 2), "signature": "signed"}
    rounds = [
        ([thinking, _use(1, "ToolSearch", {"query": f"select:{','.join(FOUND)}"})],
         {"type": "tool_result", "tool_use_id": "toolu_1", "content": references}),
        ([_text("Now the note."), _use(2, "Fetch", {"path": "note.txt"})],
         {"tool_use_id": "toolu_2", "type": "tool_result", "content": "1\tThe number is seven.\n",
          "is_error": False}),
    ]  # fmt: skip
    for asked, result in rounds[: turn - 1]:
        messages += [{"role": "assistant", "content": asked}, {"role": "user", "content": [result]}]
    if turn > 1:
        messages[-1]["content"] = [messages[-1]["content"][0] | _CACHED]
    user = {"device_id": "5e" * 32, "account_uuid": "", "session_id": f"session-of-{talk}"}
    return {
        "model": "tale",
        "messages": messages,
        "system": [
            _text(f"x-anthropic-billing-header: cc_version=2.1.332.{talk}; cc_entrypoint=sdk-cli;"),
            _text("You write programs.") | _CACHED,
            _text("\n" + prose("your work", 8)) | _CACHED,
        ],
        "tools": [*tools, _PLACEHOLDER],
        "metadata": {"user_id": json.dumps(user, separators=(",", ":"))},
        "max_tokens": 128_000,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


def _use(number: int, name: str, arguments: Json) -> Json:
    return {"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": arguments}


_PATCH = """start: "*** Begin" LF line+ "*** End" LF?
line: "+" /(.*)/ LF
%import common.LF
"""


def _function(name: str, **fields: Any) -> Json:
    return {
        "type": "function",
        "name": name,
        "description": prose(name, 2),
        "strict": False,
        "parameters": _schema("cmd"),
        **fields,
    }


def _namespace(name: str, *functions: str, **fields: Any) -> Json:
    tools = [_function(one, **fields) for one in functions]
    return {"type": "namespace", "name": name, "description": prose(name, 1), "tools": tools}


def codex(turn: int, talk: str = "a") -> Json:
    """The body for POST /v1/responses of turn 1, 2, 3 or 4, in the shape of codex 0.171.0.

    Before turn 2 it called a function and a custom tool, before turn 3 it searched for tools, and
    before turn 4 it called functions of two namespaces, one of which it had found. Another `talk`
    has other ids.
    """
    thread = f"thread-of-{talk}"
    items = [
        _message(talk, 1, "developer", prose("your work", 12)),
        _message(talk, 2, "developer", prose("skills", 4), prose("permissions", 2)),
        _message(talk, 3, "user", prose("the place of work", 4)),
        _message(talk, 4, "user", _ASKED),
    ]
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "It looks at the note."}],
        "content": [{"type": "reasoning_text", "text": prose("thoughts", 2)}],
        "encrypted_content": "b3BhcXVl",
    }
    patch = {"type": "custom_tool_call", "id": "ctc_2", "call_id": "call_2", "name": "patch",
             "input": "*** Begin\n+seven\n*** End\n"}  # fmt: skip
    search = {"type": "tool_search", "call_id": "call_3", "status": "completed",
              "execution": "client"}  # fmt: skip
    found = [_namespace("notes", "keep_note", "find_note", defer_loading=True)]
    rounds: list[list[Json]] = [
        [reasoning,
         _call(1, name="run", arguments='{"cmd": "cat note.txt"}'),
         _output(1, "Exit code: 0\nOutput:\nThe number is seven.\n"),
         patch,
         {**_output(2, "Exit code: 0\nOutput:\nWritten.\n"), "type": "custom_tool_call_output",
          "id": "ctco_2"}],
        [{**search, "type": "tool_search_call", "id": "ts_3",
          "arguments": {"query": "notes", "limit": 2}},
         {**search, "type": "tool_search_output", "id": "tso_3", "tools": found}],
        [_call(4, name="keep_note", namespace="notes", arguments='{"cmd": "seven"}'),
         _call(5, name="close_helper", namespace="helpers", arguments='{"cmd": "none"}'),
         _output(4, "Kept."),
         _output(5, "No helper has this name.")],
    ]  # fmt: skip
    return {
        "model": "tale",
        "stream": True,
        "input": [*items, *(item for each in rounds[: turn - 1] for item in each)],
        "tools": [
            _function("run"),
            _function("type_in"),
            {"type": "custom", "name": "patch", "description": prose("patch", 1),
             "format": {"type": "grammar", "syntax": "lark", "definition": _PATCH}},
            _function("view_image"),
            _namespace("helpers", "start_helper", "close_helper"),
            {"type": "tool_search", "execution": "client", "description": prose("search", 3),
             "parameters": _schema("query", "limit")},
            {"type": "web_search", "external_web_access": True,
             "search_content_types": ["text", "image"]},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": thread,
        "text": {"verbosity": "low"},
        "client_metadata": {"thread_id": thread, "turn_id": f"{thread}-{turn}"},
    }  # fmt: skip


def _message(talk: str, number: int, role: str, *texts: str) -> Json:
    content = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "id": f"msg_{talk}{number}", "role": role, "content": content}


def _call(number: int, **fields: str) -> Json:
    return {"type": "function_call", "id": f"fc_{number}", "call_id": f"call_{number}", **fields}


def _output(number: int, text: str) -> Json:
    kind = {"type": "function_call_output", "id": f"fco_{number}"}
    return {**kind, "call_id": f"call_{number}", "output": text}
