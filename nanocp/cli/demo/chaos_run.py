"""One run of chaos: a service, clients of every kind, losses; then the judgement."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from control_plane.frontend.text.default_sampling import default_sampling
from nanocp.cli.demo.judge import Judge
from nanocp.cli.demo.judge_beside import JudgeBeside
from nanocp.cli.demo.load import APIS, KINDS, Apis, Asked, ask_for_ever
from nanocp.cli.demo.losses import KINDS as MEMBER_KINDS
from nanocp.cli.demo.losses import PROCESS_KINDS, Losses
from nanocp.cli.demo.report import pauses_by_kind, serving_share, total_losses
from nanocp.client import AsyncClient
from nanocp.serve.process import HELD_FRAMES, PROGRAM, Serving, serving

NUM_CLIENTS = len(KINDS) * len(APIS)
JUDGE_S = 1200.0
"""Longest wait for judgements after the last answer."""
_NUM_FRONT_ENDS = 2
_PROCESSES = {"service.front_ends": _NUM_FRONT_ENDS, "service.controller_process": True}
_LOOK_S = 1.0
_LOG_LINES = 10
_GONE_S = 10.0
"""Longest wait for ending processes and segments."""


@dataclass(frozen=True, slots=True)
class ChaosRun:
    """Parameters of a run."""

    checkpoint: Path
    instances: int = 4
    seconds: float = 60.0
    seed: int = 0
    timeout_s: float = 600.0
    """Longest time of one request, with pauses."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Keys of the configuration, such as "cluster.num_frames"."""
    flags: Sequence[str] = ()
    program: Sequence[str] = PROGRAM
    pauses_s: tuple[float, float] = (3.0, 30.0)
    """Time from one loss to the next."""
    kinds: Sequence[str] = ()
    """Kinds of losses; empty: every kind."""
    has_processes: bool = False
    """Front ends and the controller are processes, and lost too."""


def play(
    run: ChaosRun,
    make_judge: Callable[[Path], Judge],
    said: Callable[[str], None],
    judged: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Start a service, load it, lose members, and judge the outputs.

    make_judge: see JudgeBeside. said: gets each step as it begins. judged: see JudgeBeside.found.
    Raises RuntimeError if the service does not start.
    """
    said("starting the service")
    asked: list[Asked] = []
    settings, kinds, num_front_ends = run.settings, run.kinds or MEMBER_KINDS, 1
    if run.has_processes:
        settings, kinds = {**_PROCESSES, **settings}, run.kinds or MEMBER_KINDS + PROCESS_KINDS
        num_front_ends = _NUM_FRONT_ENDS
    with (
        closing(JudgeBeside(make_judge, run.checkpoint)) as judge,
        serving(
            run.checkpoint,
            run.instances,
            settings,
            *run.flags,
            ray=False,
            synthetic_kv=False,
            http=True,
            program=run.program,
        ) as service,
    ):
        prefix = service.segment_prefix()
        losses = Losses(service.member_pids, run.seed, run.pauses_s, kinds)
        started = _with_children(service.pid)
        said(f"losing processes for {run.seconds:.0f} s")
        began_s = time.monotonic()
        host, _, port = service.target.rpartition(":")
        targets = [f"{host}:{int(port) + number}" for number in range(num_front_ends)]
        http_urls = [f"http://{host}:{service.http_port + n}" for n in range(num_front_ends)]
        disturb, has_ended = losses.cause_until, partial(_has_ended, service)
        asyncio.run(ask_all(run, targets, http_urls, disturb, asked, has_ended, judge.take))
        took_s = time.monotonic() - began_s
        ended_early = has_ended()
        if ended_early:
            said(f"the service has ended with status {service.stop()} after {took_s:.0f} s")
        said("looking for what is left")
        left = _left_in_service(service)
        processes = {*started, *_with_children(service.pid)}
        exit_status = service.stop()
        log = service.log.read_text()
        left |= {
            "segments_left": settled(
                lambda: sum(n.startswith(prefix) for n in os.listdir("/dev/shm"))
            ),
            "processes_left": settled(lambda: sum(process.is_running() for process in processes)),
            "exit_status": exit_status,
            "ended_early": ended_early,
        }
        said(f"judging {len(asked)} requests, most of which were judged as they ended")
        found = judge.found(asked, JUDGE_S, judged)
    return {
        "seed": run.seed,
        "seconds": round(took_s, 1),
        **found,
        "losses": total_losses(losses.happened),
        **left,
        "tokens_per_s": round(found["tokens"] / took_s, 1),
        "serving_share": serving_share(asked, began_s, run.seconds),
        "by_kind": pauses_by_kind(asked, losses.happened),
        "log_end": log.splitlines()[-_LOG_LINES:] if exit_status or ended_early else [],
    }


async def ask_all(
    run: ChaosRun,
    targets: Sequence[str],
    http_urls: Sequence[str],
    disturb: Callable[[float], Coroutine[Any, Any, None]],
    asked: list[Asked],
    has_ended: Callable[[], bool],
    ended: Callable[[Asked], None] = lambda request: None,
) -> None:
    """Let every client ask until the run's time is over, and the last answers end.

    disturb: runs beside them until the given time. has_ended: the service is gone, which ends the
    run. asked, ended: see ask_for_ever.
    """
    until_s = time.monotonic() + run.seconds
    defaults = default_sampling(run.checkpoint)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        apis = []
        for first in range(len(targets)):
            client = AsyncClient(
                (*targets[first:], *targets[:first]), resume_timeout_s=run.timeout_s
            )
            await stack.enter_async_context(client)
            info = await client.server_info()
            urls = (*http_urls[first:], *http_urls[:first])
            sizes = info.vocab_size, info.max_model_len
            apis.append(Apis(client, http, urls, *sizes, run.timeout_s, defaults))
        async with asyncio.TaskGroup() as group:
            tasks = {
                group.create_task(
                    ask_for_ever(apis[number % len(apis)], number, run.seed, until_s, asked, ended)
                )
                for number in range(NUM_CLIENTS)
            }
            tasks.add(group.create_task(disturb(until_s)))
            while tasks:
                _, tasks = await asyncio.wait(tasks, timeout=_LOOK_S)
                if has_ended():
                    for task in tasks:
                        task.cancel()
                    break


def _has_ended(service: Serving) -> bool:
    return service.process.poll() is not None


def _left_in_service(service: Serving) -> dict[str, int]:
    if _has_ended(service):
        return {"frames_left": 0, "tickets_left": 0, "outside_tokens": 0}
    return {
        "frames_left": service.settled(*HELD_FRAMES),
        "tickets_left": service.settled("nanocp:tickets_open"),
        "outside_tokens": round(service.metrics().get(("nanocp:kv_offload_hits_total", ""), 0)),
    }


def _with_children(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def settled(count: Callable[[], int]) -> int:
    """The count once it is 0, or after a limit."""
    deadline_s = time.monotonic() + _GONE_S
    while (value := count()) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return value
