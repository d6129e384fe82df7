"""A row's sampling parameters, its start, and the tokens that come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nanocp.values.passes import SamplerWork
from nanocp.values.plan import FinishReason
from nanocp.values.sampling_fields import CONTROLS, SamplingControls, check_bounds

MAX_STOP_TOKEN_IDS = 64
"""Stop token ids of one request, with the model's own: row state is bounded."""
MAX_LOGIT_BIASES = 1024
"""Tokens with a bias of one request."""
MAX_LOGIT_BIAS = 100.0
MAX_BAD_WORD_TOKENS = 512
"""Tokens of all bad words of one request."""
MAX_PROMPT_LOGPROBS = 1 << 18
"""Numbers reported for one prompt: each token's own and the most likely ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(SamplingControls):
    """Validated parameters of one row; nanocp.values.sampling_fields has those of clients.

    Raises ValueError naming the field, the fault and the remedy.
    """

    max_tokens: int = 16
    """Most tokens to generate."""
    min_tokens: int = 0
    """No stop token is sampled before this many tokens."""
    seed: int = 0
    """Random numbers depend on (seed, token index) only, at any CP degree, batch and binding."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the request with STOP; it is delivered."""
    ignore_eos: bool = False
    """Leave the model's end-of-sequence tokens out of stop_token_ids."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, addend of its logit, -100 to 100); ids ascend."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences: the last token is not sampled after its others."""
    constraint: str = ""
    """A grammar in llguidance's form that the output obeys. Empty: none."""
    logprobs: int | None = None
    """Most likely tokens reported beside each, 0 to 20; None: no log probabilities."""

    def __post_init__(self) -> None:
        for name in (*CONTROLS, "max_tokens", "seed", "logprobs"):
            check_bounds(name, getattr(self, name))
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}; it must be from 0 to max_tokens "
                f"({self.max_tokens})"
            )
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise ValueError(
                f"logit_bias has {len(self.logit_bias)} tokens; at most {MAX_LOGIT_BIASES} fit"
            )
        for token_id, bias in self.logit_bias:
            if not abs(bias) <= MAX_LOGIT_BIAS:
                limits = f"from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
                raise ValueError(f"logit_bias of token {token_id} is {bias}; it must be {limits}")
        if (num_tokens := sum(map(len, self.bad_words))) > MAX_BAD_WORD_TOKENS:
            raise ValueError(
                f"bad_words have {num_tokens} tokens together; at most {MAX_BAD_WORD_TOKENS} fit"
            )
        if not all(self.bad_words):
            raise ValueError("bad_words has a word without tokens; each must have at least one")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} "
                "fit"
            )

    @property
    def work(self) -> SamplerWork:
        """Work of sampling the row's tokens, without min_tokens."""
        work = SamplerWork(0)
        if self.temperature > 0:
            work |= SamplerWork.DRAWN
            if self.top_p < 1 or self.top_k or self.min_p:
                work |= SamplerWork.NUCLEUS
        if (
            self.bad_words
            or self.logit_bias
            or self.constraint
            or self.repetition_penalty != 1
            or self.frequency_penalty
            or self.presence_penalty
        ):
            work |= SamplerWork.CONTROLS
        return work if self.logprobs is None else work | SamplerWork.LOGPROBS


@dataclass(frozen=True, slots=True)
class RowInput:
    """The start of a row, encoded as `Arrival.row_start` (nanocp.wire.rows)."""

    last_token: int
    """The prompt's last token: first input."""
    params: SamplingParams
    front_end: str
    """host:port of the gRPC server for the tokens."""
    output_ids: tuple[int, ...] = ()
    """Earlier tokens (resume); the last is `last_token`."""
    prompt_ids: tuple[int, ...] = ()
    """The prompt's `penalized_prompt_ids`."""
    attempt: int = 0
    """`Arrival.attempt`, which every token of the row has."""
    page_hash: bytes = b""
    """Hash of the pages before that of `last_token`."""
    page_ids: tuple[int, ...] = ()
    """Token ids in the page of `last_token`, up to it; empty without hashes."""


def penalized_prompt_ids(prompt_ids: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
    """Distinct token ids of the prompt, ascending; none without penalties."""
    return tuple(sorted(set(prompt_ids))) if params.repetition_penalty != 1 else ()


@dataclass(frozen=True, slots=True)
class HandOffState:
    """State of a row that goes to a new MoE binding (protocol.md, hand-offs)."""

    request_id: int
    finished: bool
    """A stopped row stays in the exchange, and delivers nothing."""
    position: int
    """Position of the next input token."""
    row: RowInput
    """`output_ids` are all tokens so far; `last_token` is the next input."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities at one token, before all controls."""

    logprob: float
    """The sampled token's."""
    top: tuple[tuple[int, float], ...]
    """(token id, log probability) of the most likely, descending."""


class PromptLogprobs(NamedTuple):
    """Log probabilities that a prefill reports."""

    num_top: int
    report: Callable[[Sequence[TokenLogprobs]], None]
    """Gets those of prompt tokens 1, 2, ... in order, in pieces."""


class Token(NamedTuple):
    """A generated token on its way to the front end (protocol.md, ordered tokens)."""

    front_end: str
    request_id: int
    index: int  # type: ignore[assignment]  # nobody looks for a value in a token
    """0 for the first generated token."""
    token_id: int
    finish_reason: FinishReason | None
    """On the last token only; the request then has index + 1 tokens."""
    logprobs: TokenLogprobs | None = None
    """Set if the request asks for them."""
    attempt: int = 0
    """The attempt that generated it (protocol.md, one history)."""
    num_drafts: int = 0
    """Drafts checked behind it in its step; -1: a draft itself."""


class PromptPart(NamedTuple):
    """Log probabilities of a part of a prompt."""

    request_id: int
    first: int
    """First position in the prompt, at least 1."""
    logprobs: tuple[TokenLogprobs, ...]
    """One for each token from `first` on."""


class TokenBatch(NamedTuple):
    """A member's delivery to one front end."""

    instance: int = 0
    tokens: tuple[Token, ...] = ()
    prompts: tuple[PromptPart, ...] = ()
    """From the prefill, or a pipeline's last stage."""
