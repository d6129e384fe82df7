"""Sends requests of `nanocp bench serve`: rate, concurrency, warm-up."""

from __future__ import annotations

import asyncio
import math
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from nanocp.cli.options.typed import Option

if TYPE_CHECKING:
    from nanocp.bench.backends import Backend, RequestOutput
    from nanocp.bench.dataset import SampleRequest


class Sent(NamedTuple):
    """Answers to the load."""

    model: str
    outputs: list[RequestOutput]
    duration_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """Options of the load."""

    request_rate: Option[float] = math.inf
    """Requests a second; inf: all at once."""
    max_concurrency: Option[int | None] = None
    """Most requests at a time."""
    self_timed: bool | None = None
    """Send when the trace says; default for traces."""
    burstiness: float = 1.0
    """Shape of the gamma gaps: 1 is Poisson, less is burstier."""
    num_warmups: int = 0
    """Requests sent before, and not counted."""
    ready_check_timeout_sec: float = 0
    """Wait this long for the service; 0: not at all."""
    request_id_prefix: str = f"bench-{uuid.uuid4().hex[:8]}-"
    """Prefix of each request's id."""
    disable_tqdm: bool = False
    """No progress bar."""

    def check(self, dataset_name: str, is_trace: bool) -> None:
        """Raises ValueError, naming the option, for a load without a meaning."""
        if self.self_timed and not is_trace:
            raise ValueError(f"--self-timed is for traces; --dataset-name is {dataset_name}")
        for option, value in (
            ("--request-rate", self.request_rate),
            ("--burstiness", self.burstiness),
        ):
            if not value > 0:
                raise ValueError(f"{option} is {value}; it must be above 0")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"--max-concurrency is {self.max_concurrency}; it must be at least 1")
        if self._is_self_timed(is_trace) and not math.isinf(self.request_rate):
            raise ValueError(
                "a trace says when: give --request-rate with --set self_timed=off, or time_scale"
            )

    async def send(
        self,
        connect: Callable[[], Backend],
        requests: Sequence[SampleRequest],
        seed: int,
        is_trace: bool,
    ) -> Sent:
        """Connect, wait for the service, warm it up, and send each request when due.

        Raises ValueError if the service does not answer.
        """
        from nanocp.bench.backends import OpenAIBackend
        from nanocp.bench.load import due_times, send_all

        backend = connect()
        try:
            model = await backend.first_model() if isinstance(backend, OpenAIBackend) else ""
            await self._wait_until_ready(backend, requests[0])
            if self.num_warmups:
                prefix = f"{self.request_id_prefix}warmup-"
                warmups, at_once = [requests[0]] * self.num_warmups, [0.0] * self.num_warmups
                await send_all(backend, warmups, at_once, self.max_concurrency, prefix)
            is_self_timed = self._is_self_timed(is_trace)
            due_s = due_times(requests, self.request_rate, self.burstiness, seed, is_self_timed)
            return Sent(model, *await self._send_all(backend, requests, due_s))
        finally:
            await backend.close()

    def _is_self_timed(self, is_trace: bool) -> bool:
        return is_trace if self.self_timed is None else self.self_timed

    async def _send_all(
        self, backend: Backend, requests: Sequence[SampleRequest], due_s: Sequence[float]
    ) -> tuple[list[RequestOutput], float]:
        from nanocp.bench.load import send_all
        from nanocp.cli.options.console import request_progress

        with request_progress(disable=self.disable_tqdm) as bars:
            bar = bars.add_task("requests", total=len(requests))
            return await send_all(
                backend,
                requests,
                due_s,
                self.max_concurrency,
                self.request_id_prefix,
                lambda: bars.advance(bar),
            )

    async def _wait_until_ready(self, backend: Backend, request: SampleRequest) -> None:
        """Retry one request until served. Raises ValueError when the time is up."""
        limit_s = self.ready_check_timeout_sec
        deadline = time.monotonic() + limit_s
        for attempt in range(sys.maxsize if limit_s > 0 else 0):
            output = await backend.send(request, f"{self.request_id_prefix}ready-{attempt}")
            if output.success:
                return
            if time.monotonic() >= deadline:
                raise ValueError(f"the service was not ready in {limit_s:g} s: {output.error}")
            await asyncio.sleep(min(1.0, limit_s))
