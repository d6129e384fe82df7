"""A real `nanocp serve` for a benchmark, and what a client sees of it in the steady state.

Enters: a checkpoint, flags, settings; prompts. Leaves: arrivals of tokens, rates, metrics, process
ids. Does not know: which claim is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from nanocp.cli.demo import free_port, wait_until_serving
from nanocp.client import AsyncClient, ServiceError

ROOT = Path(__file__).parents[1]
STOP_TIMEOUT_S = 60
REQUEST_TIMEOUT_S = 900
IDLE_TIMEOUT_S = 30.0
HELD_FRAMES = ("nanocp:frames_committed", "nanocp:frames_quarantined")
NUM_WARM_TOKENS = 4
"""The steady state begins when every stream has this many tokens."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A service that is ready."""

    target: str
    """host:port for clients."""
    metrics_port: int
    http_port: int
    """0: no HTTP."""
    pid: int

    def metrics(self) -> dict[tuple[str, str], float]:
        """(name, label engine or "") -> value, of every sample of /metrics."""
        from prometheus_client.parser import text_string_to_metric_families

        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10
        ) as reply:
            text = reply.read().decode()
        return {
            (sample.name, sample.labels.get("engine", "")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if "le" not in sample.labels
        }

    def frames_not_back(self) -> int:
        """Count the frames that are not free once nothing runs: 0, or they leaked.

        It waits for at most IDLE_TIMEOUT_S.
        """
        deadline_s = time.monotonic() + IDLE_TIMEOUT_S
        while True:
            metrics = self.metrics().items()
            held = sum(value for (name, _), value in metrics if name in HELD_FRAMES)
            if not held or time.monotonic() > deadline_s:
                return round(held)
            time.sleep(0.2)

    def instance_pids(self) -> list[int]:
        """Processes of the instances, in order, of a service without Ray: its only children."""
        children = Path(f"/proc/{self.pid}/task").glob("*/children")
        return sorted(int(pid) for tasks in children for pid in tasks.read_text().split())


@contextlib.contextmanager
def serving(
    checkpoint: Path,
    instances: int,
    settings: Mapping[str, object],
    *flags: str,
    ray: bool = True,
    synthetic_kv: bool = True,
    http: bool = False,
) -> Iterator[Serving]:
    """`nanocp serve` from ready to stopped. settings: keys such as "data_plane.dtype".

    Raises RuntimeError with the end of the service's log if it does not start.
    """
    port, metrics_port, http_port = free_port(), free_port(), free_port() if http else 0
    command = [sys.executable, "-m", "nanocp.cli.main", "serve", str(checkpoint), *flags]
    command += ["--synthetic-kv"] if synthetic_kv else []
    command += [
        "--instances",
        str(instances),
        "--grpc-port",
        str(port),
        "--metrics-port",
        str(metrics_port),
    ]
    command += ["--http-port", str(http_port)]
    command += [] if ray else ["--no-ray"]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, env=_environment(settings), stdout=log, stderr=log)
        try:
            try:
                wait_until_serving(server, port)
            except typer.Exit as error:
                log.seek(0)
                raise RuntimeError(
                    f"{' '.join(command)} did not start:\n{log.read()[-2000:]}"
                ) from error
            yield Serving(f"127.0.0.1:{port}", metrics_port, http_port, server.pid)
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _environment(settings: Mapping[str, object]) -> dict[str, str]:
    # A variable that is left in the user's shell must not change what is measured.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("NANOCP_")
    }
    for key, value in settings.items():
        environment["NANOCP_" + key.upper().replace(".", "__")] = (
            value if isinstance(value, str) else json.dumps(value)
        )
    return environment


def checkpoint_of(preset: str) -> Path:
    """The checkpoint of a preset, made if absent."""
    path = ROOT / "checkpoints" / preset
    if not (path / "config.json").exists():
        subprocess.run(
            [
                sys.executable,
                "-m",
                "nanocp.cli.main",
                "make-checkpoint",
                str(path),
                "--preset",
                preset,
            ],
            check=True,
        )
    return path


def random_prompts(
    checkpoint: Path, num_prompts: int, length: int, seed: int = 0
) -> list[list[int]]:
    """Draw distinct prompts, the same for every engine, without ids 0 and 1 (begin and end)."""
    vocab_size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    draw = random.Random(seed)
    return [[draw.randrange(2, vocab_size) for _ in range(length)] for _ in range(num_prompts)]


@dataclass(frozen=True, slots=True)
class SteadyState:
    """The time in which every stream ran, and when each one's tokens arrived."""

    begin_s: float
    end_s: float
    arrivals_s: Sequence[Sequence[float]]

    @property
    def tokens_per_s(self) -> float:
        """Sum of the streams' own rates: a step that begin or end cuts in two counts in none."""
        rate = 0.0
        for arrivals in self.arrivals_s:
            inside = [arrival for arrival in arrivals if self.begin_s <= arrival <= self.end_s]
            rate += (len(inside) - 1) / (inside[-1] - inside[0])
        return rate


class _Streams:
    """Counts tokens until every stream has its warm ones, then num_tokens more."""

    def __init__(self, num_streams: int, num_tokens: int) -> None:
        self.arrivals_s: list[list[float]] = [[] for _ in range(num_streams)]
        self.steady, self.over = asyncio.Event(), asyncio.Event()
        self._target_counts: list[int] = []
        self._num_tokens = num_tokens

    async def follow(
        self, client: AsyncClient, prompt: Sequence[int], index: int, max_tokens: int
    ) -> None:
        """Decode one prompt. The first stream that ends, ends the steady state."""
        chunks = client.generate(
            prompt,
            timeout_s=REQUEST_TIMEOUT_S,
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
        )
        async for chunk in chunks:
            self.arrivals_s[index] += [time.perf_counter()] * len(chunk.token_ids)
            self._arrived()
        self.over.set()

    def _arrived(self) -> None:
        counts = [len(arrivals) for arrivals in self.arrivals_s]
        if not self._target_counts:
            if min(counts) >= NUM_WARM_TOKENS:
                self._target_counts = [count + self._num_tokens for count in counts]
                self.steady.set()
        elif all(
            count >= target for count, target in zip(counts, self._target_counts, strict=True)
        ):
            self.over.set()


async def decode(
    target: str,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    max_tokens: int | None = None,
    at_edge: Callable[[], None] = lambda: None,
) -> SteadyState:
    """Decode all prompts greedily until each has num_tokens in the steady state, then abort them.

    max_tokens: limit of each request; enough for what the first stream generates before the last
    one starts. at_edge: called where the steady state begins and where it ends. Raises the first
    ServiceError of any stream.
    """
    try:
        return await _decode(target, prompts, num_tokens, max_tokens, at_edge)
    except* ServiceError as errors:
        raise errors.exceptions[0] from None


async def _decode(
    target: str,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    max_tokens: int | None,
    at_edge: Callable[[], None],
) -> SteadyState:
    streams = _Streams(len(prompts), num_tokens)
    max_tokens = max_tokens or NUM_WARM_TOKENS + num_tokens + 32
    async with AsyncClient(target) as client, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(streams.follow(client, prompt, index, max_tokens))
            for index, prompt in enumerate(prompts)
        ]
        await asyncio.wait_for(streams.steady.wait(), REQUEST_TIMEOUT_S)
        begin_s = time.perf_counter()
        at_edge()
        await asyncio.wait_for(streams.over.wait(), REQUEST_TIMEOUT_S)
        end_s = time.perf_counter()
        at_edge()
        for task in tasks:
            task.cancel()
    return SteadyState(begin_s, end_s, streams.arrivals_s)
