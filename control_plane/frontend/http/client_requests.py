"""ClientRequests made of the bodies of OpenAI's API, before control_plane.frontend.validation."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import Request

from control_plane.frontend.client_request import (
    ClientRequest,
    Origin,
    Reasoning,
    Resume,
    ResumedChoice,
)
from control_plane.frontend.http.errors import ApiError
from control_plane.frontend.http.middleware import REQUEST_ID_HEADER
from control_plane.frontend.http.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    ResumeBody,
    StructuredOutputs,
    TemplateFields,
)
from control_plane.frontend.http.served_model import ServedModel
from control_plane.frontend.http.tools.answer_parser import THINK
from control_plane.frontend.http.tools.chat_tools import read_tools
from control_plane.frontend.http.tools.conversation import conversation
from control_plane.frontend.http.tools.forced_calls import Parser
from control_plane.frontend.open_requests import OpenRequests
from control_plane.frontend.text.default_sampling import our_top_k
from control_plane.frontend.text.long_texts import in_thread
from control_plane.frontend.text.tokenizer import Tokenizer
from control_plane.frontend.validation import check_request_id
from nanocp.values.sampling_fields import CONTROLS, NUM_SEEDS

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for a completion. A chat may use the model's whole length."""
_KINDS = ("json_", "regex", "choice", "grammar", "json_object", "structural_tag")
_EFFORT, _THINKING = "reasoning_effort", ("enable_thinking", "thinking")
"""Template variables that turn reasoning on or off; the first one is vLLM's."""


def check_model(name: str | None, model: ServedModel) -> None:
    """Raise ApiError if the request names another model than the served one."""
    if name not in (None, "", model.name):
        raise ApiError(
            f"the model {name!r} is not served here; {model.name!r} is",
            "model",
            HTTPStatus.NOT_FOUND,
        )


def required_tokenizer(open_requests: OpenRequests) -> Tokenizer:
    """Return the checkpoint's tokenizer. Raises ApiError without one."""
    if open_requests.tokenizer is None:
        raise ApiError("the checkpoint has no tokenizer.json: only token ids can be used")
    return open_requests.tokenizer


def call_id(prefix: str, http_request: Request, request: GenerationRequest) -> str:
    """Return the id of the response, from the header, else from the body. Raises ApiError."""
    if request.request_id and not http_request.headers.get(REQUEST_ID_HEADER):
        http_request.state.request_id = request.request_id
    try:
        check_request_id(http_request.state.request_id)
    except ValueError as error:
        raise ApiError(str(error), "request_id") from error
    return f"{prefix}{http_request.state.request_id}"


def completion_requests(
    request: CompletionRequest, model: ServedModel, request_id: str, origin: Origin
) -> list[ClientRequest]:
    """Return the requests of a completion, one for each prompt."""
    prompt = request.prompt
    # All elements of a list are of one kind.
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    prompts: Sequence[Any] = [prompt] if is_one else prompt
    if request.resume and (len(prompts) > 1 or request.echo):
        raise ApiError("resume is given; it needs one prompt, and echo to be false", "resume")
    if origin.remote is not None and len(prompts) > 1:
        sentence = f"prompt has {len(prompts)} prompts; with kv_transfer_params it must be one"
        raise ApiError(sentence, "prompt")
    shared = _shared(request, model)
    if request.echo and request.logprobs is not None:
        # Both come from one computation, which the larger number asks for.
        asked = shared["prompt_logprobs"]
        if asked is None or 0 <= asked < request.logprobs:
            shared["prompt_logprobs"] = request.logprobs
    return [
        ClientRequest(
            prompt=one,
            prompt_field="prompt",
            origin=origin,
            request_id=request_id,
            prompt_number=number,
            add_special_tokens=request.add_special_tokens is not False,
            max_tokens=_max_tokens(request),
            logprobs=request.logprobs,
            **shared,
        )
        for number, one in enumerate(prompts)
    ]


def _max_tokens(request: CompletionRequest) -> int:
    if request.max_tokens is None:
        return _DEFAULT_MAX_TOKENS
    # As in vLLM: one token is generated and not returned.
    return 1 if request.is_prompt_only else request.max_tokens


async def chat_request(
    request: ChatRequest,
    model: ServedModel,
    request_id: str,
    origin: Origin,
    hidden: Collection[str] = (),
) -> tuple[ClientRequest, Callable[[], Parser] | None]:
    """Return the request of a chat with its text, and its maker of parsers.

    hidden: see chat_prompt.
    """
    field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    fields = _shared(request, model)
    has_format = "constraint_field" in fields
    tools = read_tools(request, model.call_form, has_format)
    prompt = await chat_prompt(request, model, hidden)
    fields |= tools.constraint(is_free=not has_format)
    fields["reasoning"] = _reasoning(model, prompt, is_held="constraint_field" in fields)
    parser = tools.new_parser(fields["reasoning"])
    if parser is not None:
        # Markers may be special tokens.
        fields["skip_special_tokens"] = False
    asked = ClientRequest(
        prompt=prompt,
        prompt_field="messages",
        origin=origin,
        request_id=request_id,
        # A chat template writes them itself.
        add_special_tokens=bool(request.add_special_tokens),
        max_tokens=getattr(request, field),
        max_tokens_field=field,
        new_contents=parser,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        **fields,
    )
    return asked, parser


def _reasoning(model: ServedModel, prompt: str, is_held: bool) -> Reasoning | None:
    """is_held: the answer has a constraint.

    Then nothing comes before it if the prompt has ended the reasoning.
    """
    end = prompt.rstrip()
    if not model.has_reasoning or (is_held and end.endswith(THINK[1])):
        return None
    return Reasoning(*THINK, has_begun=end.endswith(THINK[0]))


async def chat_prompt(
    request: TemplateFields, model: ServedModel, hidden: Collection[str] = ()
) -> str:
    """Render the messages by the model's template. Raises ApiError.

    hidden: names of tools that the template does not get, since messages define them.
    """
    if model.chat_template is None:
        raise ApiError(
            f"{model.name!r} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json); use /v1/completions",
            "messages",
        )
    arguments = _template_arguments(request, model)
    adds_prompt = request.add_generation_prompt
    if adds_prompt is None:
        adds_prompt = not request.continue_final_message
    try:
        return await asyncio.to_thread(
            model.chat_template.render,
            conversation(request.messages, model.chat_template),
            tools=_shown(request.tools, hidden),
            add_generation_prompt=adds_prompt,
            continue_final_message=request.continue_final_message,
            arguments=arguments,
        )
    except ValueError as error:
        # It begins with the field.
        raise ApiError(str(error), str(error).partition(" ")[0]) from error


async def prompt_length(
    request: TemplateFields,
    model: ServedModel,
    open_requests: OpenRequests,
    hidden: Collection[str] = (),
) -> int:
    """Return the tokens of a chat's prompt. Raises ApiError.

    hidden: see chat_prompt.
    """
    text = await chat_prompt(request, model, hidden)
    encode = partial(required_tokenizer(open_requests).encode, add_special_tokens=False)
    return len(await in_thread(len(text), False, encode, text))


def _shown(tools: list[dict[str, Any]] | None, hidden: Collection[str]) -> Any:
    """Return the rest; of no tools the template sees none: some write an empty list otherwise."""
    if not hidden:
        return tools
    return [one for one in tools or () if one["function"]["name"] not in hidden] or None


def _template_arguments(request: TemplateFields, model: ServedModel) -> dict[str, Any]:
    """Raises ApiError for a field that the template would not read."""
    assert model.chat_template is not None
    read, extra = model.chat_template.variables, request.model_extra or {}
    arguments = dict(request.chat_template_kwargs or {})
    arguments |= {name: extra[name] for name in read & extra.keys() if extra[name] is not None}
    for name in read & extra.keys() & {*_THINKING}:
        # Else {"type": "disabled"}, as other services have it, would be true to the template.
        if not isinstance(value := extra[name], bool | None):
            raise ApiError(f"{name} is {value!r:.60}; it must be true or false", name)
    # A model that never reasons does so without effort already.
    effort = "none" if not model.has_reasoning else None
    for name, neutral in (("documents", []), ("verbosity", "medium"), (_EFFORT, effort)):
        also = _THINKING if name == _EFFORT else ()
        value = getattr(request, name)
        if value is not None and not read.isdisjoint((name, *also)):
            arguments = {**dict.fromkeys(also, value != "none"), **arguments, name: value}
        elif value not in (None, neutral):
            raise ApiError(
                f"{name} is {value!r:.60}; leave it out: the model's chat template does not read "
                f"{' or '.join((name, *also))}",
                name,
            )
    return arguments


def _shared(request: GenerationRequest, model: ServedModel) -> dict[str, Any]:
    sampling: dict[str, Any] = {"temperature": 1.0, **model.default_sampling}
    sampling.pop("max_tokens", None)  # A chat's default, which the validation has too.
    sampling |= {name: value for name in CONTROLS if (value := getattr(request, name)) is not None}
    sampling["top_k"] = our_top_k(sampling.get("top_k", 0))
    return {
        **sampling,
        "n": 1 if request.n is None else request.n,
        # -1 draws one; other negative numbers are seeds too, as in vLLM.
        "seed": None if request.seed in (None, -1) else request.seed % NUM_SEEDS,
        "stop": [request.stop] if isinstance(request.stop, str) else request.stop or [],
        "stop_token_ids": request.stop_token_ids or [],
        "include_stop_str_in_output": request.include_stop_str_in_output,
        "skip_special_tokens": request.skip_special_tokens,
        "ignore_eos": request.ignore_eos,
        "min_tokens": request.min_tokens,
        "logit_bias": _logit_bias(request.logit_bias or {}),
        "bad_words": request.bad_words or [],
        **_constraint(request),
        "prompt_logprobs": request.prompt_logprobs,
        "queue_timeout_ms": request.queue_timeout_ms,
        "resume": _resume(request.resume) if request.resume else None,
    }


def _resume(body: ResumeBody) -> Resume:
    choices = tuple(ResumedChoice(choice.index, choice.output_ids) for choice in body.choices)
    return Resume(choices, body.attempt)


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    for token_id in biases:
        if not re.fullmatch("[0-9]{1,18}", token_id):
            raise ApiError(
                f"logit_bias has {token_id!r:.60}; its keys must be token ids", "logit_bias"
            )
    return {int(token_id): bias for token_id, bias in biases.items()}


def _constraint(request: GenerationRequest) -> dict[str, Any]:
    form, outputs = request.response_format, request.structured_outputs
    if form is not None and form.type == "text":
        form = None
    if outputs is not None:
        if form is not None:
            raise ApiError(
                "structured_outputs is given beside response_format; only one of them can be",
                "structured_outputs",
            )
        return _structured(outputs)
    if form is None:
        return {}
    if form.type == "json_object":
        return {"constraint_field": "response_format", "json_object": True}
    if form.type == "structural_tag":
        return {"constraint_field": "response_format", "structural_tag": form.tags}
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise ApiError(
            "response_format has no json_schema.schema; it is required", "response_format"
        )
    return {
        "constraint_field": "response_format",
        "json_schema": _schema_text(form.json_schema.schema_, {}),
    }


def _structured(outputs: StructuredOutputs) -> dict[str, Any]:
    given = {
        name: value for name in _KINDS if (value := getattr(outputs, name)) not in (None, False)
    }
    if len(given) != 1:
        names = ", ".join(name.strip("_") for name in given) or "none"
        raise ApiError(
            "structured_outputs must have exactly one of json, regex, choice, grammar, "
            f"json_object and structural_tag; it has {names}",
            "structured_outputs",
        )
    ((name, value),) = given.items()
    called = f"structured_outputs.{name.strip('_')}"
    if value == "":
        raise ApiError(f"{called} is empty; it must be a constraint", called)
    whitespace: dict[str, Any] = {}
    if not outputs.disable_any_whitespace:
        whitespace["whitespace_flexible"] = True
    if outputs.whitespace_pattern is not None:
        whitespace["whitespace_pattern"] = outputs.whitespace_pattern
    if name == "json_object" and whitespace:
        name, value = "json_", {"type": "object"}
    if name == "json_":
        name, value = "json_schema", _schema_text(value, whitespace)
    return {"constraint_field": called, name: value}


def _schema_text(schema: dict[str, Any] | bool | str, whitespace: dict[str, Any]) -> str:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ApiError(
                f"structured_outputs.json is no JSON: {error}", "structured_outputs.json"
            ) from error
    if whitespace and isinstance(schema, dict):
        schema = {"x-guidance": whitespace, **schema}
    return json.dumps(schema)
