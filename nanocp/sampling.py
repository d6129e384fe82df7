"""What a client asks of the sampler, what a row starts from, and the token that comes back.

Enters: a request's parameters. Leaves: frozen, validated values that travel between the front end
and the instances. Does not know: tokens' text, the scheduler, torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nanocp.plan import FinishReason

MAX_STOP_TOKEN_IDS = 64
"""Stop token ids of one request, the model's end-of-sequence tokens included: row state has a
bounded size."""
MAX_LOGIT_BIASES = 1024
"""Tokens with a bias of one request."""
MAX_LOGIT_BIAS = 100.0
MAX_BAD_WORD_TOKENS = 512
"""Tokens of all bad words of one request."""
MAX_LOGPROBS = 20
"""Most likely tokens that are named beside each one."""
MAX_PROMPT_LOGPROBS = 1 << 18
"""Numbers that are told of one prompt: its own and the most likely tokens', at every position."""
MAX_PENALTY = 2.0
"""Of presence_penalty and frequency_penalty, either way."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request. Raises ValueError naming the field, what was wrong and what would
    be right."""

    max_tokens: int = 16
    """Most tokens to generate, at least 1."""
    min_tokens: int = 0
    """Stop tokens are not sampled before this many tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p, in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as likely as the most likely one, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or the output are divided by it if positive, else multiplied;
    above 0."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that the output has, from -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit once for each time that the output has it, from -2 to 2."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit, from -100 to 100); ids ascend."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences: the last token of one is not sampled where the output ends with its others.
    """
    logprobs: int | None = None
    """Tell the log probability of each token and of so many most likely ones, from 0 to 20; None
    tells none."""
    seed: int = 0
    """Random numbers are a function of (seed, index of the token): the same at any CP degree, batch
    and binding."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the request with STOP. The token itself is delivered."""
    ignore_eos: bool = False
    """Do not add the model's end-of-sequence tokens to stop_token_ids."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}; it must be from 0 to max_tokens ({self.max_tokens})"
            )
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"temperature is {self.temperature}; it must be a finite number, 0 (greedy) or more"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; it must be from 0 (all tokens) to 1")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(
                f"repetition_penalty is {self.repetition_penalty}; it must be a finite number above 0"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= MAX_PENALTY:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be from {-MAX_PENALTY:g} to {MAX_PENALTY:g}"
                )
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise ValueError(
                f"logit_bias has {len(self.logit_bias)} tokens; at most {MAX_LOGIT_BIASES} fit"
            )
        for token_id, bias in self.logit_bias:
            if not abs(bias) <= MAX_LOGIT_BIAS:
                limits = f"from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
                raise ValueError(f"logit_bias of token {token_id} is {bias}; it must be {limits}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(f"logprobs is {self.logprobs}; it must be from 0 to {MAX_LOGPROBS}")
        if (num_tokens := sum(map(len, self.bad_words))) > MAX_BAD_WORD_TOKENS:
            raise ValueError(
                f"bad_words have {num_tokens} tokens together; at most {MAX_BAD_WORD_TOKENS} fit"
            )
        if not all(self.bad_words):
            raise ValueError("bad_words has a word without tokens; each must have at least one")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed is {self.seed}; it must be from 0 to 2**63 - 1")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} fit"
            )


@dataclass(frozen=True, slots=True)
class RowInput:
    """What `Arrival.row_start` encodes (nanocp.wire.convert): unread by the brain, the start of the
    row."""

    last_token: int
    """The prompt's last token: input of the first decode step."""
    params: SamplingParams
    front_end: str
    """host:port of the gRPC server that gets the tokens."""
    output_ids: tuple[int, ...] = ()
    """Tokens generated before (resume); their last is then `last_token`."""
    prompt_ids: tuple[int, ...] = ()
    """What `penalized_prompt_ids` says of the prompt."""


def penalized_prompt_ids(prompt_ids: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
    """Distinct token ids of the prompt, ascending; none if no penalty asks for them."""
    return tuple(sorted(set(prompt_ids))) if params.repetition_penalty != 1 else ()


@dataclass(frozen=True, slots=True)
class HandOffState:
    """Row state that moves from the old MoE binding to the new one through the exchange's mailbox
    (docs/protocol.md, hand-offs)."""

    request_id: int
    finished: bool
    """The row has stopped: it goes on exchanging, and delivers nothing."""
    position: int
    """Position of the next input token."""
    row: RowInput
    """`output_ids` are all tokens so far and `last_token` is the next input: sampling is a function
    of this."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities at one token, of the model itself: before temperature and every
    other control."""

    logprob: float
    """Of the token that was sampled."""
    top: tuple[tuple[int, float], ...]
    """(token id, log probability) of the most likely tokens, descending."""


class PromptLogprobs(NamedTuple):
    """What a prefill is asked to tell beside the KV."""

    num_top: int
    """Most likely tokens to name at each position."""
    tell: Callable[[Sequence[TokenLogprobs]], None]
    """Called with the log probabilities of the tokens 1, 2, ... of the prompt, in order, in pieces.
    """


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token on its way to the front end (docs/protocol.md, ordered tokens: request id
    and index, never rows)."""

    front_end: str
    """host:port of the front end that owns the client."""
    request_id: int
    index: int
    """0 for the first generated token."""
    token_id: int
    finish_reason: FinishReason | None
    """Set on the last token only; the request then has index + 1 tokens."""
    logprobs: TokenLogprobs | None = None
    """Set if the request asks for them."""
