"""Stand-in for nixl_ep_cu13 of nixl-cu13 1.5.1: its signatures, between ranks of one process.

What the calls do was read in the package's public source (examples/device/ep of ai-dynamo/nixl):
two buffers in turn, words that announce rows, masks, waits that mask whom they give up. Launches
keep what the host has set, as captured ones do.
"""

import math
import time
from datetime import timedelta
from types import SimpleNamespace

import torch

_BYTES = 4
"""Bytes of a word that announces rows; words come first in the memory."""


class Kernels:
    """Launches of the stand-in; whoever records steps notes them."""

    @staticmethod
    def run(call):
        call()


def launch(call):
    """Run a call as a kernel."""
    Kernels.run(call)


class Buffer:
    """Rank of a group that changes; ranks of a process find each other by their metadata."""

    agents = {}
    """Metadata -> the Buffer that it is of."""
    dtype = torch.bfloat16
    """The dtype of rows; a test of exact tokens takes fp32, which the package does not."""
    wait_s = None
    """How long a wait takes; None: timeout_ms. 0 for ranks that take turns in one thread."""

    def __init__(
        self, disable_ll_nvlink=False, explicitly_destroy=False, rank=0, low_latency_mode=True,
        group=None, comm=None, tcp_store_group=None, timeout_ms=30_000,
    ):  # fmt: skip
        assert low_latency_mode and group is comm is None and isinstance(timeout_ms, int)
        self.rank, self.tcp_store_group = rank, tcp_store_group
        self._wait_s = timeout_ms / 1000 if self.wait_s is None else self.wait_s
        self._metadata = f"rank {rank}, number {len(self.agents)}".encode()
        self.agents[self._metadata] = self
        self._peers, self._turn, self._memory = {}, 0, None

    @staticmethod
    def get_low_latency_buffer_size_hint(
        num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts
    ):
        """Estimate the bytes: two words for every expert and rank, and their rows, twice."""
        rows = 4 * num_experts * num_max_dispatch_tokens_per_rank * 2 * hidden
        return rows + 2 * (num_experts * num_ranks + num_experts) * _BYTES

    def update_memory_buffers(
        self, num_ranks, num_experts_per_rank, num_rdma_bytes, num_nvl_bytes=0
    ):
        assert self._memory is None, "Multiple calls to update_memory_buffers are not supported"
        assert 0 <= self.rank < num_ranks and (num_ranks < 8 or num_ranks % 8 == 0)
        self._num_ranks, self._num_here = num_ranks, num_experts_per_rank
        self._memory = torch.zeros(num_rdma_bytes, dtype=torch.uint8)
        num_experts, words = num_ranks * num_experts_per_rank, self._memory.view(torch.int32)
        self._buffers = []
        for first in (0, 2 * num_experts):
            counts, flags = words[first : first + 2 * num_experts].split(num_experts)
            counts = counts.view(num_experts_per_rank, num_ranks)
            self._buffers.append(SimpleNamespace(counts=counts, flags=flags, rows={}))
        self._masked = torch.ones(num_ranks, dtype=torch.int32)
        self._masked[self.rank] = 0

    def get_local_buffer_tensor(self, dtype, size=None, offset=0, use_rdma_buffer=False):
        assert use_rdma_buffer and size is None and offset == 0
        return self._memory.view(dtype)

    def connect_ranks(self, remote_ranks, activate=True):
        """Connect to ranks that do the same. The store is called as the package calls it."""
        assert remote_ranks and activate and self.rank not in remote_ranks
        key = f"NIXL_EP/{self.rank}"
        self.tcp_store_group.set(key, self._metadata)
        keys = [f"NIXL_EP/{rank}" for rank in remote_ranks]
        self.tcp_store_group.wait(keys, timedelta(seconds=300))
        try:
            for rank, metadata in zip(
                remote_ranks, self.tcp_store_group.multi_get(keys), strict=True
            ):
                # A rank that is connected is passed over, whatever its metadata.
                peer = self._peers.setdefault(rank, self.agents[metadata])
                assert peer.rank == rank
                self.update_mask_buffer(rank, False)
        finally:
            self.tcp_store_group.delete_key(key)

    def disconnect_ranks(self, remote_ranks):
        assert remote_ranks and list(self._peers)[-len(remote_ranks) :] == list(remote_ranks)
        for rank in remote_ranks:
            self.update_mask_buffer(rank, True)
            del self._peers[rank]

    def update_mask_buffer(self, rank_to_mask, mask=False):
        assert rank_to_mask != self.rank or not mask, "cannot mask the local rank"
        assert mask or rank_to_mask in self._peers, "cannot unmask an unconnected rank"
        self._masked[rank_to_mask] = int(mask)

    def query_mask_buffer(self, mask_status):
        assert mask_status.shape == self._masked.shape and mask_status.dtype == torch.int32
        mask_status.copy_(self._masked)

    def low_latency_dispatch(
        self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts=None,
        cumulative_local_expert_recv_stats=None, dispatch_wait_recv_cost_stats=None, use_fp8=True,
        round_scale=False, use_ue8m0=False, async_finish=False, return_recv_hook=False,
    ):  # fmt: skip
        """Send rows; the hook receives. In the package a row visits at most 16 experts."""
        assert not use_fp8 and x.dtype == self.dtype and topk_idx.dtype == torch.int64
        assert x.is_contiguous() and topk_idx.is_contiguous() and topk_idx.shape[1] <= 16
        # A captured call keeps its layout: it must be that of all ranks, connected or not.
        assert num_experts == self._num_ranks * self._num_here
        num_slots = num_max_dispatch_tokens_per_rank * self._num_ranks
        assert len(x) <= num_max_dispatch_tokens_per_rank and num_slots % 4 == 0
        number, own, after = self._next_buffers()
        received = x.new_full((self._num_here, num_slots, x.shape[1]), math.nan)
        source = torch.full((self._num_here, num_slots), -1, dtype=torch.int32)
        places = torch.zeros(self._num_here, self._num_ranks, 2, dtype=torch.int64)
        count = torch.full((self._num_here,), -1, dtype=torch.int32)

        def send():
            _clear(after)
            for rank, peer in self._unmasked():
                buffer = peer._buffers[number]
                for expert in range(self._num_here):
                    visited = topk_idx == rank * self._num_here + expert
                    rows = visited.any(dim=1).nonzero()[:, 0]
                    buffer.rows["dispatch", expert, self.rank] = rows, x[rows].clone()
                    buffer.counts[expert, self.rank] = len(rows) + 1

        def receive():
            for expert in range(self._num_here):
                begin = 0
                for rank in range(self._num_ranks):
                    size = self._awaited(rank, own.counts, (expert, rank)) - 1
                    places[expert, rank] = torch.tensor([max(size, 0), begin])
                    if size > 0:
                        rows, sent = own.rows["dispatch", expert, rank]
                        received[expert, begin : begin + size] = sent
                        source[expert, begin : begin + size] = rows.int()
                        begin += size
                count[expert] = begin

        launch(send)
        handle = source, places, num_max_dispatch_tokens_per_rank, x.shape[1]
        return received, count, handle, None, _launched(receive, return_recv_hook)

    def low_latency_combine(
        self, x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False,
        async_finish=False, return_recv_hook=False, out=None, combine_wait_recv_cost_stats=None,
    ):  # fmt: skip
        """Send rows back; the hook receives and sums them. What a masked rank has is left out."""
        source, places, max_rows, hidden = handle
        assert x.shape == (self._num_here, max_rows * self._num_ranks, hidden)
        assert x.dtype == self.dtype and topk_weights.dtype == torch.float32
        assert topk_weights.shape == topk_idx.shape and topk_weights.is_contiguous()
        number, own, after = self._next_buffers()
        combined = x.new_full((len(topk_idx), hidden), math.nan)

        def send():
            _clear(after)
            for rank, peer in self._unmasked():
                buffer = peer._buffers[number]
                for expert in range(self._num_here):
                    size, begin = places[expert, rank].tolist()
                    rows = source[expert, begin : begin + size].tolist()
                    at = self.rank * self._num_here + expert
                    sent = x[expert, begin : begin + size].clone()
                    buffer.rows["combine", at] = dict(zip(rows, sent, strict=True))
                    buffer.flags[at] = 1

        def receive():
            for rank in range(self._num_ranks):
                for expert in range(self._num_here):
                    self._awaited(rank, own.flags, rank * self._num_here + expert)
            sums = torch.zeros(combined.shape)
            for row, experts in enumerate(topk_idx.tolist()):
                for at, weight in zip(experts, topk_weights[row], strict=True):
                    if at >= 0 and not self._masked[at // self._num_here]:
                        sums[row] += weight * own.rows["combine", at][row].float()
            combined.copy_(sums)

        launch(send)
        return combined, None, _launched(receive, return_recv_hook)

    def _next_buffers(self):
        """Turn the buffers: (number of this call's, this call's, the other one)."""
        number = self._turn
        self._turn ^= 1
        return number, self._buffers[number], self._buffers[self._turn]

    def _unmasked(self):
        everybody = self._peers | {self.rank: self}
        return [(rank, peer) for rank, peer in everybody.items() if not self._masked[rank]]

    def _awaited(self, rank, words, at):
        """The word once it is not 0; 0 if the rank is masked, as a wait that is too long does."""
        deadline = time.monotonic() + self._wait_s
        while not self._masked[rank]:
            if word := int(words[at]):
                return word
            if time.monotonic() >= deadline:
                self._masked[rank] = 1
            time.sleep(0)
        return 0


def _clear(buffer):
    """Clear the words for the call after this one."""
    buffer.counts.zero_()
    buffer.flags.zero_()


def _launched(receive, return_recv_hook):
    """What a call returns as its hook: what launches the part that receives."""
    if return_recv_hook:
        return lambda: launch(receive)
    return launch(receive)


nixl_ep = SimpleNamespace(Buffer=Buffer)
