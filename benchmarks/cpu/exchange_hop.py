"""A hop of the exchange between two processes, against `torch.distributed.all_to_all_single`.

Enters: nothing. Leaves: a table, and a list of {bytes, way, ours, gloo, ratio, low, high} in
microseconds. Does not know: what is put.

Two processes put rows of four fields into each other's region, as a step puts its queries, and
each waits for the other's. That is a hop; so is one call of all_to_all_single on as many bytes, by
gloo, which goes by TCP. Ours goes by shared memory (`shm`) and by TCP (`tcp`). The ways take turns,
so that a drift of the machine meets all. A ratio is ours over gloo's, with the interval that has
its median with 95%.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import uuid
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.kit.bench import BenchRun, Interval, bench
from data_plane.native.receiver import receive_puts
from data_plane.transport.exchange import Channel, Field, RegionLayout
from data_plane.transport.segments import Segments
from data_plane.transport.shm import ShmExchange
from data_plane.transport.tcp.server import TcpSegmentServer
from nanocp.config.limits import LimitsConfig
from nanocp.values.members import Peer

OURS, GLOO = ("shm", "tcp"), "gloo"
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


def _ours(
    way: str, instance: int, meeting: str, num_bytes: int, num: int, pipe: Connection
) -> None:
    server = TcpSegmentServer("127.0.0.1", receive_puts) if way == "tcp" else None
    segments = Segments(Path(meeting).name, server, node=str(instance) if server else "")
    exchange = ShmExchange.create(segments, instance, 2, _layout(num_bytes), LimitsConfig())
    pipe.send(segments.address if server else "")
    addresses = pipe.recv()
    if server:
        segments.meet([Peer(str(number), address) for number, address in enumerate(addresses)])
    exchange.connect(START_MS)
    other, hops_us = 1 - instance, []
    rows = {name: each.copy() for name, each in exchange.outgoing(Channel.Q, other, 0).items()}
    for epoch in range(WARM_UP + num):
        begin_s = time.perf_counter()
        for name, each in exchange.outgoing(Channel.Q, other, epoch).items():
            each[:] = rows[name]
        exchange.put(Channel.Q, other, epoch)
        exchange.wait(Channel.Q, other, epoch)
        hops_us.append((time.perf_counter() - begin_s) * 1e6)
    pipe.send(hops_us[WARM_UP:])
    pipe.recv()
    exchange.close()
    segments.close()


def _gloo(
    way: str, instance: int, meeting: str, num_bytes: int, num: int, pipe: Connection
) -> None:
    pipe.send("")
    pipe.recv()
    dist.init_process_group(way, init_method=f"file://{meeting}", rank=instance, world_size=2)
    rows = torch.zeros(num_bytes, dtype=torch.uint8)
    arrived, hops_us = torch.empty_like(rows), []
    splits = [num_bytes if rank != instance else 0 for rank in range(2)]
    for _ in range(WARM_UP + num):
        begin_s = time.perf_counter()
        dist.all_to_all_single(arrived, rows, splits, splits)
        hops_us.append((time.perf_counter() - begin_s) * 1e6)
    pipe.send(hops_us[WARM_UP:])
    pipe.recv()
    dist.destroy_process_group()


def _turn(way: str, num_bytes: int, num_hops: int) -> float:
    """The median time of a hop, in us."""
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"{folder}/hop-{uuid.uuid4().hex[:8]}"
        processes = [
            spawn.Process(
                target=_gloo if way == GLOO else _ours,
                args=(way, instance, meeting, num_bytes, num_hops, theirs),
                daemon=True,
            )
            for instance, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()
        ours = [pipe for pipe, _ in pipes]
        addresses = [pipe.recv() for pipe in ours]
        for pipe in ours:
            pipe.send(addresses)
        hops_us = [each for pipe in ours for each in pipe.recv()]
        for pipe in ours:
            pipe.send(None)
        for process in processes:
            process.join()
    return median(hops_us)


@bench("Three turns of fewer hops, a minute.")
def main(run: BenchRun) -> None:
    """Measure a hop of ours by shared memory and by TCP, and one of gloo, in turn."""
    turns, num_hops = (3, NUM_HOPS // 4) if run.is_quick else (NUM_TURNS, NUM_HOPS)
    claims = []
    for num_bytes in PUT_BYTES:
        found = [
            {way: _turn(way, num_bytes, num_hops) for way in (*OURS, GLOO)} for _ in range(turns)
        ]
        for way in OURS:
            ratio = Interval.of([turn[way] / turn[GLOO] for turn in found])
            ours, gloo = (median(turn[each] for turn in found) for each in (way, GLOO))
            about = {"ratio": ratio.median, "low": ratio.low, "high": ratio.high}
            run.keep({"bytes": num_bytes, "way": way, "ours": ours, "gloo": gloo, **about})
            what = f"a hop of {num_bytes:,} bytes by {way} over gloo's all-to-all"
            claims.append(ratio.at_most(what, 0.5))
    columns = {"bytes": ",", "way": "", "ours": ".1f", "gloo": ".1f"}
    ratios = dict.fromkeys(("ratio", "low", "high"), ".2f")
    run.table("Microseconds", run.results, **columns, **ratios)
    run.judge(claims)


if __name__ == "__main__":
    main()
