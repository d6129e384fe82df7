"""The fields of every region of a decode step in the exchange, and torch views of them."""

from __future__ import annotations

import warnings

import numpy as np
import torch

from data_plane.model.config import ModelConfig
from data_plane.transport.exchange import (
    Awaited,
    Channel,
    Exchange,
    Field,
    Flags,
    RegionLayout,
    row_bytes,
)
from nanocp.config.cluster import BoundsConfig, ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig


def region_layout(
    cluster: ClusterConfig, data_plane: DataPlaneConfig, model: ModelConfig
) -> RegionLayout:
    """Return the fields of every channel's region: the step's four and the mailbox."""
    # Imported here, because checks on a GPU machine run without protobuf.
    from data_plane.transport.mailbox import mailbox_layout

    return {**step_layout(cluster.bounds, data_plane, model), **mailbox_layout(cluster)}


def step_layout(
    bounds: BoundsConfig, data_plane: DataPlaneConfig, model: ModelConfig
) -> RegionLayout:
    """Return the fields of a region of the four channels of a step."""
    links, heads = bounds.max_links, model.attention.num_heads
    # Without experts nothing is dispatched, but every channel has its regions.
    rows, per_row = (bounds.max_rows, model.num_experts_per_token) if model.num_experts else (1, 1)
    value = "uint16" if data_plane.dtype == "bfloat16" else "float32"
    q_width, res_width = model.attention.wire_widths(data_plane.wire_form)
    return {
        Channel.Q: (
            Field("position", "int64", (links,)),
            Field("live", "bool", (links,)),
            Field("q", value, (links, q_width)),
            Field("kv", value, (links, model.attention.kv_width)),
        ),
        Channel.RES: (
            Field("partial", value, (links, heads, res_width)),
            Field("lse", "float32", (links, heads)),
        ),
        **mixture_layout(rows, per_row, model.hidden_size, value),
    }


def mixture_layout(max_rows: int, per_row: int, hidden_size: int, value: str) -> RegionLayout:
    """Return the fields of a region of a MoE layer's two channels. value: of hidden rows."""
    hidden = Field("hidden", value, (max_rows, hidden_size))
    return {
        Channel.DISPATCH: (
            Field("count", "int32", (1,)),
            Field("number", "int64", (max_rows, per_row)),
            Field("weight", "float32", (max_rows, per_row)),
            hidden,
        ),
        Channel.COMBINE: (hidden,),
    }


class TensorExchange:
    """An Exchange whose regions are torch tensors, with bfloat16 in place of uint16."""

    def __init__(self, exchange: Exchange, layout: RegionLayout, lane: int = 0) -> None:
        """lane: the owner of the regions. Callers name the channels of lane 0."""
        self.exchange = exchange
        self.sent_bytes = dict.fromkeys(Channel, 0)
        """Since the start, by channel."""
        self._lane = lane
        self.attention_epoch = 0
        """Uses in this term, counted by the step."""
        self.moe_epoch = 0
        """Uses in this term, counted by the step."""
        self._row_bytes = row_bytes(layout)
        self._views: dict[tuple[bool, Channel, int, int], dict[str, torch.Tensor]] = {}

    def outgoing(self, channel: Channel, target: int, epoch: int) -> dict[str, torch.Tensor]:
        """Return this instance's region at the target as writable tensors."""
        arrays = self.exchange.outgoing(channel.in_lane(self._lane), target, epoch)
        return self._tensors((True, channel, target, epoch & 1), arrays)

    def put(self, channel: Channel, target: int, epoch: int, num_rows: int) -> None:
        """Publish the region with its first `num_rows` rows."""
        self.exchange.put(channel.in_lane(self._lane), target, epoch, num_rows)
        self.count_sent(channel, num_rows)

    def wait(self, channel: Channel, source: int, epoch: int) -> dict[str, torch.Tensor]:
        """Wait for the source's put and return its region's tensors."""
        arrays = self.exchange.wait(channel.in_lane(self._lane), source, epoch)
        return self._tensors((False, channel, source, epoch & 1), arrays)

    def incoming(self, channel: Channel, source: int, epoch: int) -> dict[str, torch.Tensor]:
        """Return tensors of the source's region, whose put may not be here yet."""
        arrays = self.exchange.incoming(channel.in_lane(self._lane), source, epoch)
        return self._tensors((False, channel, source, epoch & 1), arrays)

    def flags(self, channel: Channel, peer: int, epoch: int) -> Flags:
        """Return the addresses of the flags to and from the peer."""
        return self.exchange.flags(channel.in_lane(self._lane), peer, epoch)

    def count_sent(self, channel: Channel, num_rows: int) -> None:
        """Count rows that compiled code has put."""
        self.sent_bytes[channel] += num_rows * self._row_bytes[channel]

    def awaited(self, channel: Channel, source: int, epoch: int) -> Awaited:
        """Return the put that `wait` with these arguments awaits."""
        return Awaited(channel.in_lane(self._lane), source, epoch)

    def begin_term(self, exchange: Exchange) -> None:
        """Go on with another term's exchange, whose epochs begin at 0."""
        self.exchange = exchange
        self.attention_epoch = self.moe_epoch = 0

    def close(self) -> None:
        """Close the exchange, after the views that keep its mapping open are dropped."""
        # Each is emptied, because kernels may keep one that they know.
        for views in self._views.values():
            views.clear()
        self._views.clear()
        self.exchange.close()

    def _tensors(
        self, key: tuple[bool, Channel, int, int], arrays: dict[str, np.ndarray]
    ) -> dict[str, torch.Tensor]:
        if key not in self._views:
            self._views[key] = {name: _tensor(array) for name, array in arrays.items()}
        return self._views[key]


def _tensor(array: np.ndarray) -> torch.Tensor:
    with warnings.catch_warnings():
        # An incoming region is read-only. torch has no such tensors and warns; nothing here writes
        # to one.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        if array.dtype == np.uint16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)
