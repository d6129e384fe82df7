"""The pool of a captured step: tables and row state on the device, sliced by bucket as
pool.ContextPool's are (5.2).

Enters: the bounds, on which device; what the host fills in. Leaves: contexts of tensors that keep
their addresses, and the kernels at a step's head that bring them up to date. Does not know:
requests, plans, the model.

The host fills pinned memory. `upload` copies a window's tables to staging on a stream of their own,
while the window before still runs; the window's first replay copies them over the live ones, by a
kernel that was captured with the rest. What a step starts from (tokens, positions, live flags, and
whether there are staged tables) is one copy before it.

Legend: B rows, A received attention rows, N instances, L links, P pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from data_plane.graph.buckets import Bucket
from data_plane.graph.pool_cpu import LocalPages, RowState, StepTables
from data_plane.graph.triton_tables import adopt_kernel, locate_kernel, route_kernel
from nanocp.config import ClusterConfig
from nanocp.plan import PAGE_SIZE

_ADOPT_BLOCK = 1024
_LOCATE_BLOCK = 64
_NOTHING_STAGED = -1


@dataclass(frozen=True, slots=True)
class GpuPages:
    """The pages of attention rows; see pool.LocalPages."""

    num_pages: Tensor
    page: Tensor
    frame: Tensor


@dataclass(frozen=True, slots=True)
class GpuContext:
    """The prefix of the pool that one bucket's captured step reads."""

    bucket: Bucket
    num_sent: Tensor
    num_received: Tensor
    send_row: Tensor
    own: GpuPages
    received: GpuPages
    token: Tensor
    position: Tensor
    live: Tensor


class _Words:
    """Where each table is in a run of int32 words; the same on host and device."""

    def __init__(self, cluster: ClusterConfig) -> None:
        bounds, self.peers = cluster.bounds, cluster.num_instances
        self.rows, self.received, self.links = (
            bounds.max_rows,
            bounds.max_attention_rows,
            bounds.max_links,
        )
        self.attention_rows = self.rows + self.received
        self.max_pages = min(-(-cluster.max_model_len // PAGE_SIZE), cluster.num_frames)
        self.num_sent, self.num_received, self.send_row = 1, 1 + self.peers, 1 + 2 * self.peers
        self.num_pages = self.send_row + self.peers * self.links
        # A row's pages begin at a multiple of 16 bytes.
        self.small = -(-(self.num_pages + self.attention_rows) // 4) * 4
        self.frames = self.small + self.attention_rows * self.max_pages
        self.total = self.frames + self.attention_rows * self.max_pages

    def pages(self, words: Tensor, first_row: int, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """(num_pages, page, frame) of some attention rows: own ones come first."""
        page, frame = (
            words[begin:][: self.attention_rows * self.max_pages].view(-1, self.max_pages)[
                first_row:
            ][:num_rows]
            for begin in (self.small, self.frames)
        )
        return words[self.num_pages + first_row :][:num_rows], page, frame


class GpuPool:
    """One pool for all buckets. `staging` and `rows` are the host's, as those of pool.ContextPool."""

    def __init__(self, cluster: ClusterConfig, device: torch.device, scratch_slot: int) -> None:
        words = self._words = _Words(cluster)
        self.device, self._scratch_slot = device, scratch_slot
        is_gpu = device.type == "cuda"
        self._host = torch.zeros(2, words.total, dtype=torch.int32, pin_memory=is_gpu)
        self._staged = torch.zeros(2, words.total, dtype=torch.int32, device=device)
        self._live = torch.zeros(words.total, dtype=torch.int32, device=device)
        self.staging = tuple(_on_host(cluster, words, host) for host in self._host)
        # parity, then tokens, positions, live flags
        self._start = torch.zeros(8 + 17 * words.rows, dtype=torch.uint8, pin_memory=is_gpu)
        self._device_start = torch.zeros_like(self._start, device=device)
        self._parity, *row_state = _start_views(self._start, words.rows)
        self.rows = RowState(*(tensor.numpy() for tensor in row_state))
        self._to_adopt = _NOTHING_STAGED
        self._uploads = torch.cuda.Stream(device) if is_gpu else None  # type: ignore[no-untyped-call]
        self._uploaded = torch.cuda.Event() if is_gpu else None  # type: ignore[no-untyped-call]

    @property
    def num_bytes(self) -> int:
        """Of the device's memory."""
        return self._staged.nbytes + self._live.nbytes + self._device_start.nbytes

    def context(self, bucket: Bucket) -> GpuContext:
        """The bucket's slice. Contexts of all buckets overlap: only one runs at a time."""
        words, live, num_rows = self._words, self._live, bucket.num_rows
        _, *row_state = _start_views(self._device_start, words.rows)
        return GpuContext(
            bucket,
            live[words.num_sent :][: words.peers],
            live[words.num_received :][: words.peers],
            live[words.send_row :][: words.peers * words.links].view(words.peers, words.links),
            GpuPages(*words.pages(live, 0, num_rows)),
            GpuPages(*words.pages(live, words.rows, bucket.num_received)),
            *(tensor[:num_rows] for tensor in row_state),
        )

    def upload(self, parity: int) -> None:
        """Begin to copy what the host filled in of a window's tables. The steps of the last window
        but one, which read what this overwrites, must have been waited for."""
        words, host, staged = self._words, self._host[parity], self._staged[parity]
        with torch.cuda.stream(self._uploads):
            staged[: words.small].copy_(host[: words.small], non_blocking=True)
            num_rows, num_received = (
                int(host[0]),
                int(host[words.num_received :][: words.peers].sum()),
            )
            for first, count in ((0, num_rows), (words.rows, num_received)):
                for to, source in zip(
                    words.pages(staged, first, count)[1:],
                    words.pages(host, first, count)[1:],
                    strict=True,
                ):
                    to.copy_(source, non_blocking=True)
            if self._uploaded is not None:
                self._uploaded.record()

    def adopt(self, parity: int) -> None:
        """The next step is to begin with the tables of this parity."""
        if self._uploaded is not None:
            self._uploaded.wait(torch.cuda.current_stream(self.device))
        self._to_adopt = parity

    def start(self) -> None:
        """Copy what the next step starts from. The step before it must have been waited for."""
        self._parity[0] = self._to_adopt
        self._to_adopt = _NOTHING_STAGED
        self._device_start.copy_(self._start, non_blocking=True)

    def run_adopt(self) -> None:
        """At the head of a step, on the device."""
        words = self._words
        adopt_kernel[(max(triton.cdiv(words.small, _ADOPT_BLOCK), words.attention_rows),)](
            _start_views(self._device_start, words.rows)[0],
            self._staged,
            self._live,
            words.total,
            words.small,
            words.num_pages,
            words.attention_rows,
            words.max_pages,
            BLOCK=_ADOPT_BLOCK,
        )

    def run_locate(self, pages: GpuPages, position: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        """(slots [rows] int64, lengths [rows] int32), on the device; see kv.frame_pool.LocalStep."""
        num_rows = len(pages.num_pages)
        slots = torch.empty(num_rows, dtype=torch.int64, device=self.device)
        lengths = torch.empty(num_rows, dtype=torch.int32, device=self.device)
        locate_kernel[(triton.cdiv(num_rows, _LOCATE_BLOCK),)](
            pages.num_pages,
            pages.page,
            pages.frame,
            position,
            live.view(torch.uint8),
            slots,
            lengths,
            num_rows,
            self._words.max_pages,
            self._scratch_slot,
            PAGE=PAGE_SIZE,
            NUM_HALVINGS=self._words.max_pages.bit_length(),
            BLOCK=_LOCATE_BLOCK,
        )
        return slots, lengths

    def run_route(self, context: GpuContext) -> Tensor:
        """[N, B] int32: the slot of each row in Q-route to each peer, -1 if it does not go there;
        on the device."""
        peers, links = context.send_row.shape
        slot_NB = torch.empty(peers, context.bucket.num_rows, dtype=torch.int32, device=self.device)
        route_kernel[(peers,)](
            context.num_sent,
            context.send_row,
            slot_NB,
            context.bucket.num_rows,
            links,
            BLOCK_B=triton.next_power_of_2(context.bucket.num_rows),
            BLOCK_L=triton.next_power_of_2(links),
        )
        return slot_NB


def _start_views(start: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    token, position, live = (
        start[8:][: 8 * rows],
        start[8 + 8 * rows :][: 8 * rows],
        start[8 + 16 * rows :],
    )
    return (
        start[:8].view(torch.int64),
        token.view(torch.int64),
        position.view(torch.int64),
        live.view(torch.bool),
    )


def _on_host(cluster: ClusterConfig, words: _Words, host: Tensor) -> StepTables:
    empty = StepTables.empty(cluster)
    return StepTables(
        num_rows=host[:1].numpy(),
        send_row=host[words.send_row :][: words.peers * words.links]
        .view(words.peers, words.links)
        .numpy(),
        num_sent=host[words.num_sent :][: words.peers].numpy(),
        num_received=host[words.num_received :][: words.peers].numpy(),
        # The device finds the holder of a page in the page tables.
        tail_page=empty.tail_page,
        tail_holder=empty.tail_holder,
        own=LocalPages(*(tensor.numpy() for tensor in words.pages(host, 0, words.rows))),
        received=LocalPages(
            *(tensor.numpy() for tensor in words.pages(host, words.rows, words.received))
        ),
    )
