"""Anthropic's Messages: streams that add up, tools loaded later, pings, errors, nothing held."""

import asyncio
import itertools
import json
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from control_plane.frontend.http.answers import responses
from control_plane.frontend.http.answers.deltas import Delta
from control_plane.frontend.http.client_requests import chat_prompt
from control_plane.frontend.http.errors import ApiError
from control_plane.frontend.http.messages.protocol import MessagesPrompt, MessagesRequest
from control_plane.frontend.http.messages.translate import tenant_of, translated
from control_plane.frontend.http.messages.writer import SIGNATURE, MessagesWriter
from control_plane.frontend.http.responses_api import translate
from control_plane.frontend.http.responses_api.client_tools import ClientTools
from control_plane.frontend.http.responses_api.protocol import ResponsesRequest
from control_plane.frontend.http.responses_api.translate import own_items
from control_plane.frontend.http.served_model import ServedModel
from control_plane.frontend.http.tools.answer_parser import AnswerParser, CallContext
from control_plane.frontend.http.tools.call_forms import CALL_FORMS
from control_plane.frontend.http.tools.chat_template import ChatTemplate
from control_plane.frontend.http.tools.translated_chat import PICTURE
from control_plane.frontend.text.tokenizer import load_tokenizer
from harness.services.agent_talks import FOUND, claude_code, codex
from harness.services.cases import joined_message, strict_json
from harness.services.frontend_fakes import TOKENIZER, running
from harness.services.openai_service import connection, send
from harness.services.tale_models import TALE, TEMPLATES
from harness.waits import WAIT_S, until
from nanocp.values.plan import Ended, FinishReason

LATE = ["late_kept", "late_refused", "late_lost", "late_hoisted"]
ASK = {"max_tokens": 100, "messages": [{"role": "user", "content": "x"}]}
ANSWER = (
    "<think>\nI need it.</think>\n\nLet me look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>\nThere.'
)
SHOWN = [
    {"type": "thinking", "thinking": "I need it.", "signature": SIGNATURE},
    {"type": "text", "text": "Let me look.\n"},
    {"type": "tool_use", "name": "weather", "input": {"city": "Köln"}},
    {"type": "tool_use", "name": "time", "input": {}},
    {"type": "text", "text": "\nThere."},
]


def model_of(template):
    source = (TEMPLATES / f"{template}.jinja").read_text()
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return ServedModel("tale", "tale", ChatTemplate(source, tokens), call_form="hermes",
                       has_reasoning=True)  # fmt: skip


@pytest.fixture(scope="module")
def service():
    with running(model=model_of("late_kept")) as service:
        yield service


def written(cuts, answer=ANSWER, **fields):
    """The events and the whole body of an answer that comes in these pieces."""
    request = MessagesRequest(**ASK, **fields)

    def new_writer():
        context = CallContext(CALL_FORMS["hermes"])
        return MessagesWriter(request, "msg_1", "tale", None, lambda: AnswerParser(context, True))

    edges = [0, *sorted(cuts), len(answer)]
    pieces = [answer[begin:end] for begin, end in itertools.pairwise(edges)]
    deltas = [
        Delta(0, 0, range(70), token_ids=[n], text=text, num_cached=64,
              finish_reason="stop" if n == len(pieces) - 1 else None)
        for n, text in enumerate(pieces)
    ]  # fmt: skip
    stream, whole = new_writer(), new_writer()
    chunks = [chunk for delta in deltas for chunk in stream.chunks(delta)]
    events = [strict_json(chunk.model_dump_json(exclude_unset=True))
              for chunk in [*chunks, *stream.last_chunks()]]  # fmt: skip
    for delta in deltas:
        whole.add(delta)
    return events, strict_json(whole.json())


def without_ids(blocks):
    return [{name: value for name, value in one.items() if name != "id"} for one in blocks]


def test_a_stream_adds_up_to_the_whole_for_any_cutting():
    dice = random.Random(1)
    for _ in range(300):
        cuts = dice.sample(range(1, len(ANSWER)), dice.randrange(40))
        events, whole = written(cuts)
        joined = joined_message(events)
        assert without_ids(joined["content"]) == without_ids(whole["content"]) == SHOWN
        assert all(one["id"] for one in joined["content"] if one["type"] == "tool_use")
        same = ("stop_reason", "stop_sequence", "usage", "role", "type")
        assert [joined[name] for name in same] == [whole[name] for name in same]
        assert whole["stop_reason"] == "tool_use"
        assert whole["usage"]["input_tokens"] == 6
        assert whole["usage"]["cache_read_input_tokens"] == 64


def test_thinking_can_be_omitted_and_calls_kept_to_one():
    events, whole = written(
        [5, 30, 90], thinking={"type": "adaptive", "display": "omitted"},
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )  # fmt: skip
    shown = [SHOWN[0] | {"thinking": ""}, *SHOWN[1:3], SHOWN[4]]
    assert without_ids(joined_message(events)["content"]) == shown
    assert without_ids(whole["content"]) == shown


@pytest.mark.parametrize(
    "value", [r'"\ud83d"', "9" * 5000, "1e999", '{"b":' * 300 + "1" + "}" * 300]
)
def test_a_whole_body_has_the_arguments_of_the_stream_in_the_models_spelling(value):
    request = MessagesRequest(**ASK)
    answer = f'"input":{{}}<tool_call>{{"name": "f", "arguments": {{"a":{value}}}}}</tool_call>.'
    context = CallContext(CALL_FORMS["hermes"])
    writer = MessagesWriter(request, "msg_1", "tale", None, lambda: AnswerParser(context))
    writer.add(Delta(0, 0, range(70), token_ids=[1], text=answer, finish_reason="stop"))
    assert f'"name":"f","input":{{"a":{value}}}}},{{"type":"text","text":"."}}]' in writer.json()


def test_the_definition_of_a_tool_is_written_once():
    one = {"type": "tool_reference", "tool_name": "lamp"}
    chat = chat_of({
        "messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [one] * 3}]}],
        "tools": [{"name": "lamp", "input_schema": {}, "defer_loading": True}],
    })  # fmt: skip
    definition, *names = chat.messages[0].content.split("\n")
    assert '"name": "lamp"' in definition and names == ["lamp", "lamp"]


def test_a_removed_tool_can_be_added_again_and_is_no_choice_before():
    def message(kind, **tool):
        return {"role": "system", "content": [{"type": kind, "tool": tool}]}

    user = {"role": "user", "content": "x"}
    lamps = [{"name": "lamp", "description": text, "input_schema": {}} for text in ("Old", "New")]
    added, again = [message("tool_addition", definition=one) for one in lamps]
    removed = message("tool_removal", name="lamp")
    referred = message("tool_addition", name="lamp")
    choice = {"tool_choice": {"type": "tool", "name": "lamp"}}
    with pytest.raises(ApiError, match=r"^tool_choice.name is 'lamp'; the tools are none"):
        chat_of(choice | {"messages": [user, added, removed]})
    for messages, last in (([again], "New"), ([referred], "Old"), ([again, again], "New")):
        chat = chat_of(choice | {"messages": [user, added, removed, *messages]})
        assert [one["function"]["description"] for one in chat.tools] == [last]
        definitions = [one.content for one in chat.messages if '"name": "lamp"' in one.content]
        assert len(definitions) == 1 + messages.count(again)
    with pytest.raises(ApiError, match=r"^messages.1.content.0.tool.definition.name is 'lamp'"):
        chat_of({"messages": [user, added], "tools": lamps[:1]})


def test_half_a_character_in_an_earlier_call_reaches_no_tokenizer():
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {"a": "x\ud83d"}}
    body = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": [call]},
                         {"role": "user", "content": "y"}]}  # fmt: skip
    assert '{"a": "x?"}' in prompt_of(body, model_of("late_kept"))


def prompt_of(body, model, hides=True):
    """The text that the template makes of a request of either API."""
    if "input" in body:
        request = ResponsesRequest(**body)
        tools = ClientTools(request.tools)
        own = own_items(request, lambda name, field: pytest.fail(name))
        chat = translate.translated(request, (), own, tools, model)
    else:
        chat = translated(MessagesPrompt(**body), model)
    return asyncio.run(chat_prompt(chat.chat, model, chat.hidden if hides else ()))


def shared(before, after):
    """The part of the full pages of one prompt with which the next one begins, in percent."""
    library = load_tokenizer(TALE)
    first, second = (library.encode(text, add_special_tokens=False) for text in (before, after))
    same = next((n for n, pair in enumerate(zip(first, second, strict=False))
                 if pair[0] != pair[1]), min(len(first), len(second)))  # fmt: skip
    return 100 * (same // 64) / (len(first) // 64)


@pytest.mark.parametrize("template", LATE)
@pytest.mark.parametrize(
    ("agent", "num_turns", "loads", "most"), [(claude_code, 3, 1, 60), (codex, 4, 2, 90)]
)
def test_a_turn_shares_the_turn_before_also_when_a_tool_was_loaded(
    template, agent, num_turns, loads, most
):
    model = model_of(template)
    prompts = [prompt_of(agent(turn + 1), model) for turn in range(num_turns)]
    for before, after in itertools.pairwise(prompts):
        assert shared(before, after) >= 95
    # Tools that are loaded at the top change the prompt from there on.
    tops = [prompt_of(agent(turn), model, hides=False) for turn in (loads, loads + 1)]
    assert shared(*tops) < most


@pytest.mark.parametrize("template", LATE)
def test_a_loaded_tool_is_written_once_and_no_billing_header(template):
    model = model_of(template)
    first, second = (prompt_of(claude_code(turn), model) for turn in (1, 2))
    # The header of another talk changes nothing.
    assert prompt_of(claude_code(1, "d55"), model) == first
    for name in FOUND:
        assert f'"name": "{name}"' not in first
        assert second.count(f'"name": "{name}"') == 1


def test_a_deferred_tool_is_called_once_it_is_loaded(service):
    body = claude_code(2) | {"tool_choice": {"type": "tool", "name": FOUND[0]}, "stream": False}
    assert FOUND[0] in [one["function"]["name"] for one in chat_of(body).tools]
    with pytest.raises(ApiError, match=f"^tool_choice.name is '{FOUND[0]}'"):
        chat_of(claude_code(1) | {"tool_choice": {"type": "tool", "name": FOUND[0]}})


def chat_of(body):
    return translated(MessagesPrompt(**body), model_of("late_kept")).chat


def test_messages_become_a_chat():
    chat = chat_of({
        "system": [{"type": "text", "text": "x-anthropic-billing-header: a"},
                   {"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "So.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "a", "name": "look", "input": {"at": 1}}]},
            {"role": "user", "content": [
                {"type": "text", "text": "Well?"},
                {"type": "tool_result", "tool_use_id": "a", "is_error": True, "content": [
                    {"type": "text", "text": "Dark."}, {"type": "image", "source": {}}]}]},
            {"role": "system", "content": [
                {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {
                    "name": "lamp", "input_schema": {"type": "object"}}}},
                {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}}]},
            {"role": "user", "content": "Go on."},
        ],
        "tools": [{"name": "look", "input_schema": {"type": "object"}, "strict": True}],
    })  # fmt: skip
    system, user, assistant, result, text, added, last = [
        one.model_dump(exclude_none=True) for one in chat.messages
    ]
    assert system["content"] == "Be kind.\n\nBe brief." and user["content"] == "Look."
    assert assistant["reasoning"] == "So." and assistant["content"] == "I look."
    assert json.loads(assistant["tool_calls"][0]["function"]["arguments"]) == {"at": 1}
    assert result == {"role": "tool", "tool_call_id": "a", "name": "look",
                      "content": f"Error: Dark.\n{PICTURE}"}  # fmt: skip
    assert text["content"] == "Well?" and last["content"] == "Go on."
    assert '"name": "lamp"' in added["content"] and "look is no longer" in added["content"]
    assert [one["function"]["name"] for one in chat.tools] == ["look", "lamp"]


def test_the_devices_id_is_the_tenant():
    for user_id, tenant in (
        (json.dumps({"device_id": "d" * 64, "session_id": "s"}), "d" * 64),
        ("alice", "alice"), ("[1]", "[1]"), ("[" * 9999, "[" * 9999), (None, ""),
    ):  # fmt: skip
        assert tenant_of(MessagesRequest(**ASK, metadata={"user_id": user_id})) == tenant


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"container": "c"}, "^container is not supported; leave it out"),
        ({"mcp_servers": [{}]}, "^mcp_servers is not supported; connect"),
        ({"compaction": {"a": 1}}, "^compaction is not supported; leave it out: send a shorter"),
        ({"fallbacks": [{}]}, "^fallbacks is not supported; leave"),
        ({"tools": [{"name": "a"}]}, "^tools.0 must have a name and an input_schema"),
        ({"tools": [{"name": "a", "input_schema": {}}] * 2}, "^tools.1.name is 'a'; another"),
        ({"messages": [{"role": "assistant", "content": "a"}], "thinking": {"type": "adaptive"}},
         "^messages.0 is the assistant's, to be continued; thinking must be disabled"),
        ({"messages": [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
         "^messages.0 is the assistant's, without text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
         "^messages.0.content.0 must have a tool_use_id"),
        ({"messages": [{"role": "user", "content": []}]}, "^messages.0.content is empty; it must"),
        ({"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": []}]},
         "^messages.1.content is empty; it must have text"),
        ({"messages": [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "b", "input": [1]}]}]},
         r"^messages.0.content.0.input is \[1\]; it must be an object"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "^messages.0.content.0 must be like"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field_and_what_to_send(fields, sentence):
    with pytest.raises(ApiError, match=sentence) as caught:
        chat_of(ASK | fields)
    assert caught.value.param in str(caught.value)


def test_fields_that_ask_for_nothing_are_ignored():
    empty = dict.fromkeys(("thread", "container", "mcp_servers"))
    chat = chat_of(ASK | empty | {"context_management": {"edits": []}, "safeguards": {"a": 1}})
    assert not MessagesRequest(**ASK, stream=None, tool_choice={
        "type": "auto", "disable_parallel_tool_use": None}).stream  # fmt: skip
    assert [one.content for one in chat.messages] == ["x"]


def events_of(text):
    return [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event")]


def test_pings_stand_before_the_first_token_and_a_late_refusal_is_an_event(service, monkeypatch):
    monkeypatch.setattr(responses, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(responses, "_PING_EVERY_S", 0.01)
    with httpx.stream("POST", f"{service.url}/v1/messages", json=ASK | {"stream": True},
                      timeout=WAIT_S) as answer:  # fmt: skip
        submission = service.submitted()
        lines = answer.iter_lines()
        assert answer.status_code == 200 and next(lines) == "event: ping"
        ended = Ended(submission.request_id, FinishReason.REFUSED, "the queue is full")
        service.front_end.ended(ended)
        text = "\n".join(lines)
    assert set(events_of(text)) <= {"ping", "error"} and events_of(text)[-1] == "error"
    error = json.loads(text.rsplit("data: ", 1)[1])
    assert error["error"] == {"type": "overloaded_error", "message": "the queue is full"}


def test_a_loss_in_the_middle_ends_a_stream_by_its_error_alone(service, monkeypatch):
    # The headers come before the first token.
    monkeypatch.setattr(responses, "_PATIENCE_S", 0.01)
    with httpx.stream("POST", f"{service.url}/v1/messages", json=ASK | {"stream": True},
                      timeout=WAIT_S) as answer:  # fmt: skip
        submission = service.submitted()
        service.instance.deliver(submission.request_id, 0, TOKENIZER.encode("<think>ab"))
        lines = answer.iter_lines()
        begun = [next(line for line in lines if "thinking_delta" in line)]
        sentence = "the cluster lost it"
        service.front_end.ended(Ended(submission.request_id, FinishReason.FAILED, sentence))
        *rest, last = [json.loads(line[6:]) for line in lines if line.startswith("data:")]
    assert begun and last["error"]["type"] == "overloaded_error"
    assert sentence in last["error"]["message"]
    assert {one["type"] for one in rest} <= {"content_block_delta"}


def test_a_full_queue_is_529_and_says_when_to_come_again(service):
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(service.post, "messages", ASK)
        submission = service.submitted()
        ended = Ended(submission.request_id, FinishReason.REFUSED, "the queue is full")
        service.front_end.ended(ended)
        answer = asked.result(WAIT_S)
    assert answer.status_code == 529 and int(answer.headers["Retry-After"]) >= 1
    assert answer.json()["error"]["type"] == "overloaded_error"
    assert answer.headers["Request-Id"] == answer.json()["request_id"]


def test_a_client_that_goes_away_holds_nothing(service):
    for fields in ({"stream": True}, {}):
        with connection(service) as client:
            send(client, ASK | fields, "messages")
            submission = service.submitted()
        assert service.controller.next_abort() == submission.request_id
        until(lambda: service.front_end.num_open == 0)


def test_the_start_says_the_form_of_calls(caplog):
    caplog.set_level("INFO")
    with running(model=model_of("late_kept")):
        until(lambda: "form of calls of tools: hermes" in caplog.text)
