"""What the benchmark's client makes of others' streams: first tokens, tokens of messages, failures.

A server writes the pieces of one answer; its clock is the client's.
"""

import asyncio
import json
import time

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from nanocp.bench import report
from nanocp.bench.backends import Events, OpenAIBackend, RequestOutput
from nanocp.bench.dataset import SampleRequest
from nanocp.bench.load import send_all

USAGE = {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}


def asked(pieces, is_chat=True, content_type="text/event-stream", cuts_off=False):
    """(outputs of two requests, when each piece was written): the first answer is as given."""
    written, path = [], "/v1/x"
    good = [event(chunk({"content": "la"}, "stop")), b"data: [DONE]\n\n"]

    async def answer(request):
        response = web.StreamResponse(headers={"Content-Type": content_type})
        await response.prepare(request)
        for piece in good if written else pieces:
            written.append(time.perf_counter())
            await response.write(piece)
            await asyncio.sleep(0.001)
        if cuts_off and len(written) == len(pieces):
            request.transport.close()
        return response

    async def both():
        app = web.Application()
        app.add_routes([web.post(path, answer)])
        server = TestServer(app)
        await server.start_server()
        backend = OpenAIBackend(f"http://127.0.0.1:{server.port}", path, "m", is_chat, {}, {})
        requests = [SampleRequest("a", 1, 5)] * 2
        outputs, _ = await send_all(backend, requests, [0.0, 0.0], 1, "x")
        await backend.close()
        await server.close()
        return outputs

    return asyncio.run(both()), written


def event(values):
    return f"data: {json.dumps(values)}\n\n".encode()


def chunk(delta, finish=None, **others):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **others}


def text(said, finish=None, **others):
    return {"choices": [{"index": 0, "text": said, "finish_reason": finish, **others}]}


ROLE = {"role": "assistant"}
CALL = {"id": "call_1", "type": "function", "index": 0}
LAST = chunk({}, "stop")
END = {"choices": [], "usage": USAGE}


@pytest.mark.parametrize(("first", "num_messages", "said", "events"), [
    (1, 4, "abcd", [chunk(ROLE | {"content": ""}), *(chunk({"content": x}) for x in "abcd")]),
    (0, 4, "abcd", [chunk(ROLE | {"content": x}) for x in "abcd"]),
    (1, 4, "abcd", [chunk(ROLE), *(chunk(ROLE | {"reasoning": x}) for x in "abcd")]),
    (0, 4, "abcd", [chunk({"reasoning_content": x, "content": None}) for x in "abcd"]),
    (0, 4, "abcd", [chunk({"reasoning": x, "reasoning_content": x}) for x in "abcd"]),
    (0, 4, "abcd", [chunk({"thinking": x}) for x in "abcd"]),
    (0, 4, "abcd", [chunk({"refusal": x}) for x in "abcd"]),
    (0, 4, "abcd", [chunk({"content": [{"type": "text", "text": x}]}) for x in "abcd"]),
    (1, 4, "fa{}",
     [chunk(ROLE | {"content": None, "tool_calls": []}),
      chunk({"tool_calls": [CALL | {"function": {"name": "f", "arguments": ""}}]}),
      chunk({"tool_calls": [{"index": 0, "function": {"arguments": "a"}}]}),
      chunk({"function_call": {"arguments": "{"}}),
      chunk({"function_call": {"arguments": "}"}})]),
    (0, 2, "ab", [chunk({"content": "a"}), chunk({"content": "b"}, "length")]),
    (0, 1, "ab", [chunk({"reasoning": "ab"}, "length")]),
    (2, 2, "ab", [END, chunk({}), chunk({"content": "a"}), chunk({}), chunk({"content": "b"})]),
    (1, 2, "ab", [chunk({"content": ""}), chunk({"content": "a"}), chunk({"content": "b"})]),
])  # fmt: skip
def test_the_first_content_of_any_kind_is_the_first_token(first, num_messages, said, events):
    pieces = [*map(event, [*events, LAST, END]), b"data: [DONE]\n\n"]
    (output, _), written = asked(pieces)
    assert output.success, output.error
    assert (output.text, len(output.itl_s) + 1, output.output_len) == (said, num_messages, 4)
    assert written[first] <= output.start_s + output.ttft_s
    last = first + len(events) - 1 - (first if events[0] is not END else 2)
    assert written[last] <= output.start_s + output.latency_s, "the last content is the last token"
    assert sum(output.tokens) == pytest.approx(4) and output.prompt_len == 7


def test_tokens_without_text_count_as_far_as_the_usage_has_them():
    events = [text(""), text("a"), text(""), text("bc"), text("", "length"), END]
    (output, _), _ = asked(map(event, events), is_chat=False)
    assert output.text == "abc" and len(output.itl_s) == 2, "before the first and after the last"
    none = [text(""), text(""), text("", "length")]
    (output, _), _ = asked(map(event, none), is_chat=False)
    assert output.success and output.output_len == 2 and len(output.itl_s) == 1


@pytest.mark.parametrize(("tokens", "is_chat", "events"), [
    ([2, 1, 1], True, [chunk({"content": "aa"}), chunk({"content": "b"}), chunk({"content": "c"})]),
    ([1, 3],
     True,
     [chunk(ROLE, usage=USAGE | {"completion_tokens": 0}),
      chunk({"content": "a long word"}, usage=USAGE | {"completion_tokens": 1}),
      chunk({"content": "b"}, usage=USAGE)]),
    ([3, 1], False, [text("a", token_ids=[1, 2, 3]), text("a long word", token_ids=[4])]),
    ([3, 1],
     False,
     [text("a", logprobs={"tokens": ["a"] * 3}), text("b", logprobs={"tokens": ["b"]})]),
    ([1, 1, 1, 1], False, [text("a long word"), text("b"), text("c"), text("d")]),
])  # fmt: skip
def test_a_message_has_as_many_tokens_as_it_brings(tokens, is_chat, events):
    (output, _), _ = asked([*map(event, [*events, END]), b"data: [DONE]"], is_chat)
    assert output.success, output.error
    if tokens == [2, 1, 1]:
        assert output.tokens == pytest.approx([1.5, 1.25, 1.25]), "by the number of characters"
    else:
        assert output.tokens == tokens


def test_the_peak_counts_tokens():
    values = {"success": True, "output_len": 80, "latency_s": 1.0, "ttft_s": 0.1}
    output = RequestOutput(10, 0.0, itl_s=[0.1] * 8, tokens=[8.0] * 9, **values)
    made = report.result([output], 1.0, {}, [], [])
    assert made["max_output_tokens_per_s"] == 72


TOKEN = event(chunk({"content": "la"}))


@pytest.mark.parametrize(("pieces", "sentence"), [
    ([b"data: " + b"[" * 200_000 + b"\n\n"], "RecursionError"),
    ([event(chunk({"content": "\xff"})).replace(b"\\u00ff", b"\xff")], "'utf-8' codec"),
    ([TOKEN, b"data: {\n\n"], "JSONDecodeError"),
    ([TOKEN, b"data: null\n\n"], "is no chunk (TypeError: it is None)"),
    ([TOKEN, event({"choices": 5})], "is no chunk"),
    ([TOKEN, event(chunk(5))], "is no chunk"),
    ([TOKEN, event({"usage": {"completion_tokens": 1e400}})], "usage has inf tokens"),
    ([TOKEN, event({"usage": {"completion_tokens": -1}})], "usage has -1 tokens"),
    ([TOKEN, event({"type": "error", "message": "no room"})], "no room"),
    ([TOKEN, event({"error": "\ud800"})], "\ud800"),
    ([TOKEN, b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>gone</html>\n"], "is no stream: <html>"),
    ([TOKEN], "the answer broke off"),
])  # fmt: skip
def test_an_odd_answer_is_one_failed_request(pieces, sentence):
    (odd, good), _ = asked(pieces)
    assert not odd.success and sentence in odd.error and len(odd.error) < 700
    assert good.success and good.text == "la"


def test_a_connection_that_is_cut_is_one_failed_request():
    (odd, good), _ = asked([TOKEN], cuts_off=True)
    assert "Error" in odd.error and good.success


def test_a_whole_body_instead_of_a_stream_is_named():
    (odd, good), _ = asked([b'{"choices": [{"message": {}}]}'], content_type="application/json")
    assert odd.error.startswith("the answer, of type application/json, is no stream: {") and good


def events_of(pieces):
    class Content:
        async def iter_any(self):
            for piece in pieces:
                yield piece

    async def read():
        return [event async for event in Events().of(Content())]

    return asyncio.run(read())


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n", "\n"])
def test_events_are_read_however_they_are_cut(size, end):
    """A line is as long as it is; an event may have several lines, comments and other fields."""
    long, line = chunk(ROLE, prompt_token_ids=list(range(20_000))), end[: -(len(end) // -2)]
    lines = [
        f"data: {json.dumps(long)}",
        *([] if end == "\n" else [f'data: {{"choices":{line}data: []}}']),
        f": ping{end}event: message{line}id: 5{line}data:{json.dumps(LAST)}",
        "data: [DONE]",
    ]
    whole = end.join(lines).encode()
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    several = [] if end == "\n" else [{"choices": []}]
    assert events_of(pieces) == [long, *several, LAST, None]


def test_a_line_without_an_end_takes_time_in_its_length_only():
    assert events_of([b"a" * 10_000] * 2000) == []
