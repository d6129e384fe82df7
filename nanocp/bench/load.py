"""Open-loop load generator: sends requests when they are due and waits for them all."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from nanocp.bench.backends import Backend, RequestOutput
from nanocp.bench.dataset import SampleRequest


def due_times(
    requests: Sequence[SampleRequest],
    rate_per_s: float,
    burstiness: float,
    seed: int,
    is_self_timed: bool,
) -> list[float]:
    """Send times of the requests, in seconds after the start.

    Gaps are gamma-distributed with shape `burstiness` (1: a Poisson process), stretched as in vLLM
    so that the last is at len(requests) / rate_per_s.
    """
    if is_self_timed:
        return [request.at_s or 0.0 for request in requests]
    if math.isinf(rate_per_s):
        return [0.0] * len(requests)
    if math.isinf(burstiness):
        gaps = np.full(len(requests), 1 / rate_per_s)
    else:
        scale_s = 1 / (rate_per_s * burstiness)
        gaps = np.random.default_rng(seed).gamma(burstiness, scale_s, len(requests))
    times = np.cumsum(gaps)
    return [float(time_s) for time_s in times * (len(requests) / rate_per_s / times[-1])]


async def send_all(
    backend: Backend,
    requests: Sequence[SampleRequest],
    due_s: Sequence[float],
    max_concurrency: int | None,
    request_id_prefix: str,
    ended: Callable[[], None] = lambda: None,
) -> tuple[list[RequestOutput], float]:
    """Send each request at its time, at most max_concurrency at once.

    Returns the outputs in order of sending and the total seconds, of the ended requests if
    cancelled. `ended` is called after each request.
    """
    room = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    began_s = time.perf_counter()

    async def send(number: int, request: SampleRequest) -> RequestOutput:
        due = time.perf_counter()
        async with room:
            output = await backend.send(request, f"{request_id_prefix}{number}")
        output.client_queue_s = output.start_s - due
        ended()
        return output

    tasks: list[asyncio.Task[RequestOutput]] = []
    try:
        for number, (request, at_s) in enumerate(zip(requests, due_s, strict=True)):
            if (left_s := began_s + at_s - time.perf_counter()) > 0:
                await asyncio.sleep(left_s)
            tasks.append(asyncio.create_task(send(number, request)))
        outputs = list(await asyncio.gather(*tasks))
    except asyncio.CancelledError:
        outputs = [
            task.result()
            for task in tasks
            if task.done() and not task.cancelled() and task.exception() is None
        ]
        if not outputs:
            raise
    finally:
        for task in tasks:
            task.cancel()
    return outputs, time.perf_counter() - began_s
