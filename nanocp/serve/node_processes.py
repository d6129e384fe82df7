"""The processes that carry the streams of the nodes' instances, and others in their place.

Enters: a launcher, a spec for each node. Leaves: processes that are started again when they end,
until the service stops. Does not know: streams, instances that lose theirs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir

from control_plane.launchers.launcher import Launcher
from nanocp.config.cluster import ClusterConfig
from nanocp.values.members import Member

logger = logging.getLogger(__name__)

_PAUSE_S = 0.5
"""Pause before a process takes the place of another, which may end at once for the same reason."""


def nodes_of(cluster: ClusterConfig) -> list[Member]:
    """The nodes of a cluster, each of which has a process for its streams."""
    return [Member("node", node) for node in range(cluster.node_of(cluster.num_instances - 1) + 1)]


def carrier_address(cluster_id: str, node: int) -> str:
    """Where the process of a node listens, on that node: the path of a socket, for gRPC."""
    return f"unix:{Path(gettempdir()) / f'nanocp-{cluster_id}-node-{node}.sock'}"


def remove_sockets(cluster_id: str, cluster: ClusterConfig) -> None:
    """Remove what processes that were killed have left on this machine."""
    for node in nodes_of(cluster):
        path = carrier_address(cluster_id, node.instance or 0).removeprefix("unix:")
        Path(path).unlink(missing_ok=True)


class NodeProcesses:
    """Starts a node's process again. Used from the threads of a launcher."""

    def __init__(self, launcher: Launcher, spec: Callable[[Member], object]) -> None:
        """spec: of a node's process; that of an earlier one is void."""
        self._launcher = launcher
        self._spec = spec
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Start no process again. Idempotent."""
        self._stopping.set()

    def exited(self, node: Member, number: int, message: str) -> None:
        """The node's process of this number has ended."""
        if self._stopping.wait(_PAUSE_S):
            return
        logger.warning("%s: %s; another process takes its place", node, message)
        try:
            self._launcher.start_one(node, number + 1, self._spec(node))
        except (OSError, RuntimeError) as error:
            # Its instances cannot come back: recovery_timeout_ms ends the service.
            logger.error("no process could take the place of %s: %s", node, error)
