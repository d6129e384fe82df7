"""The mailbox: messages of bytes between instances at the edge of a window."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from data_plane.transport.exchange import Channel, Field, RegionLayout
from nanocp.config.cluster import ClusterConfig
from nanocp.wire.rows import max_hand_off_bytes


def mailbox_layout(cluster: ClusterConfig) -> RegionLayout:
    """The mailbox's fields, sized for the most hand-offs of the longest sequence."""
    num_messages = cluster.bounds.max_hand_offs
    num_bytes = max_hand_off_bytes(cluster.max_model_len) + cluster.bounds.max_grammar_bytes
    return {
        Channel.MAILBOX: (
            Field("count", "int32", (1,)),
            Field("length", "int32", (num_messages,)),
            Field("payload", "uint8", (num_messages, num_bytes)),
        ),
    }


def fill_mailbox(region: Mapping[str, np.ndarray], messages: Sequence[bytes]) -> None:
    """Write the messages into an outgoing region."""
    region["count"][0] = len(messages)
    for number, message in enumerate(messages):
        region["length"][number] = len(message)
        region["payload"][number, : len(message)] = np.frombuffer(message, np.uint8)


def mailbox_messages(region: Mapping[str, np.ndarray]) -> Iterator[bytes]:
    """Yield the messages of a region that has come, in the order of writing."""
    for number in range(int(region["count"][0])):
        yield region["payload"][number, : region["length"][number]].tobytes()
