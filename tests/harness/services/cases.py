"""Inputs of other people with what is right for each, as files: tests/cases/README.md."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import yaml

from harness.paths import TESTS
from harness.waits import WAIT_S
from nanocp.client import Client, InvalidArgument, ServiceError

CASES = TESTS / "cases"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
_CONSTRAINTS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar",
                "json_object": "json_object", "structural_tag": "structural_tag"}  # fmt: skip
_OVER_GRPC = {"prompt", "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "seed",
              "stop_token_ids", "ignore_eos", "min_p", "repetition_penalty", "logit_bias",
              "presence_penalty", "frequency_penalty", "bad_words", "stop", "n",
              "include_stop_str_in_output", "logprobs", "structured_outputs"}  # fmt: skip
"""Fields of a completion that gRPC has too, with one meaning."""
_GRPC_SAYS = {"index", "text", "finish_reason", "stop_reason", "token_ids"}
"""Fields of a choice that an answer over gRPC has in the same form."""


@dataclass(frozen=True)
class Case:
    """One input and what is right."""

    name: str
    source: str
    """Who says what is right."""
    body: Any
    expected: dict[str, Any]
    model: str = "tale"
    endpoint: str = COMPLETIONS
    headers: dict[str, str] = field(default_factory=dict)
    ways: tuple[str, ...] = ()
    """whole, stream, grpc."""

    @property
    def status(self) -> int:
        return self.expected.get("status", 200)


@dataclass(frozen=True)
class CaseAnswer:
    """What a service answered: a stream and gRPC in the form of the whole body."""

    status: int
    body: Any
    headers: dict[str, str] = field(default_factory=dict)


def cases() -> list[Case]:
    """Every case, by its name."""
    return [_case(path) for path in sorted(CASES.rglob("*.yaml"))]


def _case(path: Path) -> Case:
    told = yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)
    told |= {name: _made(value) for name, value in told.items()}
    name = path.relative_to(CASES).with_suffix("").as_posix()
    case = Case(name, **{**told, "ways": tuple(told.get("ways", ()))})
    return case if case.ways else Case(name, **{**told, "ways": tuple(_ways(case))})


def _ways(case: Case) -> Iterator[str]:
    yield "whole"
    if case.endpoint in (COMPLETIONS, CHAT, MESSAGES, RESPONSES):
        yield "stream"
    # Parts of characters and halves of surrogates do not travel in protobuf.
    if case.endpoint == COMPLETIONS and not case.headers and set(case.body) <= _OVER_GRPC:
        yield "grpc"


def _made(value: Any) -> Any:
    """The value with $repeat and $join written out."""
    match value:
        case {"$repeat": [text, times]}:
            return text * times
        case {"$join": parts}:
            return "".join(map(_made, parts))
        case dict():
            return {key: _made(each) for key, each in value.items()}
        case list():
            return [_made(each) for each in value]
    return value


def ask(case: Case, way: str, http: str, grpc: str) -> CaseAnswer:
    """Send the case. http, grpc: host:port of a service of its model."""
    if way == "grpc":
        return _over_grpc(case, grpc)
    content = case.body
    if not isinstance(content, str):
        # JSON in ASCII can spell what is no Unicode text.
        content = json.dumps(content | ({"stream": True} if way == "stream" else {}))
    headers = {"Content-Type": "application/json"} | case.headers
    answer = httpx.post(
        f"http://{http}{case.endpoint}", content=content, headers=headers, timeout=WAIT_S
    )
    names = dict(answer.headers)
    if not names.get("content-type", "").startswith("text/event-stream"):
        return CaseAnswer(answer.status_code, strict_json(answer.text), names)
    if case.endpoint in (MESSAGES, RESPONSES):
        return _joined_events(answer.text, names)
    # As clients read it that split at every kind of line end.
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events and events.pop() == "[DONE]", f"the stream was cut: {answer.text[-300:]!r}"
    return _joined([strict_json(event) for event in events], names)


def _joined(chunks: list[Any], headers: dict[str, str]) -> CaseAnswer:
    """The chunks of a stream as one body."""
    choices: dict[int, dict[str, Any]] = {}
    body: dict[str, Any] = {"choices": []}
    for chunk in chunks:
        if "error" in chunk:
            return CaseAnswer(chunk["error"]["code"], chunk, headers)
        body |= {name: value for name, value in chunk.items() if name != "choices"}
        for new in chunk["choices"]:
            choice = choices.setdefault(new["index"], {})
            if "delta" in new:
                _add(choice.setdefault("message", {}), new.pop("delta"))
            _add(choice, new)
    body["choices"] = [choice for _, choice in sorted(choices.items())]
    return CaseAnswer(200, body, headers)


def _joined_events(text: str, headers: dict[str, str]) -> CaseAnswer:
    """The events of a stream of Messages or Responses as one body."""
    events: list[Any] = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        if event.startswith(":"):
            continue
        name, _, data = event.partition("\n")
        events.append(strict_json(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    if failed := next((one for one in events if one["type"] == "error"), None):
        return CaseAnswer(200, failed, headers)
    if events[0]["type"] == "response.created":
        return CaseAnswer(200, joined_response(events), headers)
    return CaseAnswer(200, joined_message(events), headers)


def joined_message(events: list[Any]) -> dict[str, Any]:
    """The message of a stream's events, whose order is checked."""
    body, open_block, texts = events[0]["message"], None, list[str]()
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    assert body["content"] == [] and body["stop_reason"] is None
    for event in events[1:-1]:
        match event:
            case {"type": "content_block_start", "index": number, "content_block": block}:
                assert open_block is None and number == len(body["content"])
                body["content"].append(block)
                open_block, texts = block, []
            case {"type": "content_block_delta", "index": number, "delta": delta}:
                assert open_block is body["content"][number]
                kind = delta["type"].removesuffix("_delta")
                if kind == "input_json":
                    texts.append(delta["partial_json"])
                else:
                    open_block[kind] += delta[kind]
            case {"type": "content_block_stop", "index": number}:
                assert open_block is body["content"][number]
                if open_block["type"] == "tool_use":
                    open_block["input"] = strict_json("".join(texts))
                open_block = None
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                assert open_block is None
                body |= {**delta, "usage": usage}
            case other:
                assert other == {"type": "ping"}
    return body


def joined_response(events: list[Any]) -> dict[str, Any]:
    """The response of a stream's events, whose order is checked, with the items that it brought."""
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last: dict[str, Any] = events[-1]["response"]
    assert events[-1]["type"] == f"response.{_LAST.get(last['status'], last['status'])}"
    items: list[Any] = []
    texts, is_open = list[str](), False
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        match kind.rpartition(".")[::2]:
            case "output_item", "added":
                assert not is_open and event["output_index"] == len(items)
                items.append(event["item"])
                is_open = True
            case "output_item", "done":
                assert event["item"]["id"] == items[-1]["id"]
                items[-1], is_open, texts = event["item"], False, []
            case _, "delta":
                assert is_open and event["item_id"] == items[-1]["id"]
                texts.append(event["delta"])
            case _, "done":
                whole = event.get("part", event)
                (text,) = (whole[name] for name in ("text", "arguments", "input") if name in whole)
                assert text == "".join(texts)
    assert not is_open and items == last["output"]
    return last


_LAST = {"cancelled": "incomplete"}
"""Last events of responses that are not named as their status."""


def _add(whole: dict[str, Any], new: dict[str, Any]) -> None:
    for name, value in new.items():
        old = whole.get(name)
        if name == "tool_calls":
            calls = whole.setdefault(name, [])
            for call in value or ():
                if call["index"] == len(calls):
                    calls.append({"index": call["index"]})
                _add(calls[call["index"]], call)
        elif isinstance(value, dict):
            _add(whole.setdefault(name, {}), value) if old is not None else whole.update(
                {name: value}
            )
        elif name in ("text", "content", "reasoning", "arguments") or isinstance(value, list):
            whole[name] = value if old is None else old + (value or type(old)())
        elif value is not None or name not in whole:
            whole[name] = value


def _over_grpc(case: Case, target: str) -> CaseAnswer:
    body = dict(case.body)
    for name, value in body.pop("structured_outputs", {}).items():
        is_json = name == "json" and not isinstance(value, str)
        body[_CONSTRAINTS[name]] = json.dumps(value) if is_json else value
    body["logit_bias"] = {int(key): each for key, each in body.get("logit_bias", {}).items()}
    with Client(target) as client:
        try:
            answer = client.generate_unary(body.pop("prompt"), timeout_s=WAIT_S, **body)
        except InvalidArgument as error:
            return CaseAnswer(400, {"error": {"message": str(error)}})
        except ServiceError as error:
            return CaseAnswer(500, {"error": {"message": f"{type(error).__name__}: {error}"}})
    choices = [
        {
            "index": each.index,
            "text": each.text,
            "finish_reason": each.finish.reason.name.lower(),
            "stop_reason": each.finish.stop_reason,
            "token_ids": list(each.token_ids),
        }
        for each in answer.choices
    ]
    return CaseAnswer(200, {"choices": choices})


def wrong(case: Case, way: str, answer: CaseAnswer) -> list[str]:
    """Where the answer is not what is expected; empty if it is right."""
    found = list(_differences("status", case.status, answer.status))
    body = case.expected.get("body", {})
    if way == "grpc":
        body = {"choices": _without(body.get("choices", []))} if case.status == 200 else {}
    else:
        headers = {name.lower(): value for name, value in case.expected.get("headers", {}).items()}
        found += _differences("headers", headers, answer.headers)
    return found + list(_differences("body", body, answer.body))


def _without(choices: Any) -> Any:
    """The choices, without what gRPC does not say in this form."""
    if isinstance(choices, dict):
        return {"$each": _without([choices["$each"]])[0]}
    return [{name: each for name, each in one.items() if name in _GRPC_SAYS} for one in choices]


def _differences(where: str, expected: Any, got: Any) -> Iterator[str]:
    """Sentences on every place where `got` is not as expected (tests/cases/README.md)."""
    match expected:
        case {"$like": pattern}:
            if not isinstance(got, str) or not re.search(pattern, got):
                yield f"{where}: {got!r:.300} does not match {pattern!r}"
        case {"$json": value}:
            try:
                yield from _differences(f"{where} as JSON", value, strict_json(got))
            except (TypeError, ValueError) as error:
                yield f"{where}: {got!r:.300} is no JSON: {error}"
        case {"$schema": schema}:
            try:
                jsonschema.validate(strict_json(got), schema)
            except (TypeError, ValueError, jsonschema.ValidationError) as error:
                yield f"{where}: {got!r:.300} is against the schema: {error!s:.100}"
        case {"$each": one}:
            for index, each in enumerate(got or ()):
                yield from _differences(f"{where}.{index}", one, each)
            if not got:
                yield f"{where}: there is none"
        case {"$first": values}:
            yield from _differences(where, values, (got or [])[: len(values)])
        case {"$rest": one}:
            yield from _differences(where, {"$each": one}, (got or [])[1:])
        case {"$keys": [least, most]}:
            if not isinstance(got, dict) or not least <= len(got) <= most:
                yield f"{where}: {got!r:.300} has not {least} to {most} keys"
        case {"$not": other}:
            if not list(_differences(where, other, got)):
                yield f"{where}: it is {got!r:.300}"
        case {"$any": values}:
            if all(list(_differences(where, value, got)) for value in values):
                yield f"{where}: {got!r:.300} is none of {values!r}"
        case dict():
            for name, value in expected.items():
                inner = got.get(name) if isinstance(got, dict) else None
                yield from _differences(f"{where}.{name}", value, inner)
            if not isinstance(got, dict):
                yield f"{where}: {got!r:.300} is no object"
        case list():
            if not isinstance(got, list) or len(got) != len(expected):
                yield f"{where}: {got!r:.300} has not {len(expected)} elements"
                return
            for index, (value, each) in enumerate(zip(expected, got, strict=True)):
                yield from _differences(f"{where}.{index}", value, each)
        case None:
            if got not in (None, "", [], {}):
                yield f"{where}: {got!r:.300} is there"
        case float():
            if not isinstance(got, float | int) or abs(got - expected) > 1e-3:
                yield f"{where}: {got!r:.300} is not {expected!r}"
        case _:
            if got != expected or isinstance(got, bool) != isinstance(expected, bool):
                yield f"{where}: {got!r:.300} is not {expected!r:.300}"


def strict_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, also for NaN and Infinity, which JSON lacks."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)
