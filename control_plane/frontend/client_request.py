"""What a client asks, whichever door it came through.

Enters: fields as a door read them. Leaves: one frozen value with every default filled in, not yet
validated. Does not know: a door's message format, tokens, the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from nanocp.sampling_fields import SamplingRequest

UNREAD_TIMEOUT_S = 40
"""A request whose client has stopped reading is ended after so long, at either door."""


@dataclass(frozen=True, slots=True)
class ClientRequest(SamplingRequest):
    """One request of a client; nanocp.sampling_fields has its sampling parameters."""

    prompt: str | Sequence[int]
    """A text, or token ids."""
    prompt_field: str
    """What the endpoint calls the prompt: sentences about it begin with this."""
    add_special_tokens: bool = True
    """Whether a text prompt gets the tokens that the tokenizer itself adds, such as the beginning
    of sequence."""
    request_id: str = ""
    """Unique among running requests; empty: one is made."""
    priority: int = 0
    queue_timeout_ms: int | None = None
    skip_special_tokens: bool = True
    """The text has no special tokens; else it has their names."""


def header_of(request_id: str) -> str:
    """The id as a header or metadata can tell it: percent-encoded, unless it is printable ASCII."""
    return request_id if request_id.isascii() and request_id.isprintable() else quote(request_id)
