"""KV outside the frames, as values: what is copied there and back, and the hash of a page.

Enters: nothing. Leaves: the values. Does not know: which page is where, who copies, files.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from nanocp.values.table_changes import PAGE_SIZE

HASH_BYTES = 16
"""Long enough that no prompt with the hash of another's page can be found: that takes 2^128
tries."""


def next_page_hash(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash a full page: its token ids, and by the previous page's hash all tokens before.

    previous: empty for the first page.
    """
    return blake2b(previous + array("I", token_ids).tobytes(), digest_size=HASH_BYTES).digest()


def page_hashes(token_ids: Sequence[int], salt: bytes = b"") -> tuple[bytes, ...]:
    """One hash for each full page, of all tokens up to its end (see `Arrival.page_hashes`).

    All requests have the same weights, so equal tokens have equal KV; salt keeps pages apart that
    must not be found. The page of the last token is left out: the first decode step writes its KV.
    """
    tokens, page_hash = array("I", token_ids), salt
    hashes: list[bytes] = []
    for first in range(0, (len(token_ids) - 1) // PAGE_SIZE * PAGE_SIZE, PAGE_SIZE):
        page_hash = next_page_hash(page_hash, tokens[first : first + PAGE_SIZE])
        hashes.append(page_hash)
    return tuple(hashes)


class WrittenPage(NamedTuple):
    """A row has written the last token of a page, so that the page will not change any more."""

    request_id: int
    attempt: int
    page: int
    page_hash: bytes
    """Hash of all tokens up to the page's end (see `Arrival.page_hashes`)."""


class Stow(NamedTuple):
    """Pages that an instance is to copy into slots, in order, each before the next command.

    Answered by TransferDone, or by TransferFenced if one of them could not be written: then none of
    the slots counts.
    """

    ticket: int
    instance: int
    pages: tuple[tuple[int, int], ...]
    """(frame, slot)."""
    is_demotion: bool = False
    """Whether the pages are in slots already: the first number of each is one too."""


class StoredPage(NamedTuple):
    """A page of a transfer that is in a slot."""

    page: int
    slot: int
    receiver: int


class Fetch(NamedTuple):
    """Pages under a ticket that an instance is to send from its slots, also to itself.

    The receivers answer for them. A page that cannot be read is answered by TransferMissed.
    """

    ticket: int
    instance: int
    pages: tuple[StoredPage, ...]


@dataclass(frozen=True, slots=True)
class TransferMissed:
    """Instance `instance` cannot read a page that it was to send from a slot."""

    ticket: int
    instance: int
