"""Every field that clients of OpenAI and vLLM may send is used, refused by name, or harmless."""

import asyncio
import re
from typing import Any

import httpx
import openai
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from control_plane.frontend.client_request import NOWHERE
from control_plane.frontend.http.client_requests import (
    chat_prompt,
    chat_request,
    completion_requests,
)
from control_plane.frontend.http.errors import ApiError
from control_plane.frontend.http.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    TokenizeChatRequest,
)
from control_plane.frontend.http.served_model import ServedModel
from control_plane.frontend.http.tools.chat_template import ChatTemplate
from harness.paths import ROOT
from harness.services.openai_service import MODEL

# The request models of vLLM 0.33.0 (vllm/entrypoints/openai/*/protocol.py), names only. Those of
# 0.32.0 are the same without return_weight_versions.
OF_BOTH = """
add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo
frequency_penalty ignore_eos include_stop_str_in_output kv_transfer_params length_penalty
logit_bias logprob_token_ids logprobs max_tokens min_p min_tokens mm_payload model n
presence_penalty priority prompt_logprobs repetition_detection repetition_penalty request_id
response_format return_mm_kwargs return_token_ids return_token_offsets
return_tokens_as_token_ids return_weight_versions routed_experts_prompt_start seed session_id
skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream stream_interval
stream_options structured_outputs temperature thinking_token_budget top_k top_p
truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking
"""
OF_CHATS = """
add_generation_prompt chat_template chat_template_kwargs continue_final_message documents
include_reasoning max_completion_tokens media_io_kwargs messages mm_processor_kwargs
parallel_tool_calls reasoning_effort return_prompt_text tool_choice tools top_logprobs
"""
OF_COMPLETIONS = "prompt prompt_embeds suffix"
# Those of the installed client of OpenAI, whose `stream` is in classes of its own.
OPENAI = {
    ChatRequest: chat_create_params.CompletionCreateParamsBase.__annotations__,
    CompletionRequest: completion_create_params.CompletionCreateParamsBase.__annotations__,
}
VLLM = {ChatRequest: OF_BOTH + OF_CHATS, CompletionRequest: OF_BOTH + OF_COMPLETIONS}
BODIES: dict[type[GenerationRequest], tuple[str, dict[str, Any]]] = {
    ChatRequest: ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    CompletionRequest: ("completions", {"prompt": [5]}),
}
BOTH = pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)


@BOTH
def test_every_field_is_in_one_table(kind):
    tables = [set(kind.model_fields), set(kind.refused), set(kind.harmless)]
    for name in {*VLLM[kind].split(), *OPENAI[kind]}:
        assert sum(name in table for table in tables) == 1, (name, openai.VERSION)
    assert not tables[0] & tables[1] and not tables[0] & tables[2] and not tables[1] & tables[2]


@BOTH
def test_what_would_change_the_answer_is_refused_by_name(service, kind):
    path, body = BODIES[kind]
    with httpx.Client() as client:
        for name in kind.refused:
            for value, more in ((0, {}), ({"a": [1]}, {"stream": True}), ("right", {})):
                sent = {**body, **more, name: value}
                answer = client.post(f"{service.url}/v1/{path}", json=sent)
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, name), error
                assert error["message"].startswith(f"{name} is not supported; "), error
                assert repr(value) in error["message"], error
    assert service.controller.submissions.empty()


def asked(kind: type[GenerationRequest], **more: Any) -> Any:
    """What is asked of the cluster for a body, and what makes its parser."""
    request = kind.model_validate(BODIES[kind][1] | more)
    request.check_supported()
    if isinstance(request, ChatRequest):
        return asyncio.run(chat_request(request, MODEL, "id", NOWHERE))
    assert isinstance(request, CompletionRequest)
    return completion_requests(request, MODEL, "id", NOWHERE)


@BOTH
def test_what_is_harmless_leaves_the_request_as_it_is(kind):
    plain = asked(kind)
    for name in kind.harmless:
        for value in (True, 3, "x", {"a": 1}, None):
            assert asked(kind, **{name: value}) == plain, name
    for name in kind.refused:
        with pytest.raises(ApiError, match=rf"^{name} is not supported; .* It is True$"):
            asked(kind, **{name: True})
        for value in (None, False, "", [], {}):
            assert asked(kind, **{name: value}) == plain, name
    if kind is ChatRequest:
        assert asked(kind, modalities=["text"], verbosity="medium", documents=[]) == plain


def test_the_page_of_the_api_names_what_is_refused_and_what_is_harmless():
    page = (ROOT / "docs/use/api.md").read_text()
    named = set(re.findall(r"`(\w+)`", page))
    for kind in BODIES:
        assert {*kind.refused, *kind.harmless} <= named, {*kind.refused, *kind.harmless} - named


def model_of(source: str, has_reasoning: bool = False) -> ServedModel:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return ServedModel("tiny", "checkpoints/tiny", template, has_reasoning=has_reasoning)


def prompt_of(source: str, has_reasoning: bool = False, **body: Any) -> str:
    """The prompt of a chat, which /tokenize counts as well."""
    model = model_of(source, has_reasoning)
    texts = []
    for kind in (ChatRequest, TokenizeChatRequest):
        request = kind.model_validate({"messages": [{"role": "user", "content": "hi"}], **body})
        texts.append(asyncio.run(chat_prompt(request, model)))
    assert texts[0] == texts[1]
    return texts[0]


EFFORT = "{{ reasoning_effort | default('-') }}"
THINKS = "{{ enable_thinking | default('-') }}"
DEEPSEEK = "{% if thinking is defined %}{{ thinking }}{% else %}-{% endif %}"
DOCUMENTS = "{% for d in documents or [] %}{{ d.text }};{% endfor %}"
WITHIN = "{% macro shown() %}{% generation %}" + THINKS + "{% endgeneration %}{% endmacro %}"


@pytest.mark.parametrize(
    ("source", "body", "text"),
    [
        (EFFORT, {}, "-"),
        (EFFORT, {"reasoning_effort": None}, "-"),
        (EFFORT, {"reasoning_effort": "low"}, "low"),
        (EFFORT, {"reasoning_effort": "none"}, "none"),
        # As vLLM 0.32.0, build_chat_params: the field goes before chat_template_kwargs, and what
        # it says of thinking after them.
        (EFFORT, {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}},
         "high"),
        (THINKS, {"reasoning_effort": "none"}, "False"),
        (THINKS, {"reasoning_effort": "minimal"}, "True"),
        (THINKS, {"reasoning_effort": "max", "chat_template_kwargs": {"enable_thinking": False}},
         "False"),
        (THINKS + EFFORT, {"reasoning_effort": "xhigh"}, "Truexhigh"),
        (DEEPSEEK, {"reasoning_effort": "none"}, "False"),
        (DEEPSEEK, {"reasoning_effort": "medium"}, "True"),
        (DEEPSEEK, {"chat_template_kwargs": {"thinking": True}}, "True"),
        (WITHIN + "{{ shown() }}", {"reasoning_effort": "none"}, "False"),
        (DOCUMENTS, {"documents": [{"text": "Ulm"}, {"text": "Bonn"}]}, "Ulm;Bonn;"),
        (DOCUMENTS, {"chat_template_kwargs": {"documents": [{"text": "Ulm"}]}}, "Ulm;"),
        ("{{ verbosity }}", {"verbosity": "low"}, "low"),
        # Any further field that the template reads.
        (THINKS, {"enable_thinking": False}, "False"),
        (THINKS, {"enable_thinking": False, "reasoning_effort": "high"}, "False"),
        ("{{ date_string }}", {"date_string": "today"}, "today"),
        ("{% set mode = 'own' %}{{ mode }}", {"mode": "sent"}, "own"),
        ("{{ bos_token }}", {"namespace": 1, "raise_exception": 1, "range": 1}, "<s>"),
        ("{% if add_generation_prompt %}A{% endif %}", {}, "A"),
        ("{% if add_generation_prompt %}A{% endif %}", {"add_generation_prompt": False}, ""),
    ],
)  # fmt: skip
def test_what_the_template_reads_goes_to_it(source, body, text):
    assert prompt_of(source, **body) == text


@pytest.mark.parametrize(("field", "value"), [
    ("reasoning_effort", "low"),
    ("documents", [{"text": "Ulm"}]),
    ("verbosity", "high"),
])  # fmt: skip
def test_what_the_template_does_not_read_is_refused(field, value):
    with pytest.raises(ApiError, match=rf"{field} is .*leave it out: .* does not read") as caught:
        # Named in a comment and in a text, and not read.
        prompt_of("{# documents #}reasoning_effort: {{ messages[0].verbosity }}", **{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize("value", [{"type": "disabled"}, "false", 0])
@pytest.mark.parametrize(("source", "name"), [(THINKS, "enable_thinking"), (DEEPSEEK, "thinking")])
def test_what_the_template_would_take_for_thinking_is_true_or_false(source, name, value):
    with pytest.raises(ApiError, match=f"{name} is .*; it must be true or false") as caught:
        prompt_of(source, **{name: value})
    assert caught.value.param == name
    # Who does not read it is not asked.
    assert prompt_of("hi", **{name: value}) == "hi" and prompt_of(source, **{name: None}) == "-"


def test_no_effort_is_what_a_model_without_reasoning_has():
    assert prompt_of("hi", reasoning_effort="none") == "hi"
    with pytest.raises(ApiError, match="reasoning_effort is 'none'"):
        prompt_of("hi", has_reasoning=True, reasoning_effort="none")


def test_the_defaults_of_a_field_are_those_of_its_kind():
    with pytest.raises(ValueError, match="reasoning_effort"):
        ChatRequest.model_validate(BODIES[ChatRequest][1] | {"reasoning_effort": "extreme"})
