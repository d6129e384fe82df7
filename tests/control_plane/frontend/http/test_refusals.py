"""Mistakes that OpenAI's API refuses: a status and a sentence that names the field."""

import json
import re
from typing import Any

import httpx
import pytest

from control_plane.frontend.http import protocol
from harness.paths import ROOT

BAD: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    ("completions", {}, 400, "prompt", "prompt is absent; it is required"),
    ("completions", {"prompt": 3}, 400, "prompt", "prompt is 3: "),
    ("completions", {"prompt": ""}, 400, "prompt", "prompt is empty"),
    ("completions", {"prompt": []}, 400, "prompt", "prompt is "),
    ("completions", {"prompt": [[]]}, 400, "prompt", "prompt is empty"),
    ("completions", {"prompt": [5, 300]}, 400, "prompt", r"prompt has 300; ids must be below"),
    ("completions", {"prompt": [5, -1]}, 400, "prompt.1", "greater than or equal to 0"),
    ("completions", {"prompt": [5], "model": "huge"}, 404, "model",
     "'huge' is not served here; 'tiny' is"),
    ("completions", {"prompt": [5], "temperature": "hot"}, 400, "temperature",
     "temperature is 'hot': "),
    ("completions", {"prompt": [5], "temperature": -1}, 400, "temperature", "temperature is -1"),
    ("completions", {"prompt": [5], "max_tokens": 0}, 400, "max_tokens", "max_tokens is 0"),
    ("completions", {"prompt": [5], "max_tokens": 10**30}, 400, "max_tokens",
     "max_tokens is 1000000"),
    ("completions", {"prompt": [5], "n": 0}, 400, "n", "n is 0"),
    ("completions", {"prompt": [5], "n": 2, "temperature": 0}, 400, "n", "greedy"),
    ("completions", {"prompt": [5], "top_k": -2}, 400, "top_k", "top_k is -2"),
    ("completions", {"prompt": [5], "logit_bias": {"the": 1}}, 400, "logit_bias",
     "'the'; its keys must be token ids"),
    ("completions", {"prompt": [5], "logit_bias": {"1" * 5000: 1}}, 400, "logit_bias",
     "its keys must be token ids"),
    ("completions", {"prompt": [5], "logprobs": 21}, 400, "logprobs", "logprobs is 21"),
    ("completions", {"prompt": [5], "stop": [""]}, 400, "stop",
     "stop has a string of 0 characters"),
    ("completions", {"prompt": [5], "stream_options": {}}, 400, "stream_options",
     "it needs stream to be true"),
    ("completions", {"prompt": [5], "suffix": "."}, 400, "suffix", "suffix is not supported"),
    ("completions", {"prompt": [5], "use_beam_search": True}, 400, "use_beam_search",
     "is not supported"),
    ("completions", {"prompt": [5], "response_format": {"type": "xml"}}, 400,
     "response_format.type", "'json_object'"),
    ("completions", {"prompt": [5], "structured_outputs": {"regex": "("}}, 400,
     "structured_outputs.regex", "regex cannot be used"),
    ("completions", {"prompt": [5], "guided_choice": ["a"]}, 400, "guided_choice",
     "guided_choice is not supported"),
    ("completions", {"prompt": [5], "best_of": 2}, 400, "best_of",
     "best_of is 2; it must be at most n (1)"),
    ("completions", {"prompt": [5], "best_of": 4, "n": 3}, 400, "best_of",
     "it must be at most n (3)"),
    ("completions", {"prompt": [5], "request_id": "x" * 200}, 400, "request_id",
     "request_id has 200 characters"),
    ("completions", {"prompt": [5], "priority": 101}, 400, "priority", "priority is 101"),
    ("completions", {"prompt": [5], "seed": 1 << 64}, 400, "seed", "seed is 18446744073709551616"),
    ("completions", {"prompt": [5], "prompt_logprobs": 0, "stream": True}, 400, "prompt_logprobs",
     "stream to be false"),
    ("completions", {"prompt": [5], "echo": True, "logprobs": 21}, 400, "logprobs",
     "logprobs is 21"),
    ("completions", {"prompt": ["\ud800"]}, 400, None, "the body is not Unicode text"),
    ("chat/completions", {"messages": []}, 400, "messages", "messages is "),
    ("chat/completions", {"messages": [{"content": "hi"}]}, 400, "messages.0.role",
     "messages.0.role is absent"),
    ("chat/completions", {"messages": [{"role": "user", "content": 3}]}, 400, "messages.0.content",
     "content is 3"),
    ("chat/completions",
     {"messages": [{"role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     400, "messages.0.content", "a part of type 'image_url'; only text parts"),
    ("chat/completions", {"messages": [{"role": "u"}], "chat_template": "x"}, 400, "chat_template",
     "only the model's own"),
    ("chat/completions", {"messages": [{"role": "u"}], "tools": [{}]}, 400, "tools",
     "tools.0 must be"),
    ("chat/completions", {"messages": [{"role": "u"}], "top_logprobs": 2}, 400, "top_logprobs",
     "needs logprobs"),
    ("chat/completions", {"messages": [{"role": "u"}], "logprobs": True, "top_logprobs": 21}, 400,
     "top_logprobs", "top_logprobs is 21; it must be from 0 to 20"),
    ("chat/completions", {"messages": [{"role": "u"}], "chat_template_kwargs": {"tools": 1}}, 400,
     "chat_template_kwargs", "chat_template_kwargs has tools, which the service sets"),
    ("chat/completions",
     {"messages": [{"role": "u"}], "add_generation_prompt": True, "continue_final_message": True},
     400, "add_generation_prompt", "are both true; one must be false"),
    ("chat/completions", {"messages": [{"role": "u"}], "max_completion_tokens": 0}, 400,
     "max_completion_tokens", "max_completion_tokens is 0; it must be at least 1"),
    ("chat/completions", {"messages": [{"role": "u"}], "max_completion_tokens": 10**6}, 400,
     "max_completion_tokens", "max_completion_tokens is 1000000; it must be at most"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "sentence"), BAD, ids=lambda value: str(value)[:40]
)
def test_a_mistake_is_a_status_and_a_sentence_that_names_it(
    service, path, body, status, param, sentence
):
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{service.url}/v1/{path}", content=json.dumps(body), headers=headers)
    error = response.json()["error"]
    code = "context_length_exceeded" if "maximum context" in error["message"] else status
    assert (response.status_code, error["code"], error["param"]) == (status, code, param), error
    assert sentence in error["message"] and error["type"].endswith("Error")
    assert service.controller.submissions.empty()


def test_one_bad_prompt_of_several_ends_the_others(service):
    response = httpx.post(f"{service.url}/v1/completions", json={"prompt": [[5], [6], [300]]})
    assert response.status_code == 400 and "prompt has 300" in response.json()["error"]["message"]
    submitted = [service.next_request() for _ in range(2)]
    assert sorted(service.next_abort() for _ in range(2)) == submitted


@pytest.mark.parametrize(("content", "kind", "status", "sentence"), [
    (b'{"prompt": ', "application/json", 400,
     "the body is not JSON: Expecting value at character 11"),
    (b"[]", "application/json", 400, "the body is not a JSON object"),
    (b"", "application/json", 400, "the body is not a JSON object"),
    (b'{"prompt": "\xff"}', "application/json", 400, "the body "),
    (b"[" * 100_000, "application/json", 400, "not nested too deeply"),
    (b'{"prompt": "a"}', "text/plain", 415,
     "the Content-Type is text/plain; it must be application/json"),
    (b'{"prompt": "%b"}' % (b"x" * (5 << 20)), "application/json", 413,
     "the body is larger than any request"),
])  # fmt: skip
def test_a_body_that_is_none_is_a_sentence(service, content, kind, status, sentence):
    response = httpx.post(
        f"{service.url}/v1/completions", content=content, headers={"Content-Type": kind}
    )
    assert response.status_code == status and sentence in response.json()["error"]["message"], (
        response.text
    )


def test_a_body_of_any_depth_is_the_clients_mistake(service):
    """At some depth it can be read, and a schema in it not be written again."""
    kind = {"Content-Type": "application/json"}
    with httpx.Client() as client:
        for depth in range(900, 1000, 3):
            schema = b'{"a":' * depth + b"1" + b"}" * depth
            body = b'{"prompt": "a", "structured_outputs": {"json": %b}}' % schema
            answer = client.post(f"{service.url}/v1/completions", content=body, headers=kind)
            assert answer.status_code == 400, depth


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/completions", 405), ("GET", "/v2", 404)]
)
def test_what_is_not_there_is_a_sentence_too(service, method, path, status):
    response = httpx.request(method, service.url + path)
    assert response.status_code == status and path in response.json()["error"]["message"]


def test_the_page_of_the_api_names_every_field_and_endpoint(service):
    page = (ROOT / "docs/use/api.md").read_text()
    named = set(re.findall(r"`([\w/]+)`", page)) | set(re.findall(r"(?:GET|POST) (/[\w/.]+)", page))
    fields = {*protocol.CompletionRequest.model_fields, *protocol.ChatRequest.model_fields}
    paths = {
        path.partition("/{")[0] for path in httpx.get(f"{service.url}/openapi.json").json()["paths"]
    }
    assert fields | paths <= named, (fields | paths) - named


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("messages", {"max_tokens": 0, "messages": []}, "messages is []"),
        ("messages", {"max_tokens": 1, "messages": [{"role": "user", "content": []}]}, "is empty"),
        ("responses", {"input": "x", "prompt": {"id": "a"}}, "prompt is not supported"),
        ("chat/completions", {"model": "none", "messages": []}, "messages is []"),
        ("completions", {"prompt": [5], "temperature": -1}, "temperature is -1"),
    ],
)
def test_a_refusal_is_one_line_of_the_log(service, caplog, path, body, sentence):
    caplog.set_level("INFO", "nanocp.requests")
    answer = service.post(path, body, headers={"X-Request-Id": "mine"})
    assert answer.status_code == 400
    (line,) = [record.fields for record in caplog.records if record.name == "nanocp.requests"]
    assert line["id"].endswith("mine") and line["endpoint"] == f"/v1/{path}"
    assert line["reason"] == "invalid" and sentence in line["error"]
