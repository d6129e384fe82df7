"""What a row samples by, what it starts from, and the token that comes back.

Enters: a request's parameters. Leaves: frozen, validated values that travel between the front end
and the instances. Does not know: tokens' text, the scheduler, torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nanocp.values.passes import SamplerWork
from nanocp.values.plan import FinishReason
from nanocp.values.sampling_fields import CONTROLS, SamplingControls, check_bounds

MAX_STOP_TOKEN_IDS = 64
"""Stop token ids of one request, the model's end-of-sequence tokens included: row state has a
bounded size."""
MAX_LOGIT_BIASES = 1024
"""Tokens with a bias of one request."""
MAX_LOGIT_BIAS = 100.0
MAX_BAD_WORD_TOKENS = 512
"""Tokens of all bad words of one request."""
MAX_PROMPT_LOGPROBS = 1 << 18
"""Numbers that are reported for one prompt: at every position its own token's and the most likely
tokens'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(SamplingControls):
    """Parameters of one row, validated. nanocp.values.sampling_fields says what clients may ask.

    Raises ValueError naming the field, what was wrong and what would be right.
    """

    max_tokens: int = 16
    """Most tokens to generate."""
    min_tokens: int = 0
    """Stop tokens are not sampled before this many tokens."""
    seed: int = 0
    """Random numbers are a function of (seed, index of the token): the same at any CP degree, batch
    and binding."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the request with STOP. The token itself is delivered."""
    ignore_eos: bool = False
    """Do not add the model's end-of-sequence tokens to stop_token_ids."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit, from -100 to 100); ids ascend."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences: the last token of one is not sampled where the output ends with its others.
    """
    constraint: str = ""
    """A grammar in llguidance's form: tokens outside it are not sampled. Empty: none."""
    logprobs: int | None = None
    """Most likely tokens to report beside each token, from 0 to 20; None: no log probabilities."""

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
        """What sampling a token of the row takes; min_tokens count for nothing."""
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
    """The start of a row: what `Arrival.row_start` encodes (nanocp.wire.rows).

    The scheduler passes it on unread.
    """

    last_token: int
    """The prompt's last token: input of the first decode step."""
    params: SamplingParams
    front_end: str
    """host:port of the gRPC server that gets the tokens."""
    output_ids: tuple[int, ...] = ()
    """Tokens generated before (resume); their last is then `last_token`."""
    prompt_ids: tuple[int, ...] = ()
    """The prompt's `penalized_prompt_ids`."""
    attempt: int = 0
    """`Arrival.attempt`: every token of the row carries it."""
    page_hash: bytes = b""
    """Hash of the pages before that of `last_token` (see `Arrival.page_hashes`)."""
    page_ids: tuple[int, ...] = ()
    """Token ids in the page of `last_token`, up to it. Empty: nobody asks for hashes of pages."""


def penalized_prompt_ids(prompt_ids: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
    """Distinct token ids of the prompt, ascending; none if no penalty asks for them."""
    return tuple(sorted(set(prompt_ids))) if params.repetition_penalty != 1 else ()


@dataclass(frozen=True, slots=True)
class HandOffState:
    """State of a row that changes its MoE binding (protocol.md, hand-offs).

    It goes from the old MoE binding to the new one through the exchange's mailbox.
    """

    request_id: int
    finished: bool
    """The row has stopped: it still takes part in the exchange, and delivers nothing."""
    position: int
    """Position of the next input token."""
    row: RowInput
    """`output_ids` are all tokens so far and `last_token` is the next input: sampling is a function
    of this."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities at one token, before temperature and every other control."""

    logprob: float
    """The sampled token's."""
    top: tuple[tuple[int, float], ...]
    """(token id, log probability) of the most likely tokens, descending."""


class PromptLogprobs(NamedTuple):
    """The log probabilities that a prefill reports beside the KV."""

    num_top: int
    """Most likely tokens to report at each position."""
    report: Callable[[Sequence[TokenLogprobs]], None]
    """Called with the log probabilities of the tokens 1, 2, ... of the prompt, in order, in pieces.
    """


class Token(NamedTuple):
    """One generated token on its way to the front end (protocol.md, ordered tokens).

    It has the request's id and an index, never a row.
    """

    front_end: str
    """host:port of the front end that owns the client."""
    request_id: int
    index: int  # type: ignore[assignment]  # nobody looks for a value in a token
    """0 for the first generated token."""
    token_id: int
    finish_reason: FinishReason | None
    """Set on the last token only; the request then has index + 1 tokens."""
    logprobs: TokenLogprobs | None = None
    """Set if the request asks for them."""
    attempt: int = 0
    """The attempt that generated it (protocol.md, one history)."""
    num_drafts: int = 0
    """Drafts that its step checked behind it; -1: it was a draft of the step itself."""


class PromptPart(NamedTuple):
    """Log probabilities of a prompt, for a request that asks for them."""

    request_id: int
    first: int
    """Position in the prompt of the first of these tokens; at least 1."""
    logprobs: tuple[TokenLogprobs, ...]
    """One for each token from `first` on."""


class TokenBatch(NamedTuple):
    """What a member delivers to one front end at a time."""

    instance: int = 0
    """That of the tokens."""
    tokens: tuple[Token, ...] = ()
    prompts: tuple[PromptPart, ...] = ()
    """From the prefill, which is no instance, or from the last stage of a pipeline."""
