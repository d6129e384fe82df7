"""A member as a Ray actor: the only file of the data plane that knows Ray.

Ray places, starts, watches and stops members; nothing of a step passes through it.
"""

from __future__ import annotations

from pathlib import Path

import ray

from data_plane.member.lifetime import Make, MemberSpec, SpareSpec
from data_plane.programs.process import run_member
from data_plane.transport.shared_memory import unlink_cluster
from nanocp.logs import configure


@ray.remote(max_restarts=0, max_task_retries=0)
class MemberActor:
    """Runs a member. Ray never restarts it: the controller chooses its replacement."""

    def __init__(self) -> None:
        self._make: Make | None = None

    def prepare(self, spec: SpareSpec) -> None:
        """Load all that no instance owns, once, for a later `run`."""
        if self._make is None:
            configure(spec.config.service.log_format, spec.config.service.log_level, "spare")
            self._make = spec.prepare()

    def run(self, spec: MemberSpec) -> None:
        """Run the member until the controller asks for a shutdown; other threads answer Ray."""
        configure(spec.config.service.log_format, spec.config.service.log_level, spec.name)
        run_member(spec, self._make)


def _release(spec: MemberSpec) -> None:
    unlink_cluster(spec.cluster_id)
    if spec.carrier:
        Path(spec.carrier.removeprefix("unix:")).unlink(missing_ok=True)


release_node = ray.remote(num_cpus=0, max_retries=0)(_release)
