"""Members' processes: placed, started, watched and stopped, by Ray or as plain subprocesses.

Enters: a spec for each member (picklable, unread here). Leaves: a call when a member's process has
ended. Does not know: what a member does, the controller.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, Protocol

from control_plane.member_streams import Member

_RELEASE_TIMEOUT_S = 5.0
"""Longest wait for the nodes' shared memory to be cleared."""
_KILL_TIMEOUT_S = 5.0
"""A process that was killed is gone after this long."""

Exited = Callable[[Member, int, str], None]
"""Called with a member, the number of its process, and how that ended. From any thread; also after
a member left because it was asked to."""


class Launcher(Protocol):
    """Starts every member of one cluster, and others in place of those that were lost."""

    def start(self, specs: Mapping[Member, object], exited: Exited) -> None:
        """Start a process for each (member, spec): number 0 of each member.

        Raises OSError or RuntimeError if one cannot be started.
        """

    def start_one(self, member: Member, number: int, spec: object) -> None:
        """Start another process for a member whose process is gone, where that one was.

        From any thread. Raises OSError or RuntimeError, also after `stop`.
        """

    def stop(self, timeout_s: float) -> Sequence[Member]:
        """Wait for members that were asked to leave, kill the others, release everything.

        Returns the members that were killed, where that is known. A second call does nothing.
        """

    def kill(self, member: Member) -> None:
        """End a member's latest process at once, as a failure would, even if it is stopped."""


class ProcessLauncher:
    """Plain subprocesses of this machine: no Ray."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Processes of `command`, which reads a member's pickled spec from standard input.

        The member's name is its last argument: the list of processes shows who is who.
        """
        self._command = command
        self._environment = {**os.environ, **environment}
        self._processes: dict[Member, subprocess.Popen[bytes]] = {}
        """The latest of each member. Earlier ones were killed."""
        self._watchers: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_stopped = False

    def start(self, specs: Mapping[Member, object], exited: Exited) -> None:
        """See Launcher.start."""
        self._exited = exited
        for member, spec in specs.items():
            self.start_one(member, 0, spec)

    def start_one(self, member: Member, number: int, spec: object) -> None:
        """See Launcher.start_one."""
        with self._lock:
            if self._is_stopped:
                raise RuntimeError("the service is stopping")
            # A session of its own: a Ctrl-C in the terminal is for the service, which then drains.
            process = subprocess.Popen(
                [*self._command, str(member)],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environment,
                start_new_session=True,
            )
            self._processes[member] = process
        assert process.stdin is not None and process.stderr is not None
        # Whoever dies before reading its spec is noticed as any other.
        with suppress(BrokenPipeError), process.stdin:
            pickle.dump(spec, process.stdin)
        watcher = threading.Thread(
            target=self._watch,
            args=(member, number, process, process.stderr),
            name=f"watch {member}",
            daemon=True,
        )
        watcher.start()
        self._watchers = [each for each in self._watchers if each.is_alive()] + [watcher]

    def stop(self, timeout_s: float) -> Sequence[Member]:
        """See Launcher.stop."""
        with self._lock:
            self._is_stopped = True
        deadline = time.monotonic() + timeout_s
        killed = []
        for member, process in self._processes.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                killed.append(member)
        for watcher in self._watchers:
            watcher.join(_KILL_TIMEOUT_S)
        return killed

    def kill(self, member: Member) -> None:
        """See Launcher.kill."""
        self._processes[member].kill()

    def pid(self, member: Member) -> int:
        """The member's latest process."""
        return self._processes[member].pid

    def _watch(
        self, member: Member, number: int, process: subprocess.Popen[bytes], errors: IO[bytes]
    ) -> None:
        last_line = ""
        with errors:
            for raw in errors:
                line = raw.decode(errors="replace").rstrip()
                last_line = line or last_line
                print(line, file=sys.stderr)
        how = _describe_exit(process.wait())
        self._exited(member, number, f"{how}: {last_line}" if last_line else how)


@dataclass(frozen=True, slots=True)
class NodeGroups:
    """Which members share a node, in a Ray of several nodes."""

    groups: Sequence[Sequence[Member]]
    """The members that share a node; every group gets another one. Members of no group stay on this
    node."""
    resources: Mapping[str, float]
    """What a member of a group takes of its node, by Ray's names: CPU, GPU and others."""
    release: Any
    """A Ray function of a spec, which runs on a node when its members are gone."""
    timeout_s: float
    """Longest wait for nodes that have room."""


class RayLauncher:
    """Actors of a Ray cluster: one of this machine's own, or the one at `address`."""

    def __init__(
        self,
        actor: Any,
        address: str | None,
        environment: Mapping[str, str],
        nodes: NodeGroups | None = None,
    ) -> None:
        """`actor` is a Ray actor class whose instances have `run`.

        address: None starts a local cluster. nodes: None puts every member on this node.
        """
        self._actor = actor
        self._nodes = nodes
        self._group: Any = None
        """Ray's placement group."""
        self._releases: list[tuple[Any, object]] = []
        """For each node: where to run `release`, and a spec of a member there."""
        self._address = address
        self._environment = dict(environment)
        self._actors: dict[Member, Any] = {}
        """The latest of each member. Earlier ones were killed."""
        self._options: dict[Member, dict[str, Any]] = {}
        """Where the actor of each member runs."""
        self._watchers: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_stopped = False

    def start(self, specs: Mapping[Member, object], exited: Exited) -> None:
        """See Launcher.start. From the main thread."""
        try:
            self._start(specs, exited)
        except (
            Exception
        ) as error:  # No narrower class: Ray itself raises this one if its processes are late.
            raise RuntimeError(f"Ray does not start: {error}") from error

    def _start(self, specs: Mapping[Member, object], exited: Exited) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        on_sigterm = signal.getsignal(signal.SIGTERM)
        # By default Ray's workers yield to every other process of the machine, and a step waits for
        # the slowest.
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init(
            address=self._address or "local",
            include_dashboard=False if self._address is None else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        # Ray puts a handler of its own in its place, which exits without a word.
        signal.signal(signal.SIGTERM, on_sigterm)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        # No CPU is asked for: instances share cores as the operator decides, and four of them fit
        # two cores.
        unplaced = {"num_cpus": 0, "scheduling_strategy": here}
        options = self._place(self._nodes, specs) if self._nodes is not None else {}
        self._options = {member: options.get(member, unplaced) for member in specs}
        self._exited = exited
        for member, spec in specs.items():
            self.start_one(member, 0, spec)

    def start_one(self, member: Member, number: int, spec: object) -> None:
        """See Launcher.start_one."""
        with self._lock:
            if self._is_stopped:
                raise RuntimeError("the service is stopping")
            actor = self._actor.options(
                **self._options[member], runtime_env={"env_vars": self._environment}
            )
            self._actors[member] = actor.remote(spec)
            run = self._actors[member].run.remote()
        watcher = threading.Thread(
            target=self._watch, args=(member, number, run), name=f"watch {member}", daemon=True
        )
        watcher.start()
        self._watchers = [each for each in self._watchers if each.is_alive()] + [watcher]

    def _watch(self, member: Member, number: int, run: Any) -> None:
        import ray

        try:
            ray.get(run)
        except Exception as error:
            self._exited(member, number, _describe_ray_error(error))
        else:
            self._exited(member, number, "its actor left")

    def _place(
        self, nodes: NodeGroups, specs: Mapping[Member, object]
    ) -> dict[Member, dict[str, Any]]:
        """Wait until Ray has room for all members of a group; return each one's options.

        Resources are reserved as one bundle for each node.
        """
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundles = [
            {name: number * len(group) for name, number in nodes.resources.items()}
            for group in nodes.groups
        ]
        self._group = placement_group(bundles, strategy="STRICT_SPREAD")
        if not self._group.wait(nodes.timeout_s):
            have = ", ".join(
                f"{node['NodeManagerAddress']} ({_quantities(node['Resources'])})"
                for node in ray.nodes()
                if node["Alive"]
            )
            need = "; ".join(sorted({_quantities(bundle) for bundle in bundles}))
            raise RuntimeError(
                f"no place for the instances in {nodes.timeout_s:.0f} s: they need {len(bundles)} "
                f"nodes with {need} "
                f"free each; Ray has {have}. Add nodes, or put more instances on each "
                "(cluster.instances_per_node)"
            )
        options: dict[Member, dict[str, Any]] = {}
        custom = {
            name: number for name, number in nodes.resources.items() if name not in ("CPU", "GPU")
        }
        taken = {
            "num_cpus": nodes.resources.get("CPU", 0),
            "num_gpus": nodes.resources.get("GPU", 0),
        }
        for index, group in enumerate(nodes.groups):
            strategy = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            )
            self._releases.append((strategy, specs[group[0]]))
            options[Member("node", index)] = {"num_cpus": 0, "scheduling_strategy": strategy}
            for member in group:
                options[member] = {**taken, "resources": custom, "scheduling_strategy": strategy}
        return options

    def stop(self, timeout_s: float) -> Sequence[Member]:
        """See Launcher.stop. Every actor is killed, also one whose member has left."""
        import ray

        with self._lock:
            self._is_stopped = True
        self._join_watchers(timeout_s)
        for member in self._actors:
            self.kill(member)
        self._join_watchers(_KILL_TIMEOUT_S)
        self._actors.clear()
        self._release_nodes()
        ray.shutdown()
        return ()

    def _join_watchers(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for watcher in self._watchers:
            watcher.join(max(0.0, deadline - time.monotonic()))

    def _release_nodes(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        if self._nodes is None or self._group is None or not ray.is_initialized():
            return
        release = self._nodes.release
        calls = [
            release.options(scheduling_strategy=where).remote(spec)
            for where, spec in self._releases
        ]
        self._releases.clear()
        if calls:
            # A node that is gone has nothing left to release, and never answers.
            ray.wait(calls, num_returns=len(calls), timeout=_RELEASE_TIMEOUT_S)
        remove_placement_group(self._group)
        self._group = None

    def kill(self, member: Member) -> None:
        """See Launcher.kill."""
        import ray

        ray.kill(self._actors[member])


def _quantities(resources: Mapping[str, float]) -> str:
    """`2 CPU, 1 GPU`; of Ray's own names only those that one asks for."""
    asked = {name: number for name, number in resources.items() if name in ("CPU", "GPU")}
    return ", ".join(f"{number:g} {name}" for name, number in sorted(asked.items())) or "no CPU"


def _describe_ray_error(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0] if lines else ''}"


def _describe_exit(status: int) -> str:
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process ended with status {status}"
