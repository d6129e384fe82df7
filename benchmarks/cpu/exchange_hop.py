"""A hop of the exchange between two processes, by NIXL against TCP: its time and processor time.

Enters: nothing. Leaves: a table, and a list of {bytes, of, tcp, nixl, ratio, low, high}. Does not
know: what is put.

One process puts rows of four fields, as a step puts its queries; the other waits for them and puts
as many back. A hop is half of that. Processor time is of both processes, with all their threads, a
hop. The two ways take turns, so that a drift of the machine meets both. A ratio is NIXL's over
TCP's, with the interval that has its median with 95%. NIXL goes by UCX's tcp on the loopback
device, unless UCX_TLS and UCX_NET_DEVICES say something else.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import uuid
from multiprocessing.connection import Connection
from statistics import median

from benchmarks.kit.bench import BenchRun, Interval, bench
from data_plane.native.receiver import receive_puts
from data_plane.transport.exchange import Channel, Field, RegionLayout
from data_plane.transport.nixl.pages import NixlAgent, nixl_package
from data_plane.transport.segments import Segments
from data_plane.transport.shm import ShmExchange
from data_plane.transport.tcp.server import TcpSegmentServer
from nanocp.config.limits import LimitsConfig
from nanocp.values.members import Peer

WAYS = ("tcp", "nixl")
NUM_ROWS, PUT_BYTES = 8, (2_000, 20_000, 200_000)
WARM_UP, NUM_HOPS, NUM_TURNS = 200, 2000, 9
START_MS = 30_000


def _layout(num_bytes: int) -> RegionLayout:
    """Four fields as Channel.Q has, of so many bytes with all rows."""
    rest = num_bytes // NUM_ROWS - 9
    return {
        Channel.Q: (
            Field("position", "int64", (NUM_ROWS,)),
            Field("live", "bool", (NUM_ROWS,)),
            Field("q", "uint8", (NUM_ROWS, rest - rest // 4)),
            Field("kv", "uint8", (NUM_ROWS, rest // 4)),
        )
    }


def _put_and_wait(
    instance: int, way: str, cluster: str, num_bytes: int, num_hops: int, pipe: Connection
) -> None:
    """Send this process's address, take its peer's, and send [hops_us], processor_us of a hop."""
    agent = NixlAgent(f"{cluster} {instance}") if way == "nixl" else None
    server = TcpSegmentServer("127.0.0.1", receive_puts)
    segments = Segments(cluster, server, node=str(instance), puts=agent)
    limits = LimitsConfig()
    exchange = ShmExchange.create(segments, instance, 2, _layout(num_bytes), limits)
    pipe.send(segments.address)
    segments.meet([Peer(str(number), address) for number, address in enumerate(pipe.recv())])
    exchange.connect(START_MS)
    other, hops_us, processor_s = 1 - instance, [], 0.0
    for epoch in range(WARM_UP + num_hops):
        if epoch == WARM_UP:
            processor_s = time.process_time()
        begin_s = time.perf_counter()
        if instance:
            exchange.wait(Channel.Q, other, epoch)
        exchange.put(Channel.Q, other, epoch)
        if not instance:
            exchange.wait(Channel.Q, other, epoch)
        hops_us.append((time.perf_counter() - begin_s) / 2 * 1e6)
    processor_us = (time.process_time() - processor_s) / (2 * num_hops) * 1e6
    pipe.send((hops_us[WARM_UP:], processor_us))
    pipe.recv()
    exchange.close()
    segments.close()


def _turn(way: str, num_bytes: int, num_hops: int) -> dict[str, float]:
    """The median time of a hop, and the processor time of both processes, in us."""
    cluster = f"hop-{uuid.uuid4().hex[:8]}"
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe() for _ in range(2)]
    processes = [
        fork.Process(
            target=_put_and_wait,
            args=(instance, way, cluster, num_bytes, num_hops, theirs),
            daemon=True,
        )
        for instance, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    ours = [pipe for pipe, _ in pipes]
    addresses = [pipe.recv() for pipe in ours]
    for pipe in ours:
        pipe.send(addresses)
    (hops_us, first_us), (_, second_us) = (pipe.recv() for pipe in ours)
    for pipe in ours:
        pipe.send(None)
    for process in processes:
        process.join()
    return {"hop": median(hops_us), "processor": first_us + second_us}


@bench("Three turns of fewer hops, under a minute.")
def main(run: BenchRun) -> None:
    """Measure in turn, so that a drift of the machine meets all alike."""
    if nixl_package() is None:
        run.refuse("NIXL is not installed (pip install '.[nixl]')")
    os.environ.setdefault("UCX_TLS", "tcp,self")
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    turns, num_hops = (3, NUM_HOPS // 4) if run.is_quick else (NUM_TURNS, NUM_HOPS)
    for num_bytes in PUT_BYTES:
        found = [{way: _turn(way, num_bytes, num_hops) for way in WAYS} for _ in range(turns)]
        for what in ("hop", "processor"):
            ratio = Interval.of([turn["nixl"][what] / turn["tcp"][what] for turn in found])
            times = {way: median(turn[way][what] for turn in found) for way in WAYS}
            about = {"ratio": ratio.median, "low": ratio.low, "high": ratio.high}
            run.keep({"bytes": num_bytes, "of": what, **times, **about})
    columns = {"bytes": ",", "of": "", "tcp": ".1f", "nixl": ".1f"}
    ratios = dict.fromkeys(("ratio", "low", "high"), ".2f")
    run.table("Microseconds", run.results, **columns, **ratios)


if __name__ == "__main__":
    main()
