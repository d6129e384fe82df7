"""One request of a client, in the form that both APIs give it.

Enters: fields as an API read them. Leaves: one frozen value with every default filled in, not yet
validated. Does not know: an API's message format, tokens, the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from urllib.parse import quote

from control_plane.frontend.access.api_keys import ApiKeys
from nanocp.values.sampling_fields import SamplingRequest

UNREAD_TIMEOUT_S = 40
"""A client that reads nothing for this time loses its request, over HTTP and over gRPC."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose request it is, how urgent, and what it belongs to outside the service."""

    priority: int = 0
    """The request's class: lower numbers go first."""
    endpoint: str = ""
    """What the client called, for the log: /v1/completions, Generate."""
    tenant: str = ""
    """Whose request it is; empty if nobody says."""
    traceparent: str = ""
    """The W3C header of the trace that the request belongs to; empty without one."""


NOWHERE = Origin()


def origin_of(
    headers: Mapping[str, str], keys: ApiKeys, endpoint: str, user: str, priority: int
) -> Origin:
    """Where a request comes from. headers: HTTP's, or the call's metadata."""
    tenant = keys.tenant(headers.get("authorization"), user)
    return Origin(priority, endpoint, tenant, headers.get("traceparent", ""))


class Reasoning(NamedTuple):
    """What a model may write before an output that is held to a form."""

    begin: str
    end: str
    """The markers around it."""
    has_begun: bool
    """Whether the prompt ends with `begin`: then the output starts inside."""


class Contents(Protocol):
    """Tells the content of a text that has more in it, such as reasoning and calls."""

    @property
    def num_decided(self) -> int:
        """Characters of the text of which it is known what they are."""

    def contents(self, text: str) -> Sequence[tuple[int, str]]:
        """Take text; returns the content that it completes, and where that begins in all text."""


@dataclass(frozen=True, slots=True)
class ResumedChoice:
    """A choice that goes on after its stream broke."""

    index: int
    output_ids: Sequence[int]
    """The tokens that the client has, in order."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Where an answer goes on whose stream broke."""

    choices: Sequence[ResumedChoice]
    """Those that have not ended; the others are not generated again."""
    attempt: int = 1
    """Counts how often the client has resumed the request, from 1 on."""


@dataclass(frozen=True, slots=True)
class ClientRequest(SamplingRequest):
    """One request of a client; nanocp.values.sampling_fields has its sampling parameters."""

    prompt: str | Sequence[int]
    """A text, or token ids."""
    prompt_field: str
    """What the endpoint calls the prompt: sentences about it begin with this."""
    constraint_field: str = ""
    """What the endpoint calls the constraint of structured output: sentences about it begin with
    this. Empty: the constraint's own name."""
    max_tokens_field: str = "max_tokens"
    """What the endpoint calls max_tokens: sentences about its length begin with this."""
    reasoning: Reasoning | None = None
    """What may come before the constrained part of the output; None: nothing."""
    add_special_tokens: bool = True
    """Whether a text prompt gets the tokens that the tokenizer adds, such as the beginning of
    sequence."""
    origin: Origin = NOWHERE
    request_id: str = ""
    """Unique among running requests. Empty: one is made."""
    prompt_number: int = 0
    """Which prompt of a call it is: those after the first share the first one's id."""
    queue_timeout_ms: int | None = None
    resume: Resume | None = None
    """The client has a part of the answer; None: it has nothing."""
    new_contents: Callable[[], Contents] | None = None
    """Makes what tells the content of a choice's text, in which stop strings count; None: all."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text. False: their names are in it."""


def header_of(request_id: str) -> str:
    """The id as a header or metadata carries it: percent-encoded unless it is printable ASCII."""
    return request_id if request_id.isascii() and request_id.isprintable() else quote(request_id)
