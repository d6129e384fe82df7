"""Checks of a request that both APIs make before it goes anywhere."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from control_plane.frontend.client_request import ClientRequest, Resume
from control_plane.frontend.text.constraint import constraint_of
from control_plane.frontend.text.tokenizer import StopStrings, Tokenizer
from nanocp.values.sampling import (
    MAX_BAD_WORD_TOKENS,
    MAX_PROMPT_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from nanocp.values.sampling_fields import CONTROLS, NUM_SEEDS, check_bounds

MAX_REQUEST_ID_CHARACTERS = 128
MAX_PRIORITY = 100
MAX_SALT_CHARACTERS = 128
MAX_RESUMES = 1_000_000
"""Largest attempt of a client that resumes."""
CONTEXT_LENGTH = "This model's maximum context length is"
"""OpenAI's words in errors about a too long request, which clients look for."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits of the served model."""

    vocab_size: int
    """Token ids are below this."""
    max_model_len: int
    """Most tokens of prompt and output together."""
    eos_token_ids: tuple[int, ...] = ()
    """End-of-sequence tokens of generation_config.json, which are a stop_reason.

    They stop a request unless it says ignore_eos.
    """
    has_prefill: bool = True
    """False: KV is synthetic, and prompts have no log probabilities."""
    model: str = ""
    """What the service calls the model."""
    max_grammar_bytes: int = 32_768
    """Longest grammar of structured output, in bytes; 0: there is none."""
    has_prompt_logprobs: bool = True
    """True if the prefill computes log probabilities of prompts; engines do not."""
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    """The checkpoint's sampling defaults for requests over gRPC; max_tokens is for chats only."""
    max_held_tokens: int | None = None
    """Most tokens of one request that the empty cluster's frames hold; None: any number."""
    pulls_kv: bool = False
    """True if KV of prompts may be read from engines (kv_transfer_params)."""
    computes_prompts: bool = True
    """False: a prompt of several tokens needs kv_transfer_params."""
    tokenizer_eos_id: int | None = None
    """The tokenizer's end of sequence, which also ends a request, without a stop_reason."""

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a request unless it says ignore_eos, ascending."""
        own = () if self.tokenizer_eos_id is None else (self.tokenizer_eos_id,)
        return tuple(sorted({*self.eos_token_ids, *own}))


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request that can be submitted."""

    prompt_ids: Sequence[int]
    """Token ids of the prompt, at least one."""
    params: tuple[SamplingParams, ...]
    """Parameters of each choice; they differ in their seeds."""
    stop: StopStrings


def check_request_id(request_id: str) -> None:
    """Check an id in the client's spelling. Raises ValueError."""
    if len(request_id) > MAX_REQUEST_ID_CHARACTERS:
        raise ValueError(
            f"request_id has {len(request_id)} characters; it must have at most "
            f"{MAX_REQUEST_ID_CHARACTERS}"
        )


def check_shape(request: ClientRequest) -> None:
    """Check priority, salt, queue timeout and n, without a tokenizer. Raises ValueError."""
    if abs(request.origin.priority) > MAX_PRIORITY:
        raise ValueError(
            f"priority is {request.origin.priority}; it must be from -{MAX_PRIORITY} to "
            f"{MAX_PRIORITY}"
        )
    salt = request.origin.cache_salt
    if salt is not None and not 1 <= len(salt) <= MAX_SALT_CHARACTERS:
        raise ValueError(
            f"cache_salt has {len(salt)} characters; it must have 1 to {MAX_SALT_CHARACTERS}"
        )
    if request.queue_timeout_ms is not None and request.queue_timeout_ms < 1:
        raise ValueError(f"queue_timeout_ms is {request.queue_timeout_ms}; it must be at least 1")
    check_bounds("n", request.n)
    if request.n > 1 and request.temperature == 0:
        raise ValueError(
            f"n is {request.n}; it must be 1 when temperature is 0: greedy choices would be alike"
        )
    if request.resume is not None:
        _check_resume_shape(request.resume, request.n)


def _check_resume_shape(resume: Resume, n: int) -> None:
    if not 1 <= resume.attempt <= MAX_RESUMES:
        raise ValueError(
            f"resume.attempt is {resume.attempt}; it must be from 1 to {MAX_RESUMES:,}"
        )
    indices = [choice.index for choice in resume.choices]
    if not indices:
        raise ValueError("resume.choices is empty; it must name the choices that have not ended")
    for number, index in enumerate(indices):
        if not 0 <= index < n or index in indices[:number]:
            raise ValueError(
                f"resume.choices.{number}.index is {index}; it must be below n ({n}), and no other "
                "choice's"
            )


def validated(
    request: ClientRequest, limits: ModelLimits, tokenizer: Tokenizer | None
) -> ValidRequest:
    """Return the request for the cluster, with every default filled in, after `check_shape`.

    Raises ValueError. Takes long: call it in a thread.
    """
    if request.stop and tokenizer is None:
        raise ValueError(
            "stop cannot be used: the checkpoint has no tokenizer.json; give stop_token_ids"
        )
    stop = StopStrings(tuple(request.stop), request.include_stop_str_in_output)
    # The prompt may leave less: the other fields are checked with what any prompt leaves.
    params = _sampling_params(request, limits, tokenizer)
    prompt_ids = _prompt_ids(request, limits, tokenizer)
    num_left = _check_length(request, len(prompt_ids), limits)
    if not limits.computes_prompts and request.origin.remote is None and len(prompt_ids) > 1:
        raise ValueError(
            "kv_transfer_params is absent; this service computes no prompts (prefill.pull "
            "on_failure is fail, and prefill.engines is empty)"
        )
    _check_prompt_logprobs(request.prompt_logprobs, len(prompt_ids), limits)
    num_held = (limits.max_held_tokens or limits.max_model_len) - len(prompt_ids)
    most = min(params.max_tokens, num_left, max(num_held, params.min_tokens, 1))
    params = replace(params, max_tokens=most)
    if request.resume is not None:
        _check_resumed(request.resume, params, limits)
    seeds = (_seed(request.seed, choice) for choice in range(request.n))
    return ValidRequest(prompt_ids, tuple(replace(params, seed=seed) for seed in seeds), stop)


def _check_resumed(resume: Resume, params: SamplingParams, limits: ModelLimits) -> None:
    for number, choice in enumerate(resume.choices):
        field = f"resume.choices.{number}.output_ids"
        if len(choice.output_ids) >= params.max_tokens:
            raise ValueError(
                f"{field} has {len(choice.output_ids)} ids; max_tokens is {params.max_tokens}, "
                "so the choice has ended"
            )
        for position, token_id in enumerate(choice.output_ids):
            _check_token_id(field, token_id, limits)
            # Before min_tokens none is sampled.
            if token_id in params.stop_token_ids:
                raise ValueError(
                    f"{field} has the stop token {token_id} at {position}, so the choice has ended"
                )


def _seed(seed: int | None, choice: int) -> int:
    """Choice i of a seed equals seed + i alone, as in vLLM."""
    return secrets.randbits(63) if seed is None else (seed + choice) % NUM_SEEDS


def _sampling_params(
    request: ClientRequest, limits: ModelLimits, tokenizer: Tokenizer | None
) -> SamplingParams:
    for name, token_ids in (
        ("stop_token_ids", request.stop_token_ids),
        ("logit_bias", request.logit_bias),
    ):
        for token_id in token_ids:
            _check_token_id(name, token_id, limits)
    constraint = _constraint(request, limits, tokenizer)
    # A complete output ends with the end of sequence, whatever the request says.
    eos = () if request.ignore_eos and not constraint else limits.end_token_ids
    stop_ids = {*request.stop_token_ids, *eos}
    if len(stop_ids) > MAX_STOP_TOKEN_IDS:
        with_eos = f", the model's {len(eos)} end-of-sequence tokens included" if eos else ""
        raise ValueError(
            f"stop_token_ids has {len(stop_ids)} ids{with_eos}; at most {MAX_STOP_TOKEN_IDS} fit"
        )
    most = request.max_tokens
    if most is not None and most > limits.max_model_len:
        raise ValueError(
            f"{request.max_tokens_field} is {most}; it must be at most {limits.max_model_len}. "
            f"{CONTEXT_LENGTH} {limits.max_model_len} tokens"
        )
    if most is None:
        default = limits.default_sampling.get("max_tokens", limits.max_model_len)
        most = max(min(default, limits.max_model_len), request.min_tokens)
    return SamplingParams(
        **{name: getattr(request, name) for name in CONTROLS},
        max_tokens=most,
        min_tokens=request.min_tokens,
        seed=request.seed or 0,
        stop_token_ids=tuple(sorted(stop_ids)),
        ignore_eos=request.ignore_eos,
        logit_bias=tuple(sorted(request.logit_bias.items())),
        bad_words=tuple(_bad_word_ids(request.bad_words, limits, tokenizer)),
        constraint=constraint,
        logprobs=request.logprobs,
    )


def _constraint(request: ClientRequest, limits: ModelLimits, tokenizer: Tokenizer | None) -> str:
    added = tokenizer.added_tokens if tokenizer else None
    check = tokenizer.grammar_check if tokenizer else None
    has_eos = bool(limits.eos_token_ids)
    return constraint_of(request, limits.max_grammar_bytes, has_eos, added, check)


def _bad_word_ids(
    words: Sequence[str], limits: ModelLimits, tokenizer: Tokenizer | None
) -> Iterator[tuple[int, ...]]:
    """Yield each word's ids at the start of a text and, if different, after a space."""
    if words and tokenizer is None:
        raise ValueError(
            "bad_words cannot be used: the checkpoint has no tokenizer.json; give logit_bias"
        )
    if len(words) > MAX_BAD_WORD_TOKENS:
        raise ValueError(
            f"bad_words has {len(words)} words; at most {MAX_BAD_WORD_TOKENS} tokens fit"
        )
    num_least = sum(tokenizer.least_tokens(word) for word in words) if tokenizer else 0
    if num_least > MAX_BAD_WORD_TOKENS:
        raise ValueError(
            f"bad_words has at least {num_least} tokens; at most {MAX_BAD_WORD_TOKENS} tokens fit"
        )
    for word in words:
        assert tokenizer is not None
        at_start = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        if not at_start:
            raise ValueError(
                f"bad_words has {word!r}, which has no tokens; each word must have at least one"
            )
        after_space = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        # A tokenizer may know more tokens than the model has logits.
        for token_id in (*at_start, *after_space):
            _check_token_id(f"bad_words' {word!r:.50}", token_id, limits)
        yield tuple(at_start)
        if after_space[-len(at_start) :] != at_start:
            yield tuple(after_space)


def _prompt_ids(
    request: ClientRequest, limits: ModelLimits, tokenizer: Tokenizer | None
) -> Sequence[int]:
    kind = request.prompt_field
    if not isinstance(request.prompt, str):
        ids = request.prompt
        token_of = kind
    elif tokenizer is None:
        raise ValueError(
            f"{kind} cannot be used: the checkpoint has no tokenizer.json; give token ids"
        )
    else:
        num_least = tokenizer.least_tokens(request.prompt)
        if num_least >= limits.max_model_len:  # Tokenizing all of it would take long.
            raise ValueError(_too_long(kind, f"at least {num_least}", limits))
        ids = tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens)
        token_of = f"{kind}'s token"
    if not ids:
        raise ValueError(f"{kind} is empty; a prompt has at least one token")
    for token_id in ids:
        _check_token_id(token_of, token_id, limits)
    return ids


def _check_length(request: ClientRequest, prompt_len: int, limits: ModelLimits) -> int:
    """Return the tokens that the prompt leaves. Raises ValueError if it does not fit."""
    num_left = limits.max_model_len - prompt_len
    if num_left < 1:
        raise ValueError(_too_long(request.prompt_field, str(prompt_len), limits))
    if request.min_tokens > num_left:
        raise ValueError(
            f"min_tokens is {request.min_tokens}; after a prompt of {prompt_len} tokens it must be "
            f"at most {num_left}. {CONTEXT_LENGTH} {limits.max_model_len} tokens"
        )
    return num_left


def _too_long(field: str, length: str, limits: ModelLimits) -> str:
    return (
        f"{field} has {length} tokens, and the output needs one. {CONTEXT_LENGTH} "
        f"{limits.max_model_len} tokens"
    )


def _check_prompt_logprobs(num_top: int | None, prompt_len: int, limits: ModelLimits) -> None:
    if num_top is None:
        return
    check_bounds("prompt_logprobs", num_top)
    if not limits.has_prefill:
        raise ValueError(
            "prompt_logprobs cannot be used: KV is synthetic here, no model computes it"
        )
    if not limits.has_prompt_logprobs:
        raise ValueError(
            "prompt_logprobs cannot be used: prompts are computed by engines (prefill.engines), "
            "which do not report them"
        )
    if (1 + num_top) * prompt_len > MAX_PROMPT_LOGPROBS:
        raise ValueError(
            f"prompt_logprobs is {num_top}; with a prompt of {prompt_len} tokens it must be less: "
            f"at most {MAX_PROMPT_LOGPROBS} numbers are returned"
        )


def _check_token_id(field: str, token_id: int, limits: ModelLimits) -> None:
    if not 0 <= token_id < limits.vocab_size:
        raise ValueError(
            f"{field} has {token_id}; ids must be below the vocabulary size ({limits.vocab_size})"
        )
