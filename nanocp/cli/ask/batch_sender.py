"""Sends the requests of a batch to a running service, a bounded number at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from ssl import SSLContext
from typing import Any

import aiohttp

from nanocp.cli.ask.batch_files import BatchAnswer, BatchLine

LOWEST_CLASS = 100
"""Default priority: requests of clients who wait go first."""
_RETRIED = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_PAUSE_S = 1.0
"""First pause before a retry; pauses double up to _MAX_PAUSE_S."""
_MAX_PAUSE_S = 30.0
_CONNECT_TIMEOUT_S = 30.0


class ServiceGoneError(Exception):
    """The service did not answer for the time of all retries."""


@dataclass(frozen=True, slots=True)
class BatchSender:
    """A service that answers a batch."""

    base_url: str
    """http://host:port, without a path."""
    headers: Mapping[str, str]
    max_concurrency: int
    retry_s: float
    """Longest time of retries without room or service."""
    ssl: SSLContext | None = None

    async def check(self) -> None:
        """Raises ValueError with a sentence if no service answers, or if it refuses the key."""
        timeout = aiohttp.ClientTimeout(total=_CONNECT_TIMEOUT_S)
        url = f"{self.base_url}/v1/models"
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=dict(self.headers)) as session,
                session.get(url, ssl=self.ssl or True) as response,
            ):
                status = response.status
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise ValueError(f"no service answers at {self.base_url} ({error})") from error
        if status == HTTPStatus.UNAUTHORIZED:
            raise ValueError(f"{self.base_url} asks for an API key: give --api-key")
        if status == HTTPStatus.NOT_FOUND:
            raise ValueError(f"{self.base_url} is no service: {url} does not exist")

    async def send_all(
        self, requests: Iterable[BatchLine], answered: Callable[[BatchAnswer], None]
    ) -> None:
        """Send every request; `answered` gets each answer, in any order.

        Takes requests as there is room. Raises ServiceGoneError, or as `answered` and the iterator
        do.
        """
        waiting = iter(requests)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=self.max_concurrency, ssl=self.ssl or True)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=dict(self.headers)
        ) as session:

            async def work() -> None:
                for request in waiting:
                    answered(await self._send(session, request))

            workers = [asyncio.create_task(work()) for _ in range(self.max_concurrency)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _send(self, session: aiohttp.ClientSession, request: BatchLine) -> BatchAnswer:
        """Raises ServiceGoneError if no retry is answered."""
        loop = asyncio.get_running_loop()
        until_s, pause_s = loop.time() + self.retry_s, _PAUSE_S
        body = {"priority": LOWEST_CLASS, **request.body}
        while True:
            reason, answer = "", None
            try:
                async with session.post(self.base_url + request.url, json=body) as response:
                    answer = BatchAnswer(
                        request.custom_id,
                        response.status,
                        response.headers.get("X-Request-Id", ""),
                        _json(await response.text()),
                    )
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                reason = f"{type(error).__name__}: {error}"
            if answer is not None and answer.status not in _RETRIED:
                return answer
            if loop.time() + pause_s > until_s:
                if answer is not None:
                    return answer
                raise ServiceGoneError(reason)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
