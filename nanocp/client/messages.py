"""Values of the client API, converted to and from inference.proto's messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TypedDict

from nanocp.values.plan import ClusterLoad, FinishReason, InstanceLoad
from nanocp.values.sampling import TokenLogprobs
from nanocp.wire.v1 import inference_pb2 as pb

_LISTS_OF_STRINGS = ("bad_words", "stop")
"""Options that accept one string for a list of one."""


class Sampling(TypedDict, total=False):
    """Sampling options of `generate`; absent ones take the defaults of nanocp.values.sampling."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    bad_words: str | Sequence[str]
    stop: str | Sequence[str]
    include_stop_str_in_output: bool
    logprobs: int
    n: int
    prompt_logprobs: int
    json_schema: str
    regex: str
    choice: Sequence[str]
    grammar: str
    json_object: bool
    structural_tag: str


class RequestOptions(Sampling, total=False):
    """Every option of `generate`."""

    request_id: str
    """Unique among running requests; by default the service makes one."""
    timeout_s: float | None
    """Longest time for the whole request."""
    priority: int
    """Requests of a lower number are placed first."""
    queue_timeout_s: float | None
    """Longest wait to be placed."""
    user: str
    """User of the request, for fairness in a service without API keys."""
    cache_salt: str | None
    """Cached KV is shared only with requests of an equal salt, from 1 to 128 characters."""


@dataclass(frozen=True, slots=True)
class Finish:
    """End of a choice: its reason, and the instances that held it."""

    reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    cp_degree: int
    moe_binding: int
    kv_split: tuple[tuple[int, int], ...]
    """(instance, pages of 64 tokens), ascending by instance."""
    stop_reason: int | str | None = None
    """The stop token's id or the stop string. None: max_tokens or the tokenizer's end of
    sequence."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens and text of one choice."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    """Empty if the service has no tokenizer."""
    finish: Finish | None
    """Set in the choice's last chunk only."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of token_ids, if requested."""
    index: int = 0
    """The choice, from 0 to n - 1."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each prompt token but the first, if requested, before any output token."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One complete choice: its tokens, text and end."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish: Finish
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """The complete answer of `generate_unary`: every choice."""

    request_id: str
    choices: tuple[Generated, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    """One for each prompt token but the first, if requested."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The model and the limits of a service; inference.proto explains the fields."""

    version: str
    model: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    has_tokenizer: bool
    has_prefill: bool
    num_instances: int
    num_frames: int
    page_size: int
    dtype: str
    policy: str
    front_ends: tuple[str, ...]
    uptime_s: float
    closed_because: str


def request_message(
    prompt: str | Sequence[int],
    request_id: str,
    sampling: Sampling,
    priority: int,
    queue_timeout_s: float | None,
    user: str = "",
    cache_salt: str | None = None,
) -> pb.GenerateRequest:
    """The message for one prompt, which is a text or token ids.

    Raises ValueError, naming the option, for a value that the message cannot hold.
    """
    parameters = pb.SamplingParameters()
    for name, value in sampling.items():
        if name in _LISTS_OF_STRINGS and isinstance(value, str):
            value = [value]  # Protobuf would take it for a list of characters.
        with _sending(name, value):
            parameters.MergeFrom(pb.SamplingParameters(**{name: value}))  # type: ignore[arg-type]
    request = pb.GenerateRequest(sampling=parameters)
    given = {"request_id": request_id, "priority": priority, "user": user}
    for name, value in given.items():
        with _sending(name, value):
            setattr(request, name, value)
    with _sending("cache_salt", cache_salt):
        if cache_salt is not None:
            request.cache_salt = cache_salt
    with _sending("queue_timeout_s", queue_timeout_s):
        if queue_timeout_s is not None:
            request.queue_timeout_ms = math.ceil(queue_timeout_s * 1000)
    with _sending("prompt", prompt):
        if isinstance(prompt, str):
            request.text = prompt
        elif isinstance(prompt, bytes):  # Protobuf would take them for token ids.
            raise TypeError("it must be a str or token ids")
        else:
            request.token_ids.ids.extend(prompt)
    return request


@contextmanager
def _sending(name: str, value: object) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} is {value!r:.200}, which cannot be sent: {error}") from None


def chunk_of(response: pb.GenerateResponse) -> Chunk:
    """The chunk in one message of a stream."""
    finish = _finish(response.finish) if response.HasField("finish") else None
    return Chunk(
        request_id=response.request_id,
        token_ids=tuple(response.token_ids),
        text=response.text,
        finish=finish,
        logprobs=_logprobs(response.logprobs),
        index=response.index,
        prompt_logprobs=_logprobs(response.prompt_logprobs),
    )


def generation_of(response: pb.GenerateUnaryResponse) -> Generation:
    """The complete answer in a message."""
    choices = (
        Generated(
            index=choice.index,
            token_ids=tuple(choice.token_ids),
            text=choice.text,
            finish=_finish(choice.finish),
            logprobs=_logprobs(choice.logprobs),
        )
        for choice in response.choices
    )
    return Generation(response.request_id, tuple(choices), _logprobs(response.prompt_logprobs))


def _finish(finish: pb.Finish) -> Finish:
    which = finish.WhichOneof("stop_reason")
    return Finish(
        reason=FinishReason[pb.Finish.Reason.Name(finish.reason)],
        stop_reason=getattr(finish, which) if which else None,
        prompt_tokens=finish.prompt_tokens,
        generated_tokens=finish.generated_tokens,
        cp_degree=finish.cp_degree,
        moe_binding=finish.moe_binding,
        kv_split=tuple((share.instance, share.pages) for share in finish.kv_split),
    )


def _logprobs(tokens: Iterable[pb.Logprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            token.logprob, tuple(zip(token.top_token_ids, token.top_logprobs, strict=True))
        )
        for token in tokens
    )


def server_info_of(response: pb.GetServerInfoResponse) -> ServerInfo:
    """The model and the limits in a message."""
    values = {field.name: getattr(response, field.name) for field in fields(ServerInfo)}
    values |= {name: tuple(values[name]) for name in ("eos_token_ids", "front_ends")}
    return ServerInfo(**values)


def cluster_load_of(response: pb.GetLoadsResponse) -> ClusterLoad:
    """The cluster's load in a message."""
    loads = (
        InstanceLoad(*(getattr(load, name) for name in InstanceLoad._fields))
        for load in response.instances
    )
    return ClusterLoad(
        response.num_requests_running,
        response.num_requests_waiting,
        tuple(loads),
        response.num_requests_prefilling,
    )
