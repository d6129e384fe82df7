"""Checkpoints and prompts of a benchmark, and what a client sees of a service in the steady state.

Enters: a preset; a service's address, prompts. Leaves: arrivals of tokens, rates. Does not know:
which claim is measured.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import psutil

from benchmarks.kit.machine import ROOT as ROOT
from control_plane.launchers.processes import ProcessLauncher
from nanocp.client import AsyncClient, ServiceError
from nanocp.config.whole import Config
from nanocp.serve.process import Serving
from nanocp.serve.service import Service, member_environment, open_checkpoint

REQUEST_TIMEOUT_S = 900
NUM_WARM_TOKENS = 4
"""The steady state begins when every stream has this many tokens."""


MEMBER = (sys.executable, "-m", "data_plane.programs.process")
"""Command that starts a member."""


def checkpoint_of(preset: str, stored: str = "float32") -> Path:
    """The checkpoint of a preset, made if absent. stored: the dtype of its weights."""
    path = ROOT / "checkpoints" / (preset if stored == "float32" else f"{preset}-{stored}")
    if not (path / "config.json").exists():
        command = [sys.executable, "-m", "nanocp.cli.main", "make-checkpoint", str(path)]
        subprocess.run([*command, "--preset", preset, "--dtype", stored], check=True)
    return path


@contextmanager
def in_process(
    config: Config, checkpoint: Path, command: Sequence[str] = MEMBER
) -> Iterator[tuple[Service, ProcessLauncher]]:
    """A service in this process whose members are processes, from ready to stopped.

    command: starts a member.
    """
    launcher = ProcessLauncher(command, member_environment(config))
    service = Service(config, open_checkpoint(config, checkpoint), launcher)
    try:
        service.start(lambda step: None)
        yield service, launcher
    finally:
        service.stop()


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
        self,
        client: AsyncClient,
        prompt: Sequence[int],
        index: int,
        max_tokens: int,
        constraint: Mapping[str, str],
    ) -> None:
        """Decode one prompt. The first stream that ends, ends the steady state."""
        chunks = client.generate(
            prompt,
            timeout_s=REQUEST_TIMEOUT_S,
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            **constraint,
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
    constraints: Sequence[Mapping[str, str]] = ({},),
) -> SteadyState:
    """Decode all prompts greedily until each has num_tokens in the steady state, then abort them.

    max_tokens: limit of each request; enough for what the first stream generates before the last
    one starts. at_edge: called where the steady state begins and where it ends. constraints: of the
    prompts, in turn. Raises the first ServiceError of any stream.
    """
    streams = _Streams(len(prompts), num_tokens)
    max_tokens = max_tokens or NUM_WARM_TOKENS + num_tokens + 32
    try:
        async with AsyncClient(target) as client, asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(streams.follow(client, prompt, index, max_tokens, constraint))
                for index, (prompt, constraint) in enumerate(
                    zip(prompts, cycle(constraints), strict=False)
                )
            ]
            await asyncio.wait_for(streams.steady.wait(), REQUEST_TIMEOUT_S)
            begin_s = time.perf_counter()
            at_edge()
            await asyncio.wait_for(streams.over.wait(), REQUEST_TIMEOUT_S)
            end_s = time.perf_counter()
            at_edge()
            for task in tasks:
                task.cancel()
    except* ServiceError as errors:
        raise errors.exceptions[0] from None
    return SteadyState(begin_s, end_s, streams.arrivals_s)


def step_cpu_ms(
    service: Serving,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    max_tokens: int | None = None,
    constraints: Sequence[Mapping[str, str]] = ({},),
) -> float:
    """Milliseconds of processor time of a step, all threads of the service's one instance together.

    Arguments are those of `decode`.
    """
    (pid,) = service.instance_pids()
    cpu_s: list[float] = []

    def at_edge() -> None:
        times = psutil.Process(pid).cpu_times()
        cpu_s.append(times.user + times.system)

    steady = asyncio.run(
        decode(service.target, prompts, num_tokens, max_tokens, at_edge, constraints)
    )
    num_steps = (steady.end_s - steady.begin_s) * steady.tokens_per_s / len(prompts)
    return 1e3 * (cpu_s[1] - cpu_s[0]) / num_steps
