"""Instances that only pretend: real streams to a controller, and windows that take their time.

Enters: an address, secrets, how long a window takes. Leaves: reports, and when they were made. Does
not know: tokens, KV, tables.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import grpc

from data_plane.member.node_streams import NodeStreams, _send_up
from nanocp.values.commands import ExpectPages, Join, RefusePages, Shutdown
from nanocp.values.members import Beat, Envelope, Hello, Peer, Ready
from nanocp.values.plan import InstancePlan, TransferDone, TransferFenced, WindowDone
from nanocp.wire.member_metadata import member_metadata
from nanocp.wire.members import CONTROLLER, FROM_INSTANCE, FROM_NODE, TO_INSTANCE, TO_NODE

_BEAT_S = 0.75
"""Time between two heartbeats of an instance."""


class Pretended(NamedTuple):
    """What one process pretends to be."""

    address: str
    """The controller's."""
    secrets: dict[int, str]
    """By number of the instance."""
    node_secrets: dict[int, str]
    """By number of the node; empty: each instance has a stream to the controller of its own."""
    instances_per_node: int
    window_us: int
    """How long each instance takes for a window."""


def pretend(own: Pretended, results: Connection) -> None:
    """Run the streams of these instances until the controller says goodbye; then send the times.

    They are {window: monotonic nanoseconds at which the last of them reported it}.
    """
    reported_ns: dict[int, int] = {}
    each = _node if own.node_secrets else _instance
    numbers = own.node_secrets or own.secrets

    async def all_of_them() -> None:
        await asyncio.gather(*(each(number, own, reported_ns) for number in numbers))

    asyncio.run(all_of_them())
    results.send(reported_ns)


async def _instance(instance: int, own: Pretended, reported_ns: dict[int, int]) -> None:
    """One instance with a stream of its own, on a channel of its own as in a service."""
    up: asyncio.Queue[Envelope] = asyncio.Queue()
    async with _channel(own.address) as channel:
        await channel.channel_ready()
        metadata = member_metadata(f"instance {instance}", own.secrets[instance])
        attach = channel.stream_stream(
            f"/{CONTROLLER}/AttachInstance", FROM_INSTANCE.seal, TO_INSTANCE.open
        )
        call = attach(_each(up), metadata=metadata)
        await _run(instance, own, up, aiter(call), reported_ns)


async def _node(node: int, own: Pretended, reported_ns: dict[int, int]) -> None:
    """The instances of a node on one stream, by the service's own NodeStreams.

    In a service the instances reach it by streams within the node, which cost the controller
    nothing and a machine that pretends to be all nodes too much.
    """
    streams, first = NodeStreams(), node * own.instances_per_node
    instances = [i for i in range(first, first + own.instances_per_node) if i in own.secrets]
    async with _channel(own.address) as channel:
        await channel.channel_ready()
        metadata = member_metadata(f"node {node}", own.node_secrets[node])
        attach = channel.stream_stream(
            f"/{CONTROLLER}/AttachNode", FROM_NODE.encode, TO_NODE.decode
        )
        call = attach(metadata=metadata)
        tasks = [asyncio.create_task(_send_up(call, streams, _BEAT_S))]
        for instance in instances:
            tasks.append(asyncio.create_task(_on_node(instance, own, streams, reported_ns)))
        async for message in call:
            for item in message.items:
                streams.deliver(item)
        for task in tasks:
            task.cancel()


class _Context(NamedTuple):
    """What NodeStreams asks of gRPC's context."""

    metadata: tuple[tuple[str, str], ...]

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return who attaches, and the secret."""
        return self.metadata


async def _on_node(
    instance: int, own: Pretended, streams: NodeStreams, reported_ns: dict[int, int]
) -> None:
    up: asyncio.Queue[Envelope] = asyncio.Queue()
    context: Any = _Context(tuple(member_metadata(f"instance {instance}", own.secrets[instance])))
    raw_up = (FROM_INSTANCE.seal(envelope) async for envelope in _each(up))
    raw_down = streams.attach(raw_up, context)
    down = (TO_INSTANCE.open(raw) async for raw in raw_down)
    await _run(instance, own, up, down, reported_ns)


async def _run(
    instance: int,
    own: Pretended,
    up: asyncio.Queue[Envelope],
    down: AsyncIterator[Envelope],
    reported_ns: dict[int, int],
) -> None:
    """Windows take their time one after the other, tickets none."""
    plans: asyncio.Queue[Envelope] = asyncio.Queue()
    where = Peer(f"node {instance // own.instances_per_node}")
    up.put_nowait(Envelope(Hello(instance, where)))
    window_s = own.window_us / 1e6

    async def run_windows() -> None:
        ends_s = 0.0
        while True:
            plan, term = await plans.get()
            ends_s = max(ends_s, time.monotonic()) + window_s
            await asyncio.sleep(ends_s - time.monotonic())
            done = WindowDone(instance, plan.window, step_us=own.window_us, num_rows=1)
            reported_ns[plan.window] = time.monotonic_ns()
            up.put_nowait(Envelope(done, term))

    async def beat() -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            up.put_nowait(Envelope(Beat()))

    tasks = [asyncio.create_task(run_windows()), asyncio.create_task(beat())]
    async for envelope in down:
        match envelope.message:
            case Join():
                up.put_nowait(Envelope(Ready(), envelope.term))
            case InstancePlan():
                plans.put_nowait(envelope)
            case ExpectPages(transfer):
                up.put_nowait(Envelope(TransferDone(transfer.ticket, instance), envelope.term))
            case RefusePages(ticket):
                up.put_nowait(Envelope(TransferFenced(ticket, instance), envelope.term))
            case Shutdown():
                break
    for task in tasks:
        task.cancel()


def _channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


async def _each(queue: asyncio.Queue[Envelope]) -> AsyncIterator[Envelope]:
    while True:
        yield await queue.get()
