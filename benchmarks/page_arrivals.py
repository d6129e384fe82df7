"""Decode's step time while pages arrive: a real service, and an engine that computes nothing.

Enters: a checkpoint. Leaves: a StepCost. Does not know: how fast a way could be.

Streams decode all the time. Blocks of three windows, in an order drawn anew: pages arrive, and
twice none does. In each a long prompt is placed, whose last page is never written, so rows are the
same throughout and only pages differ. The two windows without pages show how far the instrument
itself is from 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
from kit import Claim, Interval
from service import checkpoint_of, random_prompts

from data_plane.connectors.rings import PageWriters
from data_plane.connectors.ticket import KEY, EngineTicket, accepted
from nanocp.client import AsyncClient, ServiceError
from nanocp.serve.process import free_port, serving
from nanocp.values.plan import PAGE_SIZE

PAGES_PER_S = 32
"""2,048 prompt tokens a second: five times what vLLM computes on two cores."""
MAX_RATIO = 1.02
NUM_STREAMS = 8
STREAM_TOKENS = 512
WINDOW_S, SETTLE_S = 1.0, 0.3
HELD_TOKENS = PAGE_SIZE * (round(PAGES_PER_S * WINDOW_S) + 2)
_START_S = 180.0
_PROBE_TOKENS = 65


@dataclass(frozen=True, slots=True)
class StepCost:
    """The time from token to token with arriving pages, over that without."""

    pages_per_s: float
    """Pages that arrived, in the windows in which they did."""
    page_bytes: int
    step_ms: float
    """Median without pages."""
    ratio: float
    ratio_low: float
    ratio_high: float
    """The median over the blocks, and the interval that has it with 95%."""
    null_low: float
    null_high: float
    """The interval for the two windows without pages: the instrument's resolution."""
    num_blocks: int

    @property
    def claim(self) -> Claim:
        """What is claimed, judged by the interval."""
        what = (
            f"{self.pages_per_s:.0f} pages/s of {self.page_bytes / 1e6:.2f} MB arrive: a step "
            f"takes {{}} times as long as without, {self.step_ms:.2f} ms; two windows without "
            f"differ by {self.null_low:.3f} to {self.null_high:.3f}; {self.num_blocks} blocks"
        )
        return Interval(self.ratio, self.ratio_low, self.ratio_high).at_most(what, MAX_RATIO)


def step_cost(preset: str, num_blocks: int) -> StepCost:
    """Measure on a service of one instance."""
    checkpoint = checkpoint_of(preset)
    with scripted_engine(checkpoint) as url:
        settings = {
            "prefill.engines": [url],
            "cluster.max_model_len": HELD_TOKENS + PAGE_SIZE,
            "cluster.num_frames": 4 * HELD_TOKENS // PAGE_SIZE,
        }
        with serving(checkpoint, 1, settings, ray=False, synthetic_kv=False) as service:
            measured = asyncio.run(_measure(service.target, checkpoint, num_blocks))
        return cost_of(measured, _counted(url))


# --- the service's clients


@dataclass(slots=True)
class Block:
    """Milliseconds of a step in the three windows."""

    none: float = 0.0
    none_again: float = 0.0
    arriving: float = 0.0


async def _measure(target: str, checkpoint: Path, num_blocks: int) -> list[Block]:
    arrivals: list[list[float]] = []
    draw, blocks = random.Random(1), []
    async with AsyncClient(target) as client, asyncio.TaskGroup() as group:
        streams = [group.create_task(_stream(client, i, arrivals)) for i in range(NUM_STREAMS)]
        await asyncio.sleep(2.0)
        for number in range(num_blocks):
            block, names = Block(), ["none", "none_again", "arriving"]
            draw.shuffle(names)
            for name in names:
                seed = draw.getrandbits(30)
                begin, end = await _window(client, checkpoint, seed, name == "arriving")
                setattr(block, name, step_ms(arrivals, begin, end))
            blocks.append(block)
            arrivals[:] = [arrived for arrived in arrivals if arrived[-1:] > [end - 1.0]]
            print(f"block {number + 1} of {num_blocks}", end="\r", file=sys.stderr)
        for stream in streams:
            stream.cancel()
    return blocks


async def _stream(client: AsyncClient, index: int, arrivals: list[list[float]]) -> None:
    """Decode for ever; a prompt of one token needs no engine. Streams begin one after the other."""
    await asyncio.sleep(0.05 * index)
    max_tokens = STREAM_TOKENS * (index + 1) // NUM_STREAMS
    while True:
        arrived: list[float] = []
        arrivals.append(arrived)
        async for chunk in client.generate(
            [2 + index], max_tokens=max_tokens, temperature=0.0, ignore_eos=True
        ):
            arrived += [time.monotonic()] * len(chunk.token_ids)
        max_tokens = STREAM_TOKENS


async def _window(
    client: AsyncClient, checkpoint: Path, seed: int, has_pages: bool
) -> tuple[float, float]:
    """A prompt that is placed and never complete; its first token says what the engine does."""
    [ids] = random_prompts(checkpoint, 1, HELD_TOKENS, seed)
    ids[0] = 3 if has_pages else 2
    held = asyncio.create_task(_hold(client, ids))
    await asyncio.sleep(SETTLE_S)
    begin = time.monotonic()
    await asyncio.sleep(WINDOW_S)
    end = time.monotonic()
    assert not held.done(), held.exception() or "the prompt that is never complete was answered"
    held.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await held
    await asyncio.sleep(SETTLE_S)
    return begin, end


async def _hold(client: AsyncClient, ids: Sequence[int]) -> None:
    with contextlib.suppress(ServiceError):
        async for _ in client.generate(ids, max_tokens=1):
            return


def step_ms(arrivals: Sequence[Sequence[float]], begin: float, end: float) -> float:
    """Mean time from token to token of all streams; a request counts from its own first token."""
    seconds, steps = 0.0, 0
    for arrived in arrivals:
        inside = [moment for moment in arrived if begin <= moment <= end]
        if len(inside) > 1:
            seconds, steps = seconds + inside[-1] - inside[0], steps + len(inside) - 1
    return 1e3 * seconds / max(1, steps)


def cost_of(blocks: Sequence[Block], counted: dict[str, Any]) -> StepCost:
    """Medians and intervals over the blocks. counted: pages, seconds and page_bytes."""
    ratio = Interval.of([2 * b.arriving / (b.none + b.none_again) for b in blocks])
    _, *null = Interval.of([b.none_again / b.none for b in blocks])
    step_ms = float(np.median([b.none for b in blocks]))
    pages_per_s = counted["pages"] / counted["seconds"]
    return StepCost(pages_per_s, counted["page_bytes"], step_ms, *ratio, *null, len(blocks))


# --- the engine, in a process of its own


@contextlib.contextmanager
def scripted_engine(checkpoint: Path) -> Iterator[str]:
    """The address of an engine that passes probes, and writes other prompts' pages slowly."""
    port = free_port()
    process = subprocess.Popen([sys.executable, __file__, str(port), str(checkpoint)])
    try:
        deadline = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the scripted engine did not start")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _counted(url: str) -> dict[str, Any]:
    with urlopen(f"{url}/counted", timeout=10) as reply:
        counted: dict[str, Any] = json.loads(reply.read())
    return counted


class _Engine:
    """Writes pages: the reference's for a probe, and noise for held prompts."""

    def __init__(self, checkpoint: Path) -> None:
        import torch

        from data_plane.model.config import ModelConfig
        from data_plane.model.weights import load_weights

        self._model = ModelConfig.from_folder(checkpoint)
        experts = range(self._model.num_experts)
        self._weights = load_weights(checkpoint, self._model, torch.float32, experts)
        self._writers = PageWriters(())
        self._lock = threading.Lock()
        self._noise = np.zeros(0, np.uint8)
        self.counted: dict[str, Any] = {"pages": 0, "seconds": 0.0, "page_bytes": 0}

    def compute(self, ticket: EngineTicket, ids: Sequence[int]) -> None:
        """Write every page of a prompt."""
        from data_plane.prefill.pages import payload_of, prefill_pages

        pages = prefill_pages(self._weights, self._model, ids, ticket.num_tokens, STREAM_TOKENS)
        for page, kv_LSW in pages:
            payload = payload_of(kv_LSW, None)
            self._noise = np.array(payload)
            self._write(ticket, page, payload)

    def hold(self, ticket: EngineTicket, has_pages: bool, gone: socket.socket) -> None:
        """Write all pages but the last, in step with the clock, until the client has gone."""
        began = time.monotonic()
        last, page = -(-ticket.num_tokens // PAGE_SIZE) - 1, 0
        while not _is_gone(gone, 1 / PAGES_PER_S):
            while has_pages and page < min(last, (time.monotonic() - began) * PAGES_PER_S):
                self._write(ticket, page, self._noise)
                page += 1
        if has_pages:
            self.counted["pages"] += page
            self.counted["seconds"] += time.monotonic() - began

    def _write(self, ticket: EngineTicket, page: int, payload: Any) -> None:
        instance = ticket.instance_of(page)
        num_tokens = min(PAGE_SIZE, ticket.num_tokens - page * PAGE_SIZE)
        self.counted["page_bytes"] = payload.nbytes
        if instance is not None:
            options = {"page": page, "num_tokens": num_tokens, "payload": payload}
            with self._lock:
                self._writers.write(ticket, instance, **options, is_cancelled=lambda: False)


def _is_gone(connection: socket.socket, wait_s: float) -> bool:
    readable, _, _ = select.select([connection], [], [], wait_s)
    return bool(readable) and not connection.recv(1, socket.MSG_PEEK)


def _serve(port: int, checkpoint: Path) -> None:
    engine = _Engine(checkpoint)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(engine.counted)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            ticket = EngineTicket.from_params(body["kv_transfer_params"][KEY])
            if ticket.num_tokens != _PROBE_TOKENS:
                engine.hold(ticket, body["prompt"][0] == 3, self.connection)
                return
            engine.compute(ticket, body["prompt"])
            self._send({"choices": [], "kv_transfer_params": accepted(2, "scripted")})

        def _send(self, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), Path(sys.argv[2]))
