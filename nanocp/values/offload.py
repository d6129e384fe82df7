"""KV outside the frames: values for copies there and back, and page hashes."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from nanocp.values.table_changes import PAGE_SIZE

HASH_BYTES = 16
"""Finding another prompt with a page's hash takes 2^128 tries."""


def next_page_hash(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash a full page and, by the hash of the `previous` page, all before; empty for the first."""
    return blake2b(previous + array("I", token_ids).tobytes(), digest_size=HASH_BYTES).digest()


def salt_of(*texts: str | None) -> bytes:
    """Digest of texts, equal to no page's hash; empty if all are None."""
    if all(text is None for text in texts):
        return b""
    return blake2b(json.dumps(texts).encode(), digest_size=HASH_BYTES, person=b"salt").digest()


def page_hashes(token_ids: Sequence[int], salt: bytes = b"") -> tuple[bytes, ...]:
    """One hash for each full page, of all tokens up to its end (see `Arrival.page_hashes`).

    salt keeps pages apart. The page of the last token is left out: the first decode step writes its
    KV.
    """
    tokens, page_hash = array("I", token_ids), salt
    hashes: list[bytes] = []
    for first in range(0, (len(token_ids) - 1) // PAGE_SIZE * PAGE_SIZE, PAGE_SIZE):
        page_hash = next_page_hash(page_hash, tokens[first : first + PAGE_SIZE])
        hashes.append(page_hash)
    return tuple(hashes)


class WrittenPage(NamedTuple):
    """A row has filled a page, which is final now."""

    request_id: int
    attempt: int
    page: int
    page_hash: bytes
    """Hash of all tokens up to the page's end (see `Arrival.page_hashes`)."""


class Stow(NamedTuple):
    """Pages that an instance copies into slots, in order, before the next command.

    Answered by TransferDone, or by TransferFenced if one was not written: then no slot counts.
    """

    ticket: int
    instance: int
    pages: tuple[tuple[int, int], ...]
    """(frame, slot)."""
    is_demotion: bool = False
    """Pages are in slots already: each first number is a slot."""


class StoredPage(NamedTuple):
    """A page of a transfer that is in a slot."""

    page: int
    slot: int
    receiver: int


class Fetch(NamedTuple):
    """Pages under a ticket that an instance sends from its slots, also to itself.

    The receivers answer; an unreadable page is answered by TransferMissed.
    """

    ticket: int
    instance: int
    pages: tuple[StoredPage, ...]


@dataclass(frozen=True, slots=True)
class TransferMissed:
    """`instance` cannot read a page from a slot."""

    ticket: int
    instance: int
