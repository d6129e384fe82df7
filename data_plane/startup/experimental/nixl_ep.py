"""Dispatch and combine by NIXL-EP's low-latency kernels, a GpuAllToAll with terms.

Public signatures: tests/harness/gpu_stand_ins/nixl_ep_stand_in.py. All terms share one buffer, for
graphs (docs/decisions/0066). A mask on the device names the unconnected instances, so a lone one
can capture steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from data_plane.model.config import ModelConfig
from data_plane.startup.experimental.gathering import Gathering
from data_plane.startup.experimental.low_latency import LowLatencyExchange, rows_obstacle
from data_plane.transport.exchange import ExchangeTimeout
from data_plane.transport.segments import Segments
from nanocp.config.cluster import ClusterConfig
from nanocp.config.limits import LimitsConfig

_PACKAGES = ("nixl_ep_cu13", "nixl_ep_cu12")
_HIDDEN_SIZES = (2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192)
_MAX_EXPERTS_PER_TOKEN = 16
_NODE = 8
"""From this number of instances on, it must be a multiple of this."""
_KIND = "nixl_ep"


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
        super().__init__(segments, instance, cluster, model, limits, device)
        num_instances = cluster.num_instances
        self._metadata = _TermMetadata(Gathering(segments, _KIND, instance, num_instances, limits))
        package = package or import_module(next(filter(find_spec, _PACKAGES), _PACKAGES[0]))
        buffer_class = package.Buffer
        self._buffer = buffer_class(
            rank=instance,
            low_latency_mode=True,
            tcp_store_group=self._metadata,
            timeout_ms=limits.exchange_timeout_ms,
        )
        num_bytes = buffer_class.get_low_latency_buffer_size_hint(
            self._max_rows, model.hidden_size, num_instances, self._num_numbers
        )
        self._buffer.update_memory_buffers(num_instances, self._num_slots, num_bytes)
        self._connected: list[int] = []
        self._masked_N = torch.zeros(num_instances, dtype=torch.int32, device=device)

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
            self._segments.term.check()
            raise ExchangeTimeout(
                f"instance {self._instance} waited for rows of instance {given_up[0]} in a mixture "
                "of experts for exchange_timeout_ms",
                given_up[0],
            )


class _TermMetadata:
    """A TCPStore for NIXL-EP, so that its waits end with the term."""

    def __init__(self, gathering: Gathering) -> None:
        self._gathering = gathering

    def set(self, key: str, value: bytes) -> None:
        self._gathering.offer(value.hex())

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Do nothing: multi_get waits, with our own limit."""

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Gather, since the package then connects under Python's lock."""
        peers = [int(key.rpartition("/")[2]) for key in keys]
        return [bytes.fromhex(text) for text in self._gathering.gather(peers)]

    def delete_key(self, key: str) -> None:
        """Do nothing: a peer may still read it, and `leave` withdraws it."""

    def leave(self) -> None:
        self._gathering.leave()


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
