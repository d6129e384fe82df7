"""The pool on a GPU: tables and row state on the device, sliced by bucket as in pool_cpu.py.

`upload` copies a window's tables while the last window runs; a captured kernel makes them live.
(The paper's section 5.2.) Legend: pool_cpu.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from data_plane.graph.buckets import Bucket
from data_plane.graph.pool_cpu import LocalPages, RowState, StepTables
from data_plane.graph.triton_tables import adopt_kernel, locate_kernel, route_kernel
from nanocp.config.cluster import ClusterConfig
from nanocp.values.plan import PAGE_SIZE

_ADOPT_BLOCK = 1024
_LOCATE_BLOCK = 64
_NOTHING_STAGED = -1


@dataclass(frozen=True, slots=True)
class GpuPages:
    """The pages of attention rows in this instance's frames (pool_cpu.LocalPages)."""

    num_pages: Tensor
    """[rows] int32."""
    page: Tensor
    """[rows, P] int32."""
    frame: Tensor
    """[rows, P] int32."""

    def on_host(self) -> LocalPages:
        """Return arrays over the same memory, which must be the host's."""
        return LocalPages(
            num_pages=self.num_pages.numpy(), page=self.page.numpy(), frame=self.frame.numpy()
        )


@dataclass(frozen=True, slots=True)
class GpuContext:
    """The prefix of the pool for one bucket (pool_cpu.StepContext)."""

    bucket: Bucket
    num_sent: Tensor
    """[N] int32."""
    num_received: Tensor
    """[N] int32."""
    send_row: Tensor
    """[N, L] int32: StepTables.send_row."""
    own: GpuPages
    received: GpuPages
    token: Tensor
    """[B] int64."""
    position: Tensor
    """[B] int64."""
    live: Tensor
    """[B] bool."""
    carry_frame: Tensor
    """[B] int32."""
    by_host: Tensor
    """[1] int64: not 0 if the host set these three up for a turn of drafting."""

    @property
    def has_links(self) -> bool:
        """False: the step launches nothing for links."""
        return self.bucket.has_links and len(self.num_sent) > 1


class _Start(NamedTuple):
    parity: Tensor
    """[1] int64: the staged tables to adopt first; negative: none."""
    by_host: Tensor
    token: Tensor
    position: Tensor
    live: Tensor

    @staticmethod
    def num_bytes(rows: int) -> int:
        return 16 + 17 * rows

    @classmethod
    def views(cls, start: Tensor, rows: int) -> _Start:
        token = start[16:][: 8 * rows]
        position = start[16 + 8 * rows :][: 8 * rows]
        live = start[16 + 16 * rows :]
        return cls(
            parity=start[:8].view(torch.int64),
            by_host=start[8:16].view(torch.int64),
            token=token.view(torch.int64),
            position=position.view(torch.int64),
            live=live.view(torch.bool),
        )


class _Words:
    """The place of each table in a run of int32 words, equal on host and device."""

    def __init__(self, cluster: ClusterConfig) -> None:
        bounds, self.peers = cluster.bounds, cluster.num_instances
        self.rows = bounds.max_rows
        self.received = bounds.max_attention_rows
        self.links = bounds.max_links
        self.attention_rows = self.rows + self.received
        self.max_pages = min(-(-cluster.max_model_len // PAGE_SIZE), cluster.num_frames)
        # Word 0 is the number of rows.
        self.num_sent = 1
        self.num_received = self.num_sent + self.peers
        self.send_row = self.num_received + self.peers
        self.carry_frame = self.send_row + self.peers * self.links
        self.num_pages = self.carry_frame + self.rows
        # The pages of a row begin at a multiple of 16 bytes.
        self.small = -(-(self.num_pages + self.attention_rows) // 4) * 4
        self.frames = self.small + self.attention_rows * self.max_pages
        self.total = self.frames + self.attention_rows * self.max_pages

    def pages(self, words: Tensor, first_row: int, num_rows: int) -> GpuPages:
        page, frame = (
            words[begin:][: self.attention_rows * self.max_pages].view(-1, self.max_pages)[
                first_row:
            ][:num_rows]
            for begin in (self.small, self.frames)
        )
        return GpuPages(
            num_pages=words[self.num_pages + first_row :][:num_rows], page=page, frame=frame
        )

    def routes(self, words: Tensor) -> Tensor:
        return words[self.send_row :][: self.peers * self.links].view(self.peers, self.links)

    def on_host(self, cluster: ClusterConfig, host: Tensor) -> StepTables:
        empty = StepTables.empty(cluster)
        return StepTables(
            num_rows=host[:1].numpy(),
            send_row=self.routes(host).numpy(),
            num_sent=host[self.num_sent :][: self.peers].numpy(),
            num_received=host[self.num_received :][: self.peers].numpy(),
            # The device finds the holder of a page in the page tables instead.
            tail_page=empty.tail_page,
            tail_holder=empty.tail_holder,
            carry_frame=host[self.carry_frame :][: self.rows].numpy(),
            own=self.pages(host, 0, self.rows).on_host(),
            received=self.pages(host, self.rows, self.received).on_host(),
        )


class GpuPool:
    """The pool of an instance on a GPU, with `staging` and `rows` on the host; an engine.Pool."""

    def __init__(self, cluster: ClusterConfig, device: torch.device, scratch_slot: int) -> None:
        words = self._words = _Words(cluster)
        self.device, self._scratch_slot = device, scratch_slot
        is_gpu = device.type == "cuda"
        self._host = torch.zeros(2, words.total, dtype=torch.int32, pin_memory=is_gpu)
        self._staged = torch.zeros(2, words.total, dtype=torch.int32, device=device)
        self._live = torch.zeros(words.total, dtype=torch.int32, device=device)
        self.staging = tuple(words.on_host(cluster, host) for host in self._host)
        self._start = torch.zeros(
            _Start.num_bytes(words.rows), dtype=torch.uint8, pin_memory=is_gpu
        )
        self._device_start = torch.zeros_like(self._start, device=device)
        start = _Start.views(self._start, words.rows)
        self._parity, self._by_host = start.parity, start.by_host
        self.rows = RowState(
            token=start.token.numpy(), position=start.position.numpy(), live=start.live.numpy()
        )
        self._to_adopt = _NOTHING_STAGED
        self._uploads = self._uploaded = None
        if is_gpu:
            self._uploads = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._uploaded = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool's device memory."""
        return self._staged.nbytes + self._live.nbytes + self._device_start.nbytes

    def context(self, bucket: Bucket) -> GpuContext:
        """Return the bucket's slice of the pool; only one step runs at a time."""
        words, live, num_rows = self._words, self._live, bucket.num_rows
        start = _Start.views(self._device_start, words.rows)
        return GpuContext(
            bucket=bucket,
            num_sent=live[words.num_sent :][: words.peers],
            num_received=live[words.num_received :][: words.peers],
            send_row=words.routes(live),
            own=words.pages(live, 0, num_rows),
            received=words.pages(live, words.rows, bucket.num_received),
            token=start.token[:num_rows],
            position=start.position[:num_rows],
            live=start.live[:num_rows],
            carry_frame=live[words.carry_frame :][:num_rows],
            by_host=start.by_host,
        )

    def upload(self, parity: int) -> None:
        """Begin to copy the host's tables into the staged ones of this parity.

        The steps of the last window but one must have ended.
        """
        words, host, staged = self._words, self._host[parity], self._staged[parity]
        with torch.cuda.stream(self._uploads):
            staged[: words.small].copy_(host[: words.small], non_blocking=True)
            num_rows = int(host[0])
            num_received = int(host[words.num_received :][: words.peers].sum())
            for first, count in ((0, num_rows), (words.rows, num_received)):
                to, source = words.pages(staged, first, count), words.pages(host, first, count)
                to.page.copy_(source.page, non_blocking=True)
                to.frame.copy_(source.frame, non_blocking=True)
            if self._uploaded is not None:
                self._uploaded.record()

    def adopt(self, parity: int) -> None:
        """Let the next step adopt the staged tables of this parity."""
        if self._uploaded is not None:
            self._uploaded.wait(torch.cuda.current_stream(self.device))
        self._to_adopt = parity

    def start(self, by_host: bool = False) -> None:
        """Copy the next step's start to the device; the step before must have ended."""
        self._by_host[0] = by_host
        self._parity[0] = self._to_adopt
        self._to_adopt = _NOTHING_STAGED
        self._device_start.copy_(self._start, non_blocking=True)

    def run_adopt(self) -> None:
        """Launch the kernel that copies staged tables over the live ones."""
        words = self._words
        adopt_kernel[(max(triton.cdiv(words.small, _ADOPT_BLOCK), words.attention_rows),)](
            _Start.views(self._device_start, words.rows).parity,
            self._staged,
            self._live,
            words.total,
            words.small,
            words.num_pages,
            words.attention_rows,
            words.max_pages,
            BLOCK=_ADOPT_BLOCK,
        )

    def run_locate(
        self, pages: GpuPages, position: Tensor, live: Tensor, error: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Launch the kernel that finds the rows' append slots and lengths.

        error: once set, every row appends to the scratch frame. Returns (slots [rows] int64,
        lengths [rows] int32), on the device.
        """
        num_rows = len(pages.num_pages)
        slots = torch.empty(num_rows, dtype=torch.int64, device=self.device)
        lengths = torch.empty(num_rows, dtype=torch.int32, device=self.device)
        locate_kernel[(triton.cdiv(num_rows, _LOCATE_BLOCK),)](
            pages.num_pages,
            pages.page,
            pages.frame,
            position,
            live.view(torch.uint8),
            error,
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
        """Launch the kernel that finds each row's slot in the Q-route to each peer, or -1.

        Returns [N, B] int32 on the device.
        """
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
