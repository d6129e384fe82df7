"""Processes that carry the streams of a node's instances, restarted when they end."""

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
"""Pause before a restart: the next process may end at once too."""


def nodes_of(cluster: ClusterConfig) -> list[Member]:
    """Nodes with a process for their streams."""
    return [Member("node", node) for node in range(cluster.node_of(cluster.num_instances - 1) + 1)]


def carrier_address(cluster_id: str, node: int) -> str:
    """The process's socket path on its node, for gRPC."""
    return f"unix:{Path(gettempdir()) / f'nanocp-{cluster_id}-node-{node}.sock'}"


def remove_sockets(cluster_id: str, cluster: ClusterConfig) -> None:
    """Remove sockets of killed processes on this machine."""
    for node in nodes_of(cluster):
        path = carrier_address(cluster_id, node.instance or 0).removeprefix("unix:")
        Path(path).unlink(missing_ok=True)


class NodeProcesses:
    """Restarts a node's process. Used from a launcher's threads."""

    def __init__(self, launcher: Launcher, spec: Callable[[Member], object]) -> None:
        """spec: of a node's process; it voids the earlier one."""
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
