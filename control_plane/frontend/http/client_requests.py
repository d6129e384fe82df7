"""ClientRequests made of the bodies that OpenAI's API has.

Enters: a validated body. Leaves: ClientRequests, or an ApiError naming the field. Does not know:
tokens, limits of the model (control_plane.frontend.validation checks those for both APIs).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import Request

from control_plane.frontend.api_keys import ApiKeys
from control_plane.frontend.client_request import (
    ClientRequest,
    Origin,
    Resume,
    ResumedChoice,
)
from control_plane.frontend.default_sampling import our_top_k
from control_plane.frontend.http.answer_parser import Parser
from control_plane.frontend.http.constraints import constraint_fields
from control_plane.frontend.http.conversation import conversation
from control_plane.frontend.http.errors import ApiError
from control_plane.frontend.http.middleware import REQUEST_ID_HEADER
from control_plane.frontend.http.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    ResumeBody,
    TokenizeChatRequest,
)
from control_plane.frontend.http.served_model import ServedModel
from control_plane.frontend.http.tools import (
    check_tools,
    constrained_fields,
    new_parser,
    reasoning_before,
)
from control_plane.frontend.validation import check_request_id
from nanocp.values.sampling_fields import CONTROLS, NUM_SEEDS

_DEFAULT_MAX_TOKENS = 16
"""Default of a completion, as OpenAI's. A chat may go on to the model's length."""


def check_model(name: str | None, model: ServedModel) -> None:
    """Raise ApiError if the request names another model than the served one."""
    if name not in (None, "", model.name):
        raise ApiError(
            f"the model {name!r} is not served here; {model.name!r} is",
            "model",
            HTTPStatus.NOT_FOUND,
        )


def call_id(prefix: str, http_request: Request, request: GenerationRequest) -> str:
    """The id of the response, and of its requests in the cluster.

    An id in the header goes before one in the body. Raises ApiError.
    """
    if request.request_id and not http_request.headers.get(REQUEST_ID_HEADER):
        http_request.state.request_id = request.request_id
    try:
        check_request_id(http_request.state.request_id)
    except ValueError as error:
        raise ApiError(str(error), "request_id") from error
    return f"{prefix}-{http_request.state.request_id}"


def origin_of(http_request: Request, request: GenerationRequest, keys: ApiKeys) -> Origin:
    """Where the request comes from, by its headers and its body."""
    headers = http_request.headers
    return Origin(
        request.priority,
        http_request.url.path,
        keys.tenant(headers.get("Authorization"), request.user or ""),
        headers.get("traceparent", ""),
    )


def completion_requests(
    request: CompletionRequest, model: ServedModel, request_id: str, origin: Origin
) -> list[ClientRequest]:
    """The requests of a completion, one for each prompt."""
    prompt = request.prompt
    # All elements of a list are of one kind.
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    prompts: Sequence[Any] = [prompt] if is_one else prompt
    if request.resume and (len(prompts) > 1 or request.echo):
        raise ApiError("resume is given; it needs one prompt, and echo to be false", "resume")
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
            request_id=request_id if len(prompts) == 1 else f"{request_id}-{number}",
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
    request: ChatRequest, model: ServedModel, request_id: str, origin: Origin
) -> tuple[ClientRequest, Callable[[], Parser] | None]:
    """The request of a chat: its messages become a text. With it, what makes parsers (tools)."""
    check_tools(request, model)
    field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    prompt = await chat_prompt(request, model)
    parser = new_parser(request, model, prompt)
    fields = {**_shared(request, model), **constrained_fields(request, model)}
    if "constraint_field" in fields:
        fields["reasoning"] = reasoning_before(model, prompt)
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
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        **fields,
    )
    return asked, parser


async def chat_prompt(request: ChatRequest | TokenizeChatRequest, model: ServedModel) -> str:
    """The text of the messages, rendered by the model's template. Raises ApiError."""
    if model.chat_template is None:
        raise ApiError(
            f"{model.name!r} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json); use /v1/completions",
            "messages",
        )
    adds_prompt = request.add_generation_prompt
    try:
        return await asyncio.to_thread(
            model.chat_template.render,
            conversation(request.messages, model.chat_template),
            tools=request.tools,
            add_generation_prompt=not request.continue_final_message
            if adds_prompt is None
            else adds_prompt,
            continue_final_message=request.continue_final_message,
            arguments=request.chat_template_kwargs,
        )
    except ValueError as error:
        # It begins with the field.
        raise ApiError(str(error), str(error).partition(" ")[0]) from error


def _shared(request: GenerationRequest, model: ServedModel) -> dict[str, Any]:
    """Fields of a ClientRequest that completions and chats have in common."""
    sampling: dict[str, Any] = {"temperature": 1.0, **model.default_sampling}
    sampling |= {name: value for name in CONTROLS if (value := getattr(request, name)) is not None}
    sampling["top_k"] = our_top_k(sampling.get("top_k", 0))
    return {
        **sampling,
        "n": 1 if request.n is None else request.n,
        "seed": _seed(request.seed),
        "stop": [request.stop] if isinstance(request.stop, str) else request.stop or [],
        "stop_token_ids": request.stop_token_ids or [],
        "include_stop_str_in_output": request.include_stop_str_in_output,
        "skip_special_tokens": request.skip_special_tokens,
        "ignore_eos": request.ignore_eos,
        "min_tokens": request.min_tokens,
        "logit_bias": _logit_bias(request.logit_bias or {}),
        "bad_words": request.bad_words or [],
        **constraint_fields(request),
        "prompt_logprobs": request.prompt_logprobs,
        "queue_timeout_ms": request.queue_timeout_ms,
        "resume": _resume(request.resume) if request.resume else None,
    }


def _resume(body: ResumeBody) -> Resume:
    choices = tuple(ResumedChoice(choice.index, choice.output_ids) for choice in body.choices)
    return Resume(choices, body.attempt)


def _seed(seed: int | None) -> int | None:
    """The seed. As in vLLM, -1 draws one, and other negative numbers are seeds too."""
    return None if seed in (None, -1) else seed % NUM_SEEDS


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    for token_id in biases:
        if not re.fullmatch("[0-9]{1,18}", token_id):
            raise ApiError(
                f"logit_bias has {token_id!r:.60}; its keys must be token ids", "logit_bias"
            )
    return {int(token_id): bias for token_id, bias in biases.items()}
