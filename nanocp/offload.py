"""KV outside the frames, as values: what is copied there and back, and how much has room.

Enters: nothing; settings from nanocp.config_file or from tests. Leaves: the values. Does not know:
which page is where, who copies, files.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from nanocp.choices import require

if TYPE_CHECKING:
    from nanocp.config import Config

HASH_BYTES = 16
"""Long enough that no prompt with the hash of another's page can be found: that takes 2^128
tries."""


def next_page_hash(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash a full page: its token ids, and by the previous page's hash all tokens before.

    previous: empty for the first page.
    """
    return blake2b(previous + array("I", token_ids).tobytes(), digest_size=HASH_BYTES).digest()


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


@dataclass(frozen=True, slots=True)
class KvOffloadConfig:
    """Where full pages go beside the frames, so that conversations find their history there."""

    __pydantic_config__ = {"extra": "forbid"}

    host_gib: float = 0.0
    """Memory of each instance for pages outside its frames. 0: pages are in frames only."""
    file_gib: float = 0.0
    """File of each instance for pages that leave its memory. 0: they are dropped instead."""
    file_dir: str = ""
    """Directory of the files. They have no name there, so nothing is left when a process ends."""

    def __post_init__(self) -> None:
        for name in ("host_gib", "file_gib"):
            value = getattr(self, name)
            right = "a number of GiB, at least 0"
            require(0 <= value < inf, f"{name} is {value}; it must be {right}")
        require(
            self.host_gib > 0 or self.file_gib == 0,
            f"file_gib is {self.file_gib} and host_gib 0; pages reach the file through memory: "
            "set host_gib too",
        )
        require(
            (self.file_gib > 0) == bool(self.file_dir),
            f"file_gib is {self.file_gib} and file_dir {self.file_dir!r}; set both or neither",
        )

    def num_pages(self, page_bytes: int) -> tuple[int, int]:
        """Pages that fit into an instance's memory, and into its file."""
        gib = 1 << 30
        return int(self.host_gib * gib // page_bytes), int(self.file_gib * gib // page_bytes)


def has_slots(config: Config) -> bool:
    """Whether pages are kept outside the frames."""
    return config.kv_offload.host_gib > 0 or config.scheduler.offload_host_pages > 0


def with_slots(config: Config, page_bytes: int) -> Config:
    """The configuration, with as many slots as kv_offload has room for.

    page_bytes: of the model that is served. Raises ValueError if there is no room for one page.
    """
    offload, scheduler = config.kv_offload, config.scheduler
    num_host, num_file = offload.num_pages(page_bytes)
    for name, number in (("host_gib", num_host), ("file_gib", num_file)):
        require(
            number > 0 or not getattr(offload, name),
            f"kv_offload.{name} is {getattr(offload, name)}; a page of this model has "
            f"{page_bytes:,} bytes, and one at least must fit",
        )
    sized = replace(
        scheduler,
        offload_host_pages=scheduler.offload_host_pages or num_host,
        offload_file_pages=scheduler.offload_file_pages or num_file,
    )
    return replace(config, scheduler=sized)


def offload_obstacle(config: Config) -> str:
    """What of a configuration does not go with pages outside the frames; empty if nothing."""
    scheduler = config.scheduler
    if scheduler.offload_file_pages and not config.kv_offload.file_dir:
        return "scheduler.offload_file_pages is set without kv_offload.file_dir"
    if not has_slots(config):
        return ""
    not_here = (
        (config.cluster.layout == "pipeline", "cluster.layout is pipeline: stages keep pages"),
        (config.data_plane.device != "cpu", "data_plane.device is cuda: copies run on CPUs only"),
        (config.prefill.synthetic_kv, "prefill.synthetic_kv is set: no page has content to keep"),
        (not scheduler.prefix_sharing, "scheduler.prefix_sharing is off: pages have no hashes"),
    )
    return next((sentence for is_so, sentence in not_here if is_so), "")
