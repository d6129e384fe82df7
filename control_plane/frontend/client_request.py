"""What a client asks, whichever door it came through.

Enters: fields as a door read them. Leaves: one frozen value with every default filled in, not yet
validated. Does not know: a door's message format, tokens, the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

UNREAD_TIMEOUT_S = 40
"""A request whose client has stopped reading is ended after so long, at either door."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """Sampling fields are named as in inference.proto, which says what they mean, and have its
    defaults."""

    prompt: str | Sequence[int]
    """A text, or token ids."""
    prompt_field: str
    """What the door calls the prompt: sentences about it begin with this."""
    add_special_tokens: bool = True
    """Whether a text prompt gets the tokens that the tokenizer itself adds, such as the beginning
    of sequence."""
    request_id: str = ""
    """Unique among running requests; empty: one is made."""
    priority: int = 0
    queue_timeout_ms: int | None = None
    n: int = 1
    """Choices."""
    max_tokens: int | None = 16
    """None: as many as the model's length leaves."""
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[str] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    """None: drawn, for each choice."""
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    """The text has no special tokens; else it has their names."""


def header_of(request_id: str) -> str:
    """The id as a header or metadata can tell it: percent-encoded, unless it is printable ASCII."""
    return request_id if request_id.isascii() and request_id.isprintable() else quote(request_id)
