"""Stand-in for deep_ep at dd758ca (V1, deep_ep/buffers/legacy.py): its low-latency calls.

What they do was read there: NIXL-EP's calls are DeepEP's, which masks nobody. A process's first
Buffer starts NVSHMEM.
"""

from types import SimpleNamespace

from harness.gpu_stand_ins import nixl_ep_stand_in


class Buffer(nixl_ep_stand_in.Buffer):
    """Rank of a group; ranks of a process find each other by what they gather."""

    made = []
    """Each Buffer, by its number."""
    nvshmem = {}
    """Rank -> the fake_nvshmem.FakeLibrary of its process, if it has one."""

    def __init__(
        self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24,
        allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=False,
        enable_shrink=False, comm=None,
    ):  # fmt: skip
        assert low_latency_mode and group is None and num_nvl_bytes == 0
        self.rank, self._num_ranks = comm.Get_rank(), comm.Get_size()
        # A wait has no limit but the device's own, of minutes.
        self._wait_s = 60 if self.wait_s is None else self.wait_s
        self._turn, self._memory = 0, None
        self.update_memory_buffers(self._num_ranks, num_qps_per_rank, num_rdma_bytes)
        self._masked.zero_()
        self._peers = self.find_peers(comm)
        root = bytearray(b"id of rank 0") if self.rank == 0 else None
        root = comm.allgather(root)[0]
        assert isinstance(root, bytearray), "the package's runtime takes no other type"
        if self.rank in self.nvshmem:
            self.nvshmem[self.rank].join(self.rank)

    def find_peers(self, comm):
        """Every rank, by its number."""
        self.made.append(self)
        numbers = comm.allgather(self.made.index(self))
        return dict(enumerate(self.made[number] for number in numbers))

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts
    ):
        return nixl_ep_stand_in.Buffer.get_low_latency_buffer_size_hint(
            num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts
        )

    def low_latency_dispatch(
        self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts,
        cumulative_local_expert_recv_stats=None, dispatch_wait_recv_cost_stats=None, use_fp8=True,
        round_scale=False, use_ue8m0=False, async_finish=False, return_recv_hook=False,
    ):  # fmt: skip
        assert topk_idx.shape[1] <= 11
        return super().low_latency_dispatch(
            x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, use_fp8=use_fp8,
            return_recv_hook=return_recv_hook,
        )  # fmt: skip

    low_latency_combine = nixl_ep_stand_in.Buffer.low_latency_combine


deep_ep = SimpleNamespace(Buffer=Buffer, __version__="2.1.0")
