"""What a client asks of the sampler, what a row starts from, and the token that comes back.

Enters: a request's parameters. Leaves: frozen, validated values that travel between the front end and the instances.
Does not know: tokens' text, the scheduler, torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nanocp.plan import FinishReason

MAX_STOP_TOKEN_IDS = 64
"""Stop token ids of one request, the model's end-of-sequence tokens included: row state has a bounded size."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request. Raises ValueError naming the field, what was wrong and what would be right."""

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
    seed: int = 0
    """Random numbers are a function of (seed, index of the token): the same at any CP degree, batch and binding."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the request with STOP. The token itself is delivered."""
    ignore_eos: bool = False
    """Do not add the model's end-of-sequence tokens to stop_token_ids."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}; it must be from 0 to max_tokens ({self.max_tokens})")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature}; it must be a finite number, 0 (greedy) or more")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed is {self.seed}; it must be from 0 to 2**63 - 1")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} fit")


@dataclass(frozen=True, slots=True)
class RowInput:
    """What `Arrival.row_start` encodes (nanocp.wire.convert): unread by the brain, the start of the row."""

    last_token: int
    """The prompt's last token: input of the first decode step."""
    params: SamplingParams
    front_end: str
    """host:port of the gRPC server that gets the tokens."""
    output_ids: tuple[int, ...] = ()
    """Tokens generated before (resume); their last is then `last_token`."""


@dataclass(frozen=True, slots=True)
class HandOffState:
    """Row state that moves from the old MoE binding to the new one through the exchange's mailbox (rule 5)."""

    request_id: int
    finished: bool
    """The row has stopped: it goes on exchanging, and delivers nothing."""
    position: int
    """Position of the next input token."""
    row: RowInput
    """`output_ids` are all tokens so far and `last_token` is the next input: sampling is a function of these."""


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token on its way to the front end (rule 9: request id and index, never rows)."""

    front_end: str
    """host:port of the front end that owns the client."""
    request_id: int
    index: int
    """0 for the first generated token."""
    token_id: int
    finish_reason: FinishReason | None
    """Set on the last token only; the request then has index + 1 tokens."""
