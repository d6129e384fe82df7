"""A request of a workload."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from nanocp.values.plan import PAGE_SIZE, Arrival

HASH_ID_TOKENS = 512


@dataclass(frozen=True, slots=True)
class QuietUntil:
    """In place of a request: no arrival before this moment."""

    arrival_us: int


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """A request with its output length, which only the simulator knows."""

    arrival_us: int
    prompt_len: int
    output_len: int
    """At most max_tokens."""
    max_tokens: int
    """The client's limit, known to the scheduler."""
    hash_ids: tuple[int, ...] = ()
    """One per HASH_ID_TOKENS prompt tokens; equal prefixes of ids are equal prefixes of prompts."""
    is_running: bool = False
    """Runs at the start and is not judged: prompt_len counts generated tokens, output_len those to
    come."""

    tenant: str = ""

    def arrival(self, request_id: int) -> Arrival:
        """The request as the scheduler gets it."""
        return Arrival(
            request_id,
            self.prompt_len,
            self.max_tokens,
            needs_prefill=not self.is_running,
            page_hashes=self._page_hashes(),
            tenant=self.tenant,
        )

    def _page_hashes(self) -> tuple[bytes, ...]:
        """Hash the full pages of the prompt without its last token."""
        pages_per_id = HASH_ID_TOKENS // PAGE_SIZE
        num_pages = min((self.prompt_len - 1) // PAGE_SIZE, len(self.hash_ids) * pages_per_id)
        return tuple(
            struct.pack("<QQ", self.hash_ids[page // pages_per_id], page)
            for page in range(num_pages)
        )

    def __post_init__(self) -> None:
        if (
            self.prompt_len < 1
            or not 1 <= self.output_len <= self.max_tokens
            or self.arrival_us < 0
        ):
            raise ValueError(
                f"arrival_us is {self.arrival_us}, prompt_len {self.prompt_len}, output_len "
                f"{self.output_len} and max_tokens {self.max_tokens}; the first must not be "
                "negative, the second positive, the third from 1 to the fourth"
            )


Upcoming = WorkloadRequest | QuietUntil
"""Input of a simulation, in order of time."""
