"""One request of a workload.

Enters: numbers. Leaves: a frozen value. Does not know: where it comes from.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from nanocp.values.plan import PAGE_SIZE, Arrival

HASH_ID_TOKENS = 512
"""Mooncake's block."""


@dataclass(frozen=True, slots=True)
class QuietUntil:
    """In place of a request: nobody asks before this moment."""

    arrival_us: int


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """What a client will ask, and how long the answer will be, which only the simulator knows."""

    arrival_us: int
    prompt_len: int
    output_len: int
    """Tokens after which it stops: at most max_tokens."""
    max_tokens: int
    """What the client allows, and all that the scheduler knows."""
    hash_ids: tuple[int, ...] = ()
    """One for each HASH_ID_TOKENS tokens of prompt, the last maybe fewer: requests with the same
    first ids have prompts that begin alike."""
    is_running: bool = False
    """It was running before the run began: its KV is there already, prompt_len counts the tokens
    that it has generated, output_len those to come. Its first token is not seen, so it is not
    judged."""

    tenant: str = ""
    """Whose request it is; empty if nobody says."""

    def arrival(self, request_id: int) -> Arrival:
        """What the scheduler gets of it."""
        return Arrival(
            request_id,
            self.prompt_len,
            self.max_tokens,
            needs_prefill=not self.is_running,
            page_hashes=self._page_hashes(),
            tenant=self.tenant,
        )

    def _page_hashes(self) -> tuple[bytes, ...]:
        """Hash the full pages of the prompt without its last token, as the front end does."""
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
"""What a simulation takes one by one, in order of time."""
