"""Members as actors of Ray: placed, started, watched and stopped."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from control_plane.launchers.launcher import KILL_TIMEOUT_S, Exited, Launcher, SpareEnded
from nanocp.values.members import Member

_RELEASE_TIMEOUT_S = 5.0
"""Longest wait for the nodes' shared memory to be cleared."""
_TRIES = 3
"""Times that a late local Ray is started."""
_SPARE_LOOK_S = 1.0
"""A spare actor that is dead is noticed after this long."""


@dataclass(frozen=True, slots=True)
class NodeGroups:
    """Members that share nodes, in a Ray of several nodes."""

    groups: Sequence[Sequence[Member]]
    """Members of each node; every group gets another one. Others stay on this node."""
    resources: Mapping[str, float]
    """A member's share of its node, by Ray's names: CPU, GPU and others."""
    release: Any
    """A Ray function of a spec, which runs on a node when its members are gone."""
    timeout_s: float
    """Longest wait for nodes that have room."""


@dataclass(eq=False, slots=True)
class _SpareActor:
    actor: Any
    is_ready: bool = False


class RayLauncher(Launcher):
    """Actors of a Ray cluster: one of this machine's own, or the one at `address`."""

    def __init__(
        self,
        actor: Any,
        address: str | None,
        environment: Mapping[str, str],
        nodes: NodeGroups | None = None,
    ) -> None:
        """actor: a Ray actor class whose instances have `prepare` and `run`, each of a spec.

        address: None starts a local cluster. nodes: None puts every member on this node.
        """
        self._actor = actor
        self._nodes = nodes
        self._group: Any = None
        """Ray's placement group."""
        self._where: list[Any] = []
        """For each node: the options to run `release` there."""
        self._node_specs: dict[int, object] = {}
        """By node: a spec of a member there."""
        self._address = address
        self._environment = dict(environment)
        self._actors: dict[Member, Any] = {}
        """The latest of each member. Earlier ones were killed."""
        self._spares: list[_SpareActor] = []
        self._options: dict[Member, dict[str, Any]] = {}
        """Options with the node of each grouped member's actor."""
        self._elsewhere: dict[str, Any] = {}
        """Where the others run."""
        self._watchers: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_stopped = False

    def start(self, specs: Mapping[Member, object], exited: Exited) -> None:
        """Start the members; only from the main thread."""
        try:
            self._start(specs, exited)
        # No narrower class: Ray itself raises this one if its processes are late.
        except Exception as error:
            raise RuntimeError(f"Ray does not start: {error}") from error

    def _init_ray(self) -> None:
        """Ray's own limit of 30 s for processes is too short on a busy machine."""
        import ray

        for number in range(_TRIES):
            try:
                ray.init(
                    address=self._address or "local",
                    include_dashboard=False if self._address is None else None,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
                return
            except Exception as error:
                ray.shutdown()
                if number == _TRIES - 1 or "timed out" not in str(error):
                    raise

    def _start(self, specs: Mapping[Member, object], exited: Exited) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        on_sigterm = signal.getsignal(signal.SIGTERM)
        # By default Ray's workers yield to every other process of the machine, and a step waits for
        # the slowest.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # Since 2.56 it ends all workers of a group when memory is short: a node's instances.
        os.environ.setdefault("RAY_worker_killing_policy_by_group", "true")
        self._init_ray()
        # Ray puts a handler of its own in its place, which exits without a word.
        signal.signal(signal.SIGTERM, on_sigterm)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        # No CPU is asked for: instances share cores as the operator decides, and four of them fit
        # two cores.
        self._elsewhere = {"num_cpus": 0, "scheduling_strategy": here}
        if self._nodes is not None:
            self._options = self._place(self._nodes)
        self._exited = exited
        for member, spec in specs.items():
            self.start_one(member, 0, spec)

    def start_one(self, member: Member, number: int, spec: object) -> None:
        with self._lock:
            if self._is_stopped:
                raise RuntimeError("the service is stopping")
            spare = self._take_spare() if member.kind == "instance" else None
            actor = self._new_actor(member) if spare is None else spare.actor
            self._actors[member] = actor
            for node, group in enumerate(self._nodes.groups if self._nodes else ()):
                if member in group:
                    self._node_specs[node] = spec
            # The list of processes shows who is who.
            run = actor.run.options(name=f"MemberActor {member} serve={os.getpid()}").remote(spec)
            self._watch_by(self._watch, str(member), member, number, actor, run)

    def _new_actor(self, member: Member) -> Any:
        return self._actor.options(
            **self._options.get(member, self._elsewhere),
            runtime_env={"env_vars": self._environment},
        ).remote()

    def _watch_by(self, watch: Callable[..., None], name: str, *arguments: object) -> None:
        watcher = threading.Thread(target=watch, args=arguments, name=f"watch {name}", daemon=True)
        watcher.start()
        self._watchers = [each for each in self._watchers if each.is_alive()] + [watcher]

    def start_spare(self, name: str, spec: object, ended: SpareEnded) -> None:
        """Start a spare; every instance's place must be this node."""
        with self._lock:
            if self._is_stopped:
                raise RuntimeError("the service is stopping")
            if self._nodes is not None:
                raise RuntimeError("spares stand on one node")
            spare = _SpareActor(self._new_actor(Member("instance", 0)))
            self._spares.append(spare)
            self._watch_by(self._watch_spare, name, spare, spec, ended)

    @property
    def spares(self) -> Sequence[bool]:
        with self._lock:
            return [spare.is_ready for spare in self._spares]

    def end_spares(self) -> None:
        import ray

        with self._lock:
            for spare in self._spares:
                ray.kill(spare.actor)
            self._spares.clear()

    def _take_spare(self) -> _SpareActor | None:
        spare = max(self._spares, key=lambda each: each.is_ready, default=None)
        if spare is not None:
            self._spares.remove(spare)
        return spare

    def _watch_spare(self, spare: _SpareActor, spec: object, ended: SpareEnded) -> None:
        import ray

        try:
            while spare in self._spares:
                ray.get(spare.actor.prepare.remote(spec))
                spare.is_ready = True
                time.sleep(_SPARE_LOOK_S)
        except Exception as error:
            with self._lock:
                is_spare = spare in self._spares
                if is_spare:
                    self._spares.remove(spare)
            if is_spare:
                ended(_describe_ray_error(error), spare.is_ready)

    def _watch(self, member: Member, number: int, actor: Any, run: Any) -> None:
        import ray

        try:
            ray.get(run)
        except Exception as error:
            self._exited(member, number, _describe_ray_error(error))
        else:
            # Its process would keep the weights of a drained instance.
            ray.kill(actor)
            self._exited(member, number, "its actor left")

    def _place(self, nodes: NodeGroups) -> dict[Member, dict[str, Any]]:
        """Reserve one bundle of resources for each node; return each member's options."""
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
            self._where.append(strategy)
            options[Member("node", index)] = {"num_cpus": 0, "scheduling_strategy": strategy}
            for member in group:
                options[member] = {**taken, "resources": custom, "scheduling_strategy": strategy}
        return options

    def stop(self, timeout_s: float) -> Sequence[Member]:
        """Kill every actor, also one whose member has left."""
        import ray

        with self._lock:
            self._is_stopped = True
        self.end_spares()
        self._join_watchers(timeout_s)
        for actor in self._actors.values():
            ray.kill(actor)
        self._join_watchers(KILL_TIMEOUT_S)
        with self._lock:
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
            release.options(scheduling_strategy=self._where[node]).remote(spec)
            for node, spec in self._node_specs.items()
        ]
        self._node_specs.clear()
        if calls:
            # A node that is gone has nothing left to release, and never answers.
            ray.wait(calls, num_returns=len(calls), timeout=_RELEASE_TIMEOUT_S)
        remove_placement_group(self._group)
        self._group = None

    def kill(self, member: Member) -> None:
        import ray

        # Under the lock: without its actors Ray may be gone too.
        with self._lock:
            if (actor := self._actors.get(member)) is not None:
                ray.kill(actor)


def _quantities(resources: Mapping[str, float]) -> str:
    asked = {name: number for name, number in resources.items() if name in ("CPU", "GPU")}
    return ", ".join(f"{number:g} {name}" for name, number in sorted(asked.items())) or "no CPU"


def _describe_ray_error(error: Exception) -> str:
    if dead := re.search(r"The actor is dead because (its [^.]+)", str(error)):
        return f"{dead[1].replace('worker ', '')}: it was killed, or it crashed"
    cause = getattr(error, "cause", None) or error
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0] if lines else ''}"
