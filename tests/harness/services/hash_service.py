"""A whole service of HashInstances: real processes, real gRPC, real shared memory, no weights."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from control_plane.frontend.validation import ModelLimits
from control_plane.launchers.launcher import Launcher
from control_plane.launchers.processes import ProcessLauncher
from harness.hash_clusters.hash_parts import FREE_LINKS
from harness.paths import TESTS
from harness.programs.forks import FORKS
from harness.services.hash_members import MODEL
from harness.services.kit import ids_of, started
from nanocp.client import Client
from nanocp.config.cluster import ClusterConfig
from nanocp.config.limits import LimitsConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.service import ServiceConfig
from nanocp.config.whole import Config
from nanocp.parent import PARENT_VARIABLE
from nanocp.serve.service import Served, Service
from nanocp.values.sampling import SamplingParams

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}

PATIENT_MS = 20_000
"""A busy machine may let a process wait for seconds: who stops one sets a shorter time."""
CONFIG = Config(
    cluster=ClusterConfig(num_instances=4, num_frames=64, max_model_len=2048),
    scheduler=SchedulerConfig(
        policy="dual_balanced", cp_degree_buckets=((128, 1), (256, 2)), cp_degree_max=4
    ),
    limits=LimitsConfig(
        tick_ms=50, start_timeout_ms=120_000, drain_timeout_ms=30_000, suspect_ms=PATIENT_MS
    ),
    service=ServiceConfig(grpc_port=0, metrics_port=0, http_port=0, check_invariants=True),
)


def process_launcher() -> ProcessLauncher:
    return ProcessLauncher([sys.executable, "-m", "data_plane.programs.process"], ENVIRONMENT)


class ForkLauncher(ProcessLauncher):
    """Members that are forks of a process that has imported what they run."""

    def __init__(self, config: Config, served: Served) -> None:
        """Launch members of this service."""
        super().__init__((), ENVIRONMENT)
        del self._environment[PARENT_VARIABLE]  # Forks are another process's children.
        factories = [served.instance_factory]
        if config.prefill.engines:
            factories += "data_plane.prefill.external_prefill", served.probe_factory
        elif not config.prefill.synthetic_kv:
            factories.append(served.prefill_factory)
        if config.prefill.pull.allowed:
            factories.append(served.reader_factory)
        self._imports = [factory.partition(":")[0] for factory in factories]

    def _open(self, name: str, stdout: int | None) -> Any:
        pipes = (0, 1, 2) if stdout else (0, 2)
        main = "data_plane.programs.process:main"
        return FORKS.popen(main, [name], self._imports, pipes, self._environment, True)


def forked_service(config: Config, served: Served) -> Service:
    """A service whose members are forks; nothing runs before its `start`."""
    return Service(config, served, ForkLauncher(config, served))


def served(
    instance_factory: str = "harness.services.hash_members:build_instance",
    num_experts: int | None = None,
) -> Served:
    limits = ModelLimits(MODEL.vocab_size, CONFIG.cluster.max_model_len)
    members = "harness.services.hash_members"
    return Served(
        limits, None, Path("no-checkpoint"), instance_factory, f"{members}:build_prefill",
        f"{members}:build_probe", instance_factory.replace(":build_", ":prepare_"), num_experts,
    )  # fmt: skip


@contextlib.contextmanager
def hash_service(
    config: Config = CONFIG,
    instance_factory: str = "harness.services.hash_members:build_instance",
    launcher: Launcher | None = None,
    num_experts: int | None = None,
) -> Iterator[Service]:
    """A service that is started on entry and stopped on exit."""
    hashes = served(instance_factory, num_experts)
    with started(Service(config, hashes, launcher or ForkLauncher(config, hashes))) as service:
        yield service


def shared_memory_of(service: Service) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if service.cluster_id in name]


def with_policy(policy: str, **scheduler: object) -> Config:
    return replace(CONFIG, scheduler=replace(CONFIG.scheduler, policy=policy, **scheduler))


DEFAULT = with_policy("cost_aware", costs=FREE_LINKS)
"""The policy that a service has by default, under which pages split and move all the time."""


def prompt(length: int, seed: int) -> list[int]:
    return [
        (seed * 31 + position * 7 + position * position) % MODEL.vocab_size
        for position in range(length)
    ]


def generate(
    target: str,
    prompt_ids: Sequence[int],
    max_tokens: int,
    seed: int = 1,
    api_key: str = "",
    timeout_s: float = 60,
) -> list[int]:
    with Client(target, api_key) as client:
        chunks = client.generate(prompt_ids, max_tokens=max_tokens, seed=seed, timeout_s=timeout_s)
        return ids_of(chunks)


def expected(prompt_ids: Sequence[int], max_tokens: int, seed: int = 1) -> list[int]:
    return MODEL.generate(
        prompt_ids, SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=seed)
    )


def expected_of_all(lengths: Sequence[int], max_tokens: int) -> dict[int, list[int]]:
    """What generate_all returns if every token is right."""
    return {
        number: expected(prompt(length, number), max_tokens)
        for number, length in enumerate(lengths, start=1)
    }


def generate_all(address, lengths, max_tokens):
    """One request after the other enters, all run together; ids are those of the order of entry."""
    outputs = {}

    def one(number, length):
        outputs[number] = generate(address, prompt(length, number), max_tokens)

    threads = []
    for number, length in enumerate(lengths, start=1):
        thread = threading.Thread(target=one, args=(number, length))
        thread.start()
        threads.append(thread)
        time.sleep(0.02)
    for thread in threads:
        thread.join(60)
    return outputs
