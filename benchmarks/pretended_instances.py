"""Instances that only pretend: real streams to a controller, and windows that take their time.

Enters: an address, secrets, how long a window takes. Leaves: reports, and when they were made. Does
not know: tokens, KV, tables.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import grpc

from nanocp.wire.member_metadata import member_metadata
from nanocp.wire.v1 import cluster_pb2 as pb
from nanocp.wire.v1 import cluster_pb2_grpc as rpc

_BEAT_S = 0.75
"""Time between two heartbeats of an instance."""


def pretend(
    addresses: dict[int, str], secrets: dict[int, str], window_us: int, results: Connection
) -> None:
    """Run the streams of these instances until the controller says goodbye; then send the times.

    addresses: where each dials.
    They are {window: monotonic nanoseconds at which the last of them reported it}.
    """
    reported_ns: dict[int, int] = {}

    async def all_of_them() -> None:
        await asyncio.gather(
            *(
                _instance(addresses[instance], instance, secret, window_us / 1e6, reported_ns)
                for instance, secret in secrets.items()
            )
        )

    asyncio.run(all_of_them())
    results.send(reported_ns)


async def _instance(
    address: str, instance: int, secret: str, window_s: float, reported_ns: dict[int, int]
) -> None:
    """One instance: its windows take their time one after the other, its tickets none."""
    up: asyncio.Queue[pb.FromInstance] = asyncio.Queue()
    plans: asyncio.Queue[pb.ToInstance] = asyncio.Queue()
    where = pb.Peer(node=f"node {instance // 8}")
    up.put_nowait(pb.FromInstance(hello=pb.InstanceHello(instance=instance, where=where)))

    async def outgoing() -> AsyncIterator[pb.FromInstance]:
        while True:
            yield await up.get()

    async def run_windows() -> None:
        ends_s = 0.0
        while True:
            message = await plans.get()
            ends_s = max(ends_s, time.monotonic()) + window_s
            await asyncio.sleep(ends_s - time.monotonic())
            window = message.plan.window
            done = pb.WindowDone(window=window, step_us=round(1e6 * window_s), num_rows=1)
            reported_ns[window] = time.monotonic_ns()
            up.put_nowait(pb.FromInstance(window_done=done, term=message.term))

    async def beat() -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            up.put_nowait(pb.FromInstance(heartbeat=pb.Heartbeat()))

    # A channel each, as each is a process in a service.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        await channel.channel_ready()
        metadata = member_metadata(f"instance {instance}", secret)
        call = rpc.ControllerStub(channel).AttachInstance(outgoing(), metadata=metadata)
        tasks = [asyncio.create_task(run_windows()), asyncio.create_task(beat())]
        async for message in call:
            answer: dict[str, Any] = {}
            match message.WhichOneof("message"):
                case "join":
                    answer = {"ready": pb.InstanceReady()}
                case "plan":
                    plans.put_nowait(message)
                case "expect":
                    answer = {"transfer_done": pb.TransferAnswer(ticket=message.expect.ticket)}
                case "fence":
                    answer = {"transfer_fenced": pb.TransferAnswer(ticket=message.fence)}
                case "shutdown":
                    break
            if answer:
                up.put_nowait(pb.FromInstance(term=message.term, **answer))
        for task in tasks:
            task.cancel()
