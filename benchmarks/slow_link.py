"""Two stages of a pipeline against two instances with expert parallelism, over a slow link.

Enters: a checkpoint. Leaves: tokens a second of both. Does not know: what is asked of them.

Each member is in a network namespace of its own, and sends over a link of some rate (`tc`). A
message takes its whole time on the link: what was not sent before lets only a small burst through
at once. Controller, prefill and client are outside. It needs root.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import service as streams

from nanocp.config.cluster import ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.limits import LimitsConfig
from nanocp.config.passes import PassCosts, PassesConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.service import ServiceConfig
from nanocp.config.whole import Config

_BRIDGE, _NODE, _ADDRESS = "nanocp-gb", "nanocp-gb{}", "10.87.41.{}"
_HOST = _ADDRESS.format(1)
_BURST_US, _LEAST_BURST, _MOST_SEGMENT = 100, 3100, 9000
"""A link lets through at once what it carries in this time, or two packets if they are more. With
less, a timer that wakes late costs the link its rate. With more, a message of a layer hardly waits.
Nor is a segment, which the kernel sends as one, longer than the last number of bytes.
"""
_RATE_S = 0.25
"""How long the rate of a link is measured."""
_PROMPT, _MOST_BEFORE, _FRAMES_OF_A_ROW = 16, 440, 10
"""Tokens of a prompt, most that its request generates before all others do, and frames for both."""
_IN_NAMESPACE = (
    'case "$0" in instance*) set -- ip netns exec "nanocp-gb${0#instance }";; esac; '
    f'exec "$@" {sys.executable} -m data_plane.member.process "$0"'
)
"""Starts a member; its name is $0."""
_RECEIVE = """
import socket, time
with socket.create_server(("", 0)) as server:
    print(server.getsockname()[1], flush=True)
    link, _ = server.accept()
link.recv(1)
began_s, num_bytes = time.perf_counter(), 0
while piece := link.recv(1 << 18):
    num_bytes, ended_s = num_bytes + len(piece), time.perf_counter()
print(8e-6 * num_bytes * 1514 / 1448 / (ended_s - began_s))
"""
"""Takes all bytes of one connection, and prints its port and Mbit/s. The rate counts frames of
Ethernet with their headers, as a link does, from the first bytes to the last."""
_SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as link:
    link.sendall(bytes(int(sys.argv[3])))
"""


def why_not() -> str:
    """What keeps this machine from having such links; empty if nothing."""
    return "" if os.geteuid() == 0 else "it needs root, for network namespaces"


@contextmanager
def nodes_behind(mbit_per_s: int, num_nodes: int = 2) -> Iterator[None]:
    """Make namespaces with links of this rate. Raises CalledProcessError if that fails."""
    burst = max(_LEAST_BURST, mbit_per_s * _BURST_US // 8)
    bucket = [part for name in ("burst", "cburst", "quantum") for part in (name, f"{burst}")]
    try:
        _run("ip", "link", "add", _BRIDGE, "type", "bridge")
        _run("ip", "address", "add", f"{_HOST}/24", "dev", _BRIDGE)
        _run("ip", "link", "set", _BRIDGE, "up")
        for node in range(num_nodes):
            name, link = _NODE.format(node), f"{_BRIDGE}-v{node}"
            inside = ("ip", "-n", name)
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", link, "master", _BRIDGE, "up")
            _run(*inside, "address", "add", f"{_ADDRESS.format(node + 2)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run(*inside, "link", "set", device, "up")
            segment = f"{min(burst, _MOST_SEGMENT)}"
            _run(*inside, "link", "set", "eth0", "gso_max_size", segment)
            queue = ("tc", "-n", name)
            root = ("dev", "eth0", "root", "handle", "1:", "htb", "default", "1")
            _run(*queue, "qdisc", "add", *root)
            of_rate = ("parent", "1:", "classid", "1:1", "htb", "rate", f"{mbit_per_s}mbit")
            _run(*queue, "class", "add", "dev", "eth0", *of_rate, *bucket)
        yield
    finally:
        for node in range(num_nodes):  # its link goes with it
            subprocess.run(["ip", "netns", "delete", _NODE.format(node)], check=False)
        subprocess.run(["ip", "link", "delete", _BRIDGE], check=False)


def rates(mbit_per_s: int) -> tuple[float, float]:
    """Mbit/s that two nodes' links let through, from the first one to the second and back.

    mbit_per_s: what they are meant to. The higher of two measurements counts in each direction: a
    sender that has no core for a while sends nothing, whatever the link is. Raises
    CalledProcessError if nothing comes through.
    """
    there = max(_rate(0, 1, mbit_per_s) for _ in range(2))
    return there, max(_rate(1, 0, mbit_per_s) for _ in range(2))


def _rate(source: int, target: int, mbit_per_s: int) -> float:
    def end(node: int, script: str, *words: str) -> list[str]:
        return ["ip", "netns", "exec", _NODE.format(node), sys.executable, "-c", script, *words]

    num_bytes = int(mbit_per_s * 1e6 / 8 * _RATE_S)
    with subprocess.Popen(end(target, _RECEIVE), stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        try:
            port = receiver.stdout.readline().strip()
            _run(*end(source, _SEND, _ADDRESS.format(target + 2), port, f"{num_bytes}"))
            return float(receiver.stdout.readline())
        finally:
            receiver.kill()


class Decoded(NamedTuple):
    """What a run has found of decoding, while all its requests did."""

    tokens_per_s: float
    waiting: float
    """Share of its steps, or passes, for which a member waited for the other one."""
    sent_kb: float
    """Kilobytes that both nodes sent for each token, with headers."""


def decode(
    checkpoint: Path, layout: str, num_rows: int, num_tokens: int, costs: PassCosts
) -> Decoded:
    """Decode so many tokens of each of so many requests over two nodes; the better of two runs.

    layout: pipeline, instances, or lanes, which are instances whose rows run in two lanes. What
    requests generate while others' prompts are computed does not count. costs: what a pipeline
    levels its stages with, as `nanocp profile --layout pipeline` writes them.
    """
    config = Config(
        cluster=ClusterConfig(
            num_instances=2,
            layout="pipeline" if layout == "pipeline" else "instances",
            num_frames=max(256, _FRAMES_OF_A_ROW * num_rows),
            max_model_len=1024,
        ),
        scheduler=SchedulerConfig(lanes="always" if layout == "lanes" else "off"),
        pipeline=PassesConfig(layer_policy="level", costs=costs),
        data_plane=DataPlaneConfig(exchange_backend="tcp"),
        limits=LimitsConfig(start_timeout_ms=300_000),
        service=ServiceConfig(host=_HOST, grpc_port=0, metrics_port=0, http_port=0),
    )
    with streams.in_process(config, checkpoint, ["sh", "-c", _IN_NAMESPACE]) as (service, _):
        value = service.metrics.registry.get_sample_value

        def seconds(name: str) -> float:
            return sum(value(f"nanocp:{name}_sum", {"engine": str(i)}) or 0.0 for i in range(2))

        def decoded(seed: int) -> Decoded:
            edges: list[tuple[float, float, int]] = []

            def at_edge() -> None:
                spent = seconds("step_exchange_seconds"), seconds("step_seconds")
                edges.append((*spent, _sent_bytes()))

            prompts = streams.random_prompts(checkpoint, num_rows, _PROMPT, seed)
            most = num_tokens + _MOST_BEFORE
            steady = asyncio.run(
                streams.decode(service.address, prompts, num_tokens, most, at_edge=at_edge)
            )
            waited_s, steps_s, sent_bytes = (end - begin for begin, end in zip(*edges, strict=True))
            count = steady.tokens_per_s * (steady.end_s - steady.begin_s)
            return Decoded(steady.tokens_per_s, waited_s / steps_s, sent_bytes / 1e3 / count)

        return max(decoded(seed) for seed in range(2))


def _sent_bytes(num_nodes: int = 2) -> int:
    """Bytes that the nodes have sent since they were made."""
    links = (f"{_BRIDGE}-v{node}" for node in range(num_nodes))
    return sum(
        int(Path(f"/sys/class/net/{link}/statistics/rx_bytes").read_text()) for link in links
    )


def _run(*words: str) -> None:
    subprocess.run(words, check=True)
