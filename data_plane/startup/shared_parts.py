"""What an instance on the CPU and one on a GPU are started with alike.

Enters: Config. Leaves: parts of an instance, and sentences for an operator. Does not know: which of
the two it is.
"""

from __future__ import annotations

import torch

from data_plane.graph.buckets import BucketTable
from data_plane.kv.frame_pool import FramePool
from data_plane.kv.page_ring import PageRing
from data_plane.kv.peer_rings import PeerRings
from data_plane.transport.nixl import nixl_package
from data_plane.transport.segments import Segments
from nanocp.config import Config


def bucket_table(config: Config) -> BucketTable:
    """Raises ValueError if row_buckets does not end at max_rows."""
    bounds = config.cluster.bounds
    return BucketTable(bounds.max_rows, bounds.max_attention_rows, config.data_plane.row_buckets)


def page_ways(
    config: Config, instance: int, segments: Segments, frames: FramePool
) -> tuple[PageRing | None, PeerRings]:
    """How pages come from prefill, and to and from peers."""
    ring = None
    if not config.prefill.synthetic_kv:
        ring = PageRing.create(segments, instance, config.prefill.ring_pages, frames.page_bytes)
    return ring, PeerRings(
        segments, instance, config.cluster.num_instances, frames.page_bytes, config.limits
    )


def page_choice(config: Config) -> str:
    """For an operator."""
    if config.data_plane.page_backend == "nixl":
        return f"pages: NIXL ({nixl_package()}), as configured"
    return "pages: as the exchange (auto)"


def torch_dtype(config: Config) -> torch.dtype:
    """The dtype of weights, activations and KV."""
    return torch.bfloat16 if config.data_plane.dtype == "bfloat16" else torch.float32
