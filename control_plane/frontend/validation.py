"""What the door checks before a request goes anywhere.

Enters: a GenerateRequest, the model's limits. Leaves: prompt ids and sampling parameters, or a ValueError that names
the field, what was wrong and what would be right. Does not know: other requests, streams, the cluster's load.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from control_plane.frontend.tokenizer import StopStrings, Tokenizer
from nanocp.sampling import MAX_BAD_WORD_TOKENS, SamplingParams
from nanocp.wire.v1 import inference_pb2 as pb

MAX_REQUEST_ID_CHARACTERS = 128
MAX_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the served model allows."""

    vocab_size: int
    """Token ids are below this."""
    max_model_len: int
    """Most tokens of prompt and output together."""
    eos_token_ids: tuple[int, ...] = ()
    """End-of-sequence tokens: they stop a request unless it says ignore_eos."""


def check_request_id(request_id: str) -> None:
    """Raises ValueError if the client's id is too long."""
    if len(request_id) > MAX_REQUEST_ID_CHARACTERS:
        raise ValueError(
            f"request_id has {len(request_id)} characters; it must have at most {MAX_REQUEST_ID_CHARACTERS}"
        )


def check_admission(message: pb.GenerateRequest) -> None:
    """Raises ValueError if the priority or the queue timeout is out of range."""
    if abs(message.priority) > MAX_PRIORITY:
        raise ValueError(f"priority is {message.priority}; it must be from -{MAX_PRIORITY} to {MAX_PRIORITY}")
    if message.HasField("queue_timeout_ms") and message.queue_timeout_ms < 1:
        raise ValueError(f"queue_timeout_ms is {message.queue_timeout_ms}; it must be at least 1")


def sampling_params(message: pb.SamplingParameters, limits: ModelLimits, tokenizer: Tokenizer | None) -> SamplingParams:
    """The parameters with every default filled in and the model's end-of-sequence tokens among the stop ids.

    Tokenizes bad words: call it in a thread.
    """
    for token_id in message.stop_token_ids:
        _check_token_id("stop_token_ids", token_id, limits)
    for token_id in message.logit_bias:
        _check_token_id("logit_bias", token_id, limits)
    eos = () if message.ignore_eos else limits.eos_token_ids
    return SamplingParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else 16,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        seed=message.seed if message.HasField("seed") else secrets.randbits(63),
        stop_token_ids=tuple(sorted({*message.stop_token_ids, *eos})),
        ignore_eos=message.ignore_eos,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        bad_words=tuple(_bad_word_ids(message.bad_words, tokenizer)),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


def stop_strings(message: pb.SamplingParameters, tokenizer: Tokenizer | None) -> StopStrings:
    """What ends the request when its text has it."""
    if message.stop and tokenizer is None:
        raise ValueError("stop cannot be used: the checkpoint has no tokenizer.json; give stop_token_ids")
    return StopStrings(tuple(message.stop), message.include_stop_str_in_output)


def _bad_word_ids(words: Sequence[str], tokenizer: Tokenizer | None) -> Iterator[tuple[int, ...]]:
    """Each word as it is spelled at the start of a text and, if that does not end alike, behind a space."""
    if words and tokenizer is None:
        raise ValueError("bad_words cannot be used: the checkpoint has no tokenizer.json; give logit_bias")
    if len(words) > MAX_BAD_WORD_TOKENS:
        raise ValueError(f"bad_words has {len(words)} words; at most {MAX_BAD_WORD_TOKENS} tokens fit")
    for word in words:
        assert tokenizer is not None
        at_start = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        if not at_start:
            raise ValueError(f"bad_words has {word!r}, which has no tokens; each word must have at least one")
        yield tuple(at_start)
        behind_space = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if behind_space[-len(at_start) :] != at_start:
            yield tuple(behind_space)


def prompt_ids(message: pb.GenerateRequest, limits: ModelLimits, tokenizer: Tokenizer | None) -> Sequence[int]:
    """Token ids of the prompt, at least one. Tokenizes a text, which may take long: call it in a thread."""
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise ValueError("prompt is absent; give either text or token_ids")
    if kind == "token_ids":
        ids: Sequence[int] = tuple(message.token_ids.ids)
        if not ids:
            raise ValueError("token_ids is empty; a prompt has at least one token")
        for token_id in ids:
            _check_token_id("token_ids", token_id, limits)
        return ids
    if tokenizer is None:
        raise ValueError("text cannot be used: the checkpoint has no tokenizer.json; give token_ids")
    ids = tokenizer.encode(message.text)
    if not ids:
        raise ValueError("text is empty; a prompt has at least one token")
    for token_id in ids:
        _check_token_id("text's token", token_id, limits)
    return ids


def check_length(kind: str, prompt_len: int, max_tokens: int, limits: ModelLimits) -> None:
    """Raises ValueError if prompt and output cannot fit the model. `kind` is the prompt's field."""
    if prompt_len >= limits.max_model_len:
        raise ValueError(
            f"{kind} has {prompt_len} tokens; it must have fewer than max_model_len ({limits.max_model_len})"
        )
    if prompt_len + max_tokens > limits.max_model_len:
        raise ValueError(
            f"max_tokens is {max_tokens}; after a prompt of {prompt_len} tokens it must be at most "
            f"{limits.max_model_len - prompt_len} (max_model_len is {limits.max_model_len})"
        )


def _check_token_id(field: str, token_id: int, limits: ModelLimits) -> None:
    if token_id >= limits.vocab_size:
        raise ValueError(f"{field} has {token_id}; ids must be below the vocabulary size ({limits.vocab_size})")
