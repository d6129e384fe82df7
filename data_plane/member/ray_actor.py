"""A member as a Ray actor: the one place of the data plane that knows Ray, and all it does is run
the member.

Enters: a MemberSpec. Leaves: None after a shutdown, the member's exception after anything else.
Does not know: steps. Nothing of a step passes through Ray, which places, starts, watches and stops.
"""

from __future__ import annotations

import logging

import ray

from data_plane.member.lifetime import MemberSpec
from data_plane.member.process import run_member
from data_plane.transport.shared_memory import unlink_cluster


@ray.remote(max_restarts=0, max_task_retries=0)
class MemberActor:
    """Never restarted alone: membership is fixed for the life of a cluster."""

    def __init__(self, spec: MemberSpec) -> None:
        logging.basicConfig(level=logging.WARNING, format=f"%(levelname)s {spec.name}: %(message)s")
        self._spec = spec

    def run(self) -> None:
        """Be the member until the controller says shutdown. Ray's own threads answer Ray meanwhile."""
        run_member(self._spec)


def _release(spec: MemberSpec) -> None:
    """Remove what the cluster has left in the shared memory of the node where this runs."""
    unlink_cluster(spec.cluster_id)


release_node = ray.remote(num_cpus=0, max_retries=0)(_release)
