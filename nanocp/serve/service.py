"""A whole service: front ends and controller in this process, and the members that it starts."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from control_plane.coordinator.flights.decode import DecodeFlights
from control_plane.coordinator.flights.flights import Flights
from control_plane.coordinator.flights.pipeline import PipelineFlights
from control_plane.coordinator.members.members import Members
from control_plane.coordinator.members.seats import SeatsNow
from control_plane.frontend.access.api_keys import OperatorKeys
from control_plane.frontend.access.tls import check_tls
from control_plane.frontend.front_end import FrontEnd
from control_plane.frontend.http.served_model import open_model
from control_plane.frontend.http.server import HttpServer
from control_plane.launchers.launcher import Launcher
from control_plane.launchers.processes import ProcessLauncher
from control_plane.observe.cluster_view import ClusterView
from control_plane.observe.metrics.registry import Metrics
from control_plane.observe.observer import Observer
from control_plane.observe.status_server import (
    ABORT_PATH,
    CONFIG_PATH,
    EXPERTS_PATH,
    LAYOUT_PATH,
    SEATS_PATH,
    StatusServer,
    metrics_page,
)
from control_plane.observe.tracing import TracedObserver, Tracing
from control_plane.ports.addresses import advertised_host, join
from control_plane.ports.members_port import MemberSecrets
from control_plane.shell.controller import Controller
from data_plane.member.lifetime import MemberSpec, SpareSpec
from data_plane.transport.shared_memory import sweep_stale, unlink_cluster
from nanocp.config.whole import Config
from nanocp.config.yaml import config_yaml
from nanocp.serve.changes import answer_abort, answer_config, answer_layout, answer_seats
from nanocp.serve.experts import answer_experts
from nanocp.serve.front_end_process import FRONT_END_COMMAND
from nanocp.serve.front_end_processes import FrontEndProcesses
from nanocp.serve.garbage import freeze_long_lived
from nanocp.serve.launcher_pipe import PipedLauncher, living_of
from nanocp.serve.member_processes import MemberProcesses
from nanocp.serve.node_processes import NodeProcesses, carrier_address, nodes_of, remove_sockets
from nanocp.serve.served import PREFILL_PLANNER, settled, why_experts_stay
from nanocp.serve.served import Served as Served
from nanocp.serve.served import open_checkpoint as open_checkpoint
from nanocp.serve.spares import Spares
from nanocp.values.members import PREFILL, PULLER, Member

logger = logging.getLogger(__name__)

_LEAVE_TIMEOUT_S = 10.0
_ANSWER_S = 10.0
_TERMS_OF_A_CONTROLLER = 1_000_000
"""More than one has, so terms of the next one are later."""
_NEVER_SERVED_TIMEOUT_S = 1.0
"""Longest wait for members that never served to leave: some cannot read that they should."""


def member_environment(config: Config) -> dict[str, str]:
    """Environment variables for members before they import torch."""
    threads = str(config.data_plane.threads_per_instance)
    environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    # Torch would keep a program of each of the latest 1024 shapes: a prefill's prompts have all
    # lengths, and its memory tripled.
    kept = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    environment[kept] = os.environ.get(kept, "64")
    if config.data_plane.device == "cuda":
        # Ray would show each actor one GPU, as number 0.
        environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
    if config.data_plane.has_nvshmem:
        # Members of other machines must go by the same transport.
        own = {name: value for name, value in os.environ.items() if name.startswith("NVSHMEM_")}
        environment |= own
    return environment


class Service:
    """A service: start, address, drain, stop.

    One thread calls it. The configuration's limits bound every wait.
    """

    def __init__(
        self,
        config: Config,
        served: Served,
        launcher: Launcher,
        front_end_launcher: ProcessLauncher | PipedLauncher | None = None,
        cluster_id: str = "",
        controller_number: int = 1,
    ) -> None:
        """Prepare the service; nothing runs before `start`.

        front_end_launcher: of front ends as processes. cluster_id: of a service that lost its
        controller. controller_number: from 1. Raises ValueError for an unknown policy, unreadable
        files of the checkpoint, and traces without their packages.
        """
        config = settled(config, served, controller_number)
        check_tls(config.service)
        self.cluster_id = cluster_id or secrets.token_hex(4)
        vllm_model = served.limits.model if config.service.vllm_metrics else None
        self.metrics = Metrics(config.cluster, config.scheduler, config.prefill, vllm_model)
        self.launcher = launcher
        self._config = config
        self._served = served
        self._has_served = False
        self._front_end_launcher = front_end_launcher or ProcessLauncher(FRONT_END_COMMAND, {})
        self._living: Mapping[Member, MemberSpec] = living_of(launcher)
        view = ClusterView(
            config.cluster,
            config.scheduler.policy,
            self.metrics.requests.inter_token_sums,
            self.metrics.engines.rows,
            self.metrics.recovery.row,
        )
        observer: Observer = self.metrics.requests
        self._tracing: Tracing | None = None
        if config.service.otlp_traces_endpoint:
            self._tracing = Tracing(config.service.otlp_traces_endpoint, view.timeline_of)
            observer = TracedObserver(observer, self._tracing)
        self._member_secrets = MemberSecrets()
        for spec in self._living.values():
            self._member_secrets.take(spec.name, spec.secret)
        self._nodes = NodeProcesses(launcher, lambda node: self._spec(node, term=1))
        self._front_ends = self._make_front_ends(observer, view, controller_number)
        self._controller_address = ""
        self._status = self._make_status(view)
        self._controller = Controller(
            config,
            MemberProcesses(launcher, self._spec, self.cluster_id),
            self._member_secrets,
            self._front_ends.events,
            self.metrics,
            view,
            self._make_flights,
            None if config.cluster.layout == "pipeline" else served.num_experts,
        )
        self._spares = Spares(
            launcher, config.cluster.spares, self._spare_spec, lambda: self.is_whole
        )
        self.metrics.recovery.num_spares = lambda: self._spares.num_ready
        self._controller.members.takes_over = controller_number > 1
        # A term of this controller is later than any of an earlier one.
        self._controller.members.terms.number = (controller_number - 1) * _TERMS_OF_A_CONTROLLER
        self.addresses: tuple[str, ...] = ()
        """host:port of each front end's gRPC API."""
        self.http_addresses: tuple[str, ...] = ()
        """host:port of each front end's HTTP API."""
        self.seats_changed: Callable[[tuple[int, ...]], None] = lambda seats: None
        """Called with wanted seats once they serve."""
        self.metrics_address = ""
        """host:port of /metrics and /cluster."""

    @property
    def address(self) -> str:
        """host:port of the first front end's gRPC API."""
        return self.addresses[0]

    @property
    def http_address(self) -> str:
        """host:port of the first front end's HTTP API."""
        return self.http_addresses[0]

    @property
    def http_scheme(self) -> str:
        """https with a certificate, else http."""
        return "https" if self._config.service.ssl_certfile else "http"

    @property
    def failure(self) -> Future[str]:
        """Done when the service can no longer serve, with the reason as a sentence."""
        return self._controller.members.end.failure

    def start(
        self,
        progress: Callable[[str], None],
        loading: Callable[[Member, int], None] = lambda member, percent: None,
    ) -> dict[Member, tuple[str, ...]]:
        """Bind the ports, start every member, and wait until all are ready.

        Returns each member's choices at start-up. `progress` gets each step as it begins, `loading`
        a member's loaded percentage, from any thread.

        Raises OSError (a port), StartError or RuntimeError (a member); call `stop` after that too.
        """
        service = self._config.service
        progress("opening ports")
        metrics_port = self._status.serve(service.host, service.metrics_port)
        self.metrics_address = join(advertised_host(service), metrics_port)
        self._front_ends.start()
        self.addresses = self._front_ends.addresses
        self.http_addresses = self._front_ends.http_addresses
        self._controller_address = self._controller.start(progress, loading)
        sweep_stale()
        members = self._controller.members.expected
        progress(f"starting {len(members)} processes; they load the model and prepare graphs")
        carriers = nodes_of(self._config.cluster) if service.node_streams else []
        specs = {
            member: self._spec(member, self.term + 1)
            for member in (*carriers, *members)
            if member not in self._living
        }
        self.launcher.start(specs, self._exited)
        ready = self._controller.members.start.wait()
        freeze_long_lived()
        self._has_served = True
        self._front_ends.open(self._controller, lambda: self.metrics.scheduling.load)
        self._spares.start()
        return ready

    @property
    def num_open(self) -> int:
        """Requests that have not ended; each choice counts."""
        return self._front_ends.num_open

    def drain(self, report: Callable[[int, float], None] = lambda num_open, left_s: None) -> bool:
        """Refuse new requests and let open ones end, as FrontEnd.drain; True if all have ended."""
        return self._controller.is_planning and self._front_ends.drain(report)

    @property
    def term(self) -> int:
        """The term that serves, or the next one while it is joined."""
        return self._controller.members.terms.number

    def want_seats(self, seats: Sequence[int] | None, by: str = "somebody") -> SeatsNow:
        """Let only these instances serve, None: as now; returns once they do.

        Raises ValueError if they cannot, RuntimeError if the change failed without effect,
        TimeoutError if it takes longer: it goes on (see Controller.want_seats).
        """
        if not self._has_served:
            raise ValueError("the service is starting")
        asked = self._controller.want_seats(seats, by)
        if seats is None:
            return asked.result(_ANSWER_S)
        try:
            now = asked.result(self._config.limits.longest_change_s + _ANSWER_S)
        except TimeoutError:
            self.seats_changed(tuple(seats))
            raise
        self.seats_changed(tuple(seats))
        return now

    def undo_seats(self) -> SeatsNow:
        """Undo the pending change of seats. Raises ValueError if none is."""
        now = self._controller.undo_seats().result(_ANSWER_S)
        self.seats_changed(now.wanted)
        return now

    @property
    def num_ready_spares(self) -> int:
        """Spares that could take a seat now."""
        return self._spares.num_ready

    @property
    def is_whole(self) -> bool:
        """True if a term serves with all wanted seats."""
        try:
            now = self.want_seats(None)
        except (RuntimeError, TimeoutError):
            return False
        return now.is_serving and not now.starting

    def want_layout(self, split: Sequence[int] | None) -> list[dict[str, int]]:
        """Set the layers of a pipeline's stages, None: as now; returns the layout.

        Raises as `want_seats` does.
        """
        if split is not None:
            if not self._has_served:
                raise ValueError("the service is starting")
            timeout_s = self._config.limits.longest_change_s + _ANSWER_S
            self._controller.want_layout(list(split)).result(timeout_s)
        return self._controller.stages()

    def regroup(self) -> None:
        """Begin another term without a loss, for tests and benchmarks."""
        self._controller.regroup()

    def stop(self, reason: str = "the service is stopping") -> None:
        """Stop every process and end open requests with UNAVAILABLE.

        Leaves nothing in shared memory. Idempotent.
        """
        self._nodes.stop()
        self._spares.stop()
        # The members first: then their last tokens still find the front end.
        self._controller.leave(reason)
        killed = self.launcher.stop(
            _LEAVE_TIMEOUT_S if self._has_served else _NEVER_SERVED_TIMEOUT_S
        )
        if killed and self._has_served:
            logger.warning(
                "killed after %.0f s, in which they did not leave: %s",
                _LEAVE_TIMEOUT_S,
                ", ".join(map(str, killed)),
            )
        self._controller.stop()
        self._front_ends.stop(reason)
        unlink_cluster(self.cluster_id)
        remove_sockets(self.cluster_id, self._config.cluster)
        self._status.close()
        if self._tracing is not None:
            self._tracing.stop()
            self._tracing = None

    def _make_front_ends(
        self, observer: Observer, view: ClusterView, controller_number: int
    ) -> FrontEnd | FrontEndProcesses:
        config, served, service = self._config, self._served, self._config.service
        metrics = partial(metrics_page, self.metrics.registry)
        # In this process too: a checkpoint that cannot be served is refused before anything starts.
        model = open_model(
            served.checkpoint,
            service.served_model_name,
            service.tool_call_parser,
            service.reasoning_parser,
        )
        if service.has_front_end_processes:
            return FrontEndProcesses(
                config,
                served,
                self._member_secrets,
                observer,
                {"metrics": metrics, "snapshot": view.snapshot_json},
                self._fail,
                self._front_end_launcher,
                controller_number,
            )
        num, page, ended = config.cluster.num_instances, view.snapshot_json, observer.http_responded
        http = HttpServer(service, config.limits, num, model, metrics, page, ended)
        return FrontEnd(
            config, served.tokenizer, served.limits, self._member_secrets, observer, http
        )

    def _make_status(self, view: ClusterView) -> StatusServer:
        def as_yaml(log_level: str) -> str:
            service = replace(self._config.service, log_level=log_level)
            return config_yaml(replace(self._config, service=service), {})

        return StatusServer(
            self.metrics.registry,
            view.snapshot_json,
            OperatorKeys(self._config.service),
            view.requests_json,
            {
                SEATS_PATH: partial(
                    answer_seats,
                    self.want_seats,
                    self.undo_seats,
                    lambda: self.launcher.end_spares(),
                    lambda: (self._config.cluster.num_instances, self.num_ready_spares),
                ),
                LAYOUT_PATH: partial(answer_layout, self.want_layout),
                EXPERTS_PATH: partial(
                    answer_experts,
                    why_experts_stay(self._config, self._served.num_experts),
                    self._config.cluster.expert_load_mb_per_s,
                    lambda: self._controller.experts() if self._has_served else None,
                ),
                ABORT_PATH: partial(
                    answer_abort, lambda name: self._controller.end_requests(name).result(_ANSWER_S)
                ),
                CONFIG_PATH: partial(answer_config, as_yaml),
            },
        )

    def _fail(self, message: str) -> None:
        if not self.failure.done():
            self.failure.set_result(message)

    def _spare_spec(self, name: str) -> SpareSpec:
        served = self._served
        config = self._config_of(Member("instance"))
        return SpareSpec(name, served.spare_factory, config, served.checkpoint)

    def _make_flights(self, members: Members) -> Flights:
        config = self._config
        if config.cluster.layout == "pipeline":
            num_layers = self._served.num_layers
            return PipelineFlights(config, members, num_layers, self.metrics.stages)
        recomputes = config.prefill.pull.on_failure == "recompute"
        return DecodeFlights(config.cluster, config.scheduler, members, self.metrics, recomputes)

    def _factory(self, member: Member) -> str:
        if member == PULLER:
            return self._served.reader_factory
        if member != PREFILL:
            return self._served.instance_factory
        engines = self._config.prefill.engines
        return self._served.probe_factory if engines else self._served.prefill_factory

    def _config_of(self, member: Member) -> Config:
        """The configuration without keys that the member must not see."""
        config = self._config
        config = replace(config, service=replace(config.service, api_keys=()))
        if member == PREFILL:
            return config
        return replace(config, prefill=replace(config.prefill, api_key=""))

    def _exited(self, member: Member, number: int, message: str) -> None:
        is_node = member.kind == "node"
        (self._nodes.exited if is_node else self._controller.member_exited)(member, number, message)

    def _spec(self, member: Member, term: int) -> MemberSpec:
        served, number = self._served, member.instance
        carrier = ""
        if self._config.service.node_streams and number is not None:
            is_node = member.kind == "node"
            node = number if is_node else self._config.cluster.node_of(number)
            carrier = carrier_address(self.cluster_id, node)
        return MemberSpec(
            factory=self._factory(member),
            config=self._config_of(member),
            cluster_id=self.cluster_id,
            controller=self._controller_address,
            secret=self._member_secrets.issue(str(member)),
            checkpoint=served.checkpoint,
            instance=number if member.kind == "instance" else None,
            term=term,
            node=number if member.kind == "node" else None,
            carrier=carrier,
            planner=PREFILL_PLANNER if member == PREFILL else "",
            is_puller=member == PULLER,
        )
