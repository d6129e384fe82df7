"""What the exchange costs by shared memory and by TCP, when all put 32 KB to all and wait for all.

    python benchmarks/exchange_cpu.py [--json]

There is no compute. Prints microseconds a step (mean over the instances) for 2 and 4 processes, and
of the calls by themselves. TCP goes over the loopback device of this machine: what it takes of a
processor, not what a network adds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import uuid
from multiprocessing.connection import Connection

import numpy as np

from data_plane.native.receiver import receive_puts
from data_plane.transport.exchange import Channel, Field
from data_plane.transport.segments import Segments
from data_plane.transport.shm import ShmExchange
from data_plane.transport.tcp_server import TcpSegmentServer
from nanocp.config.limits import LimitsConfig
from nanocp.values.members import Peer

LAYOUT = {Channel.DISPATCH: (Field("hidden", "uint8", (32 * 1024,)),)}
NUM_WARM_STEPS, NUM_STEPS = 500, 5000


def run_instance(
    cluster_id: str, instance: int, num_instances: int, is_tcp: bool, pipe: Connection
) -> None:
    """Run one instance's steps; send (microseconds a step, the share of it spent waiting).

    First it sends where it is, and receives where all are.
    """
    segments = Segments(
        cluster_id, TcpSegmentServer("127.0.0.1", receive_puts), is_always_tcp=is_tcp
    )
    exchange = ShmExchange.create(segments, instance, num_instances, LAYOUT, LimitsConfig())
    pipe.send(Peer(segments.node, segments.address))
    segments.meet(pipe.recv())
    exchange.connect(30_000)
    others = [other for other in range(num_instances) if other != instance]
    payload = np.full(32 * 1024, instance, np.uint8)
    begin_ns = 0
    for epoch in range(NUM_WARM_STEPS + NUM_STEPS):
        if epoch == NUM_WARM_STEPS:
            begin_ns, waited_before_ns = time.perf_counter_ns(), exchange.waited_ns
        for other in others:
            np.copyto(exchange.outgoing(Channel.DISPATCH, other, epoch)["hidden"], payload)
            exchange.put(Channel.DISPATCH, other, epoch)
        for other in others:
            exchange.wait(Channel.DISPATCH, other, epoch)
    elapsed_ns = time.perf_counter_ns() - begin_ns
    pipe.send((elapsed_ns / NUM_STEPS / 1000, (exchange.waited_ns - waited_before_ns) / elapsed_ns))
    exchange.close()


def all_to_all(num_instances: int, is_tcp: bool = False) -> dict[str, float | str]:
    """Measure a step of `num_instances` processes, in microseconds.

    They exchange through shared memory, or TCP over the loopback device.
    """
    context = multiprocessing.get_context("spawn")
    cluster_id, ends, processes = uuid.uuid4().hex, [], []
    for instance in range(num_instances):
        ours, theirs = context.Pipe()
        ends.append(ours)
        arguments = (cluster_id, instance, num_instances, is_tcp, theirs)
        processes.append(context.Process(target=run_instance, args=arguments))
        processes[-1].start()
    peers = [end.recv() for end in ends]
    for end in ends:
        end.send(peers)
    step_us, waiting = zip(*(end.recv() for end in ends), strict=True)
    for process in processes:
        process.join()
    return {
        "transport": "tcp" if is_tcp else "shm",
        "instances": num_instances,
        "step_us": round(sum(step_us) / num_instances, 1),
        "waiting_share": round(sum(waiting) / num_instances, 2),
    }


def single_calls() -> dict[str, float]:
    """Microseconds of a put and of a wait that finds its epoch, in one process."""
    cluster_id, count = uuid.uuid4().hex, 20_000
    pair = [
        ShmExchange.create(Segments(cluster_id), instance, 2, LAYOUT, LimitsConfig())
        for instance in range(2)
    ]
    for exchange in pair:
        exchange.connect(1000)
    put_ns = wait_ns = 0
    for epoch in range(count):
        begin_ns = time.perf_counter_ns()
        pair[0].put(Channel.DISPATCH, 1, epoch)
        middle_ns = time.perf_counter_ns()
        pair[1].wait(Channel.DISPATCH, 0, epoch)
        wait_ns += time.perf_counter_ns() - middle_ns
        put_ns += middle_ns - begin_ns
    for exchange in pair:
        exchange.close()
    return {"put_us": round(put_ns / count / 1000, 2), "wait_us": round(wait_ns / count / 1000, 2)}


def main() -> None:
    """Run all and print."""
    results = [
        single_calls(),
        *(all_to_all(number, is_tcp) for is_tcp in (False, True) for number in (2, 4)),
    ]
    if "--json" in sys.argv[1:]:
        print(json.dumps(results))
        return
    print(f"{os.cpu_count()} cores")
    for result in results:
        print(", ".join(f"{name} {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
