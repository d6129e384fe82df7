"""Dispatch and combine by NIXL-EP's low-latency kernels, an all_to_all_gpu.GpuAllToAll with terms.

Public signatures: tests/harness/gpu_stand_ins/nixl_ep_stand_in.py. All terms share one buffer, for
graphs (docs/decisions/0066). A mask on the device names the unconnected instances, so a lone one
can capture steps. NIXL-EP computes an expert's instance from its number, so rows carry its slot's:
seat * slots of a seat + slot.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_plane.model.config import ModelConfig
from data_plane.moe.gpu.all_to_all_gpu import GpuMixtures
from data_plane.moe.gpu.gpu_weights import GpuWeights
from data_plane.startup.experimental.deep_ep import LowLatencyExchange, rows_obstacle
from data_plane.step.gpu import GpuStep
from data_plane.transport.exchange import ExchangeTimeout, PeerLost
from data_plane.transport.futex import Word
from data_plane.transport.segments import Segment, Segments
from data_plane.transport.shared_memory import OwnedSegment
from nanocp.config.cluster import ClusterConfig
from nanocp.config.limits import LimitsConfig
from nanocp.values.experts import ExpertTable, home_table, num_slots

_PACKAGES = ("nixl_ep_cu13", "nixl_ep_cu12")
_HIDDEN_SIZES = (2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192)
_MAX_EXPERTS_PER_TOKEN = 16
_NODE = 8
"""From this number of instances on, it must be a multiple of this."""
_KIND = "nixl_ep"
_WORD_BYTES = 8


class NixlEpExchange(LowLatencyExchange):
    """The MoE all-to-all of one instance over NIXL-EP, in one term after the other."""

    def __init__(
        self,
        segments: Segments,
        instance: int,
        cluster: ClusterConfig,
        model: ModelConfig,
        limits: LimitsConfig,
        device: torch.device,
        package: Any = None,
    ) -> None:
        """Allocate the buffer, before any capture; alone until begin_term."""
        num_instances, num_experts = cluster.num_instances, model.num_experts
        max_rows = cluster.bounds.max_rows
        self._term, self._instance = segments.term, instance
        self._num_slots = num_slots(num_experts, num_instances, cluster.redundant_experts)
        num_numbers = num_instances * self._num_slots
        self._metadata = _TermMetadata(segments, instance, num_instances, limits)
        package = package or import_module(next(filter(find_spec, _PACKAGES), _PACKAGES[0]))
        buffer_class = package.Buffer
        buffer = buffer_class(
            rank=instance,
            low_latency_mode=True,
            tcp_store_group=self._metadata,
            timeout_ms=limits.exchange_timeout_ms,
        )
        num_bytes = buffer_class.get_low_latency_buffer_size_hint(
            max_rows, model.hidden_size, num_instances, num_numbers
        )
        buffer.update_memory_buffers(num_instances, self._num_slots, num_bytes)
        super().__init__(buffer, num_numbers, max_rows)
        self._connected: list[int] = []
        self._masked_N = torch.zeros(num_instances, dtype=torch.int32, device=device)
        self._number_E = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.place_experts(home_table(num_experts, num_instances))

    def place_experts(self, table: ExpertTable) -> None:
        """Set the slot of each expert, where captured steps read it."""
        places = zip(table.seats, table.slots, strict=True)
        numbers = [seat * self._num_slots + slot for seat, slot in places]
        self._number_E.copy_(torch.tensor(numbers, dtype=torch.int64))

    def begin_term(self, seats: Sequence[int]) -> None:
        """Connect to the other instances of a term, who do the same; no step may run.

        seats: with this one. Raises ExchangeTimeout or PeerLost, which name the peer, or TermOver.
        """
        self.leave()
        # What came for a step that was abandoned would pass for what this term's peers send.
        self._buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True).zero_()
        peers = [seat for seat in seats if seat != self._instance]
        if peers:
            self._buffer.connect_ranks(peers)
            self._connected = peers
        # It waits for the device too, whose mask steps on other streams read.
        self.check()

    def leave(self) -> None:
        """Disconnect from, and so mask, all instances; no step may run. Idempotent."""
        if self._connected:
            # The package removes the last ones of its list only: all of them always are.
            self._buffer.disconnect_ranks(self._connected)
            self._connected = []
        self._metadata.leave()

    def check(self) -> None:
        """Raise ExchangeTimeout, with the peer, or TermOver, if a wait for a peer was given up.

        The kernel silently masked the peer. Waits for a launch and a copy.
        """
        if not self._connected:
            return
        self._buffer.query_mask_buffer(self._masked_N)
        is_masked = self._masked_N.tolist()
        given_up = [peer for peer in self._connected if is_masked[peer]]
        if given_up:
            self._term.check()
            raise ExchangeTimeout(
                f"instance {self._instance} waited for rows of instance {given_up[0]} in a mixture "
                "of experts for exchange_timeout_ms",
                given_up[0],
            )

    def _numbered(self, expert_BK: Tensor) -> Tensor:
        return self._number_E[expert_BK]


def open_nixl_ep(
    segments: Segments,
    instance: int,
    cluster: ClusterConfig,
    model: ModelConfig,
    limits: LimitsConfig,
    step: GpuStep,
    weights: GpuWeights,
) -> NixlEpExchange:
    """Let a step's mixtures go by NIXL-EP."""
    own = NixlEpExchange(segments, instance, cluster, model, limits, step.logits.device)
    step.mixture, step.check_mixture = GpuMixtures(own, model, weights), own.check
    return own


class _TermMetadata:
    """A TCPStore for NIXL-EP: metadata in descriptions of segments, so waits end with the term."""

    def __init__(
        self, segments: Segments, instance: int, num_instances: int, limits: LimitsConfig
    ) -> None:
        self._segments, self._instance = segments, instance
        self._num_instances, self._limits = num_instances, limits
        self._own: OwnedSegment | None = None

    def set(self, key: str, value: bytes) -> None:
        num_bytes = self._num_instances * _WORD_BYTES
        self._own = self._segments.own(_KIND, self._instance, value.hex(), num_bytes)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Do nothing: multi_get waits, with our own limit."""

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for the metadata of these instances, and until each has read that of all.

        Then nobody needs this process while the package connects under Python's lock. Raises
        ExchangeTimeout, PeerLost or TermOver.
        """
        assert self._own is not None, "set comes first"
        deadline = time.monotonic() + self._limits.start_timeout_ms / 1000
        writer, peers = f"instance {self._instance}", [int(key.rpartition("/")[2]) for key in keys]
        with ExitStack() as attached:
            segments: list[Segment] = []
            for peer in peers:
                segments.append(
                    self._segments.attach(_KIND, peer, writer, self._limits, _left_ms(deadline))
                )
                attached.callback(segments[-1].close)
            for segment in segments:
                segment.publish(_word(segment, self._instance), 1)
            for peer, segment in zip(peers, segments, strict=True):
                self._await_reader(peer, segment, deadline)
        return [bytes.fromhex(segment.description) for segment in segments]

    def _await_reader(self, peer: int, segment: Segment, deadline: float) -> None:
        assert self._own is not None
        term, limits = self._segments.term, self._limits
        has_read = _word(self._own, peer).wait_at_least(
            1,
            _left_ms(deadline),
            limits.tick_ms,
            lambda: not term.is_over and segment.owner_is_alive(),
        )
        if has_read is None:
            term.check()
            if not segment.owner_is_alive():
                raise PeerLost(f"instance {peer} is gone before it has connected", peer)
            raise ExchangeTimeout(
                f"instance {peer} has not met all others in {limits.start_timeout_ms} ms", peer
            )

    def delete_key(self, key: str) -> None:
        """Do nothing: a peer may still read it, and `leave` withdraws it."""

    def leave(self) -> None:
        if self._own is not None:
            self._own.close()
            self._own = None


def _word(segment: Segment | OwnedSegment, instance: int) -> Word:
    """Return an instance's word in a segment: it has read all metadata."""
    return Word(segment.memory, segment.data_offset + instance * _WORD_BYTES)


def _left_ms(deadline: float) -> float:
    return max(0.0, (deadline - time.monotonic()) * 1000)


def nixl_ep_obstacle(
    dtype: torch.dtype, model: ModelConfig, num_instances: int, max_rows: int
) -> str:
    """Return why NIXL-EP cannot serve on GPUs here; empty if it can."""
    obstacle = _package_obstacle() or rows_obstacle(
        dtype, model, _HIDDEN_SIZES, _MAX_EXPERTS_PER_TOKEN, max_rows * num_instances
    )
    if obstacle:
        return obstacle
    if num_instances > _NODE and num_instances % _NODE:
        return f"of more than {_NODE} instances it takes multiples of {_NODE}, not {num_instances}"
    return ""


def _package_obstacle() -> str:
    spec = next(filter(None, map(find_spec, _PACKAGES)), None)
    if spec is None or spec.origin is None:
        return "NIXL-EP is not installed (pip install '.[nixl]')"
    version = "".join(torch.__version__.split(".")[:2])
    names = [path.name for path in sorted(Path(spec.origin).parent.glob("*_torch*.so"))]
    if any(f"_torch{version}." in name for name in names):
        return ""
    return f"{spec.name} has no build for torch {torch.__version__}, only {', '.join(names)}"
