"""One request of a client with every default filled in, the same for both APIs, not validated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from urllib.parse import quote

from control_plane.frontend.access.api_keys import ApiKeys
from nanocp.values.offload import salt_of
from nanocp.values.remote_blocks import RemoteBlocks
from nanocp.values.sampling_fields import SamplingRequest

UNREAD_TIMEOUT_S = 40
"""Time without a read after which a client loses its request."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The tenant, priority and trace of a request."""

    priority: int = 0
    """Priority class: lower numbers go first."""
    endpoint: str = ""
    """What the client called, for the log: /v1/completions, Generate."""
    tenant: str = ""
    """Whose request it is; empty if nobody says."""
    traceparent: str = ""
    """W3C header of the request's trace, or empty."""
    cache_salt: str | None = None
    """KV is shared with requests of an equal salt only; None: no salt."""
    is_salted_by_key: bool = False
    """KV is shared within the tenant only."""
    remote: RemoteBlocks | None = None
    """Where the prompt's KV is, if an engine has computed it."""

    @property
    def salt(self) -> bytes:
        """Return the seed of page hashes; empty: KV is shared with all that have none."""
        return salt_of(self.tenant if self.is_salted_by_key else None, self.cache_salt)


NOWHERE = Origin()


def origin_of(
    headers: Mapping[str, str],
    keys: ApiKeys,
    endpoint: str,
    user: str,
    priority: int,
    cache_salt: str | None,
    remote: RemoteBlocks | None = None,
) -> Origin:
    """Return the origin of a request. headers: HTTP's, or the call's metadata."""
    return Origin(
        priority,
        endpoint,
        keys.tenant(headers, user),
        headers.get("traceparent", ""),
        cache_salt,
        keys.salts_by_key,
        remote,
    )


class Reasoning(NamedTuple):
    """The reasoning that may come before constrained output."""

    begin: str
    end: str
    """The markers around it."""
    has_begun: bool
    """True if the prompt ends with `begin`: then the output starts inside."""


class Contents(Protocol):
    """Separates the content of a text from its reasoning and calls."""

    @property
    def num_decided(self) -> int:
        """The characters of the text that are already classified."""

    def contents(self, text: str) -> Sequence[tuple[int, str]]:
        """Take text; return the content that it completes, with offsets in all text."""


@dataclass(frozen=True, slots=True)
class ResumedChoice:
    """A choice that continues after its stream broke."""

    index: int
    output_ids: Sequence[int]
    """The tokens that the client has, in order."""


@dataclass(frozen=True, slots=True)
class Resume:
    """The point at which a broken answer continues."""

    choices: Sequence[ResumedChoice]
    """Choices that have not ended; the others are not generated again."""
    attempt: int = 1
    """Counts the client's resumes, from 1 on."""


@dataclass(frozen=True, slots=True)
class ClientRequest(SamplingRequest):
    """One request of a client; nanocp.values.sampling_fields has its sampling parameters."""

    prompt: str | Sequence[int]
    """A text, or token ids."""
    prompt_field: str
    """The endpoint's name, for errors."""
    constraint_field: str = ""
    """The endpoint's name, for errors; empty: the constraint's own."""
    max_tokens_field: str = "max_tokens"
    """The endpoint's name, for errors."""
    reasoning: Reasoning | None = None
    """What may come before the constrained part of the output; None: nothing."""
    add_special_tokens: bool = True
    """The tokenizer adds its tokens, such as the beginning of sequence."""
    origin: Origin = NOWHERE
    request_id: str = ""
    """Unique among running requests. Empty: one is made."""
    prompt_number: int = 0
    """Number of the prompt in a call: later ones share the first one's id."""
    queue_timeout_ms: int | None = None
    resume: Resume | None = None
    """The client has a part of the answer; None: it has nothing."""
    new_contents: Callable[[], Contents] | None = None
    """Makes the reader of a choice's content, in which stop strings count; None: all text."""
    skip_special_tokens: bool = True
    """False: the text has the names of special tokens."""


def header_of(request_id: str) -> str:
    """Return the id for a header or metadata: percent-encoded unless it is printable ASCII."""
    return request_id if request_id.isascii() and request_id.isprintable() else quote(request_id)
