"""Two stages of a pipeline against two instances over a slow link: what is asked, what is shown.

Enters: checkpoints. Leaves: claims, as ratios within one run. Does not know: how stages compute.

What a link costs goes by its time beside a layer's. Both grow with rows, but a part of a layer's
time does not. So a run is judged only if a layer's rows take at most as long on the link, beside
what the layer takes here, as those of a GPU with as many rows take on 1 Gbit/s beside its layer.

Each member is in a network namespace of its own, and sends over a link of some rate (`tc`). A
message takes its whole time on the link: what was not sent before lets only a small burst through
at once. Controller, prefill and client are outside. It needs root.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from benchmarks.kit.service import decode as decode_all
from benchmarks.kit.service import in_process, random_prompts
from benchmarks.pipeline.pipeline_layouts import NUM_LAYERS, StageClaim
from nanocp.config.cluster import ClusterConfig
from nanocp.config.data_plane import DataPlaneConfig
from nanocp.config.limits import LimitsConfig
from nanocp.config.passes import PassCosts, PassesConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.service import ServiceConfig
from nanocp.config.whole import Config
from nanocp.simulator.fit.pipeline import LoadPhase, PipelinePlay

NUM_DENSE = 1
GPU_LAYER_MS = 50 / 61
"""NanoCP's paper allows a token of DeepSeek-V3 50 ms on H200s (6.1), for 61 layers and whatever
number of rows. Its layers take no longer than this, so that links count at least as much."""
GPU_ROW_BYTES = 7168 * (1 + 2)
"""DeepSeek-V3's hidden size (its config.json), in FP8 to the experts and in BF16 back."""
GPU_MBIT_PER_S = 1000
SLOWER_MBIT_PER_S = 400
"""Rows still take less of a layer's time on this link than they take of a GPU's on 1 Gbit/s."""
LEAST_RATIO = 1.5
RATE_ERROR = 0.1
"""A link that lets more or less through, by this share, is not the one that the claim names."""
FEW_ROWS, MANY_ROWS = (8, 160), (64, 150)
"""Rows of both instances together, and tokens of each that count."""


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
    f'exec "$@" {sys.executable} -m data_plane.programs.process "$0"'
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


class Decoded(NamedTuple):
    """What a run has found of decoding, while all its requests did."""

    tokens_per_s: float
    waiting: float
    """Share of its steps, or passes, for which a member waited for the other one."""
    sent_kb: float
    """Kilobytes that both nodes sent for each token, with headers."""


class LinkRun(NamedTuple):
    """Two layouts of one checkpoint over one link."""

    checkpoint: Path
    mbit_per_s: int
    num_rows: int
    num_tokens: int
    is_asked: bool = False


def why_not() -> str:
    """What keeps this machine from having such links; empty if nothing."""
    return "" if os.geteuid() == 0 else "it needs root, for network namespaces"


def gpu_share(num_rows: int) -> float:
    """Time of a layer's rows on 1 Gbit/s, over that of the layer on a GPU.

    num_rows: of an instance, which sends them to one other instance and awaits its sums.
    """
    return 8 * num_rows * GPU_ROW_BYTES / (GPU_MBIT_PER_S * 1e3) / GPU_LAYER_MS


def link_share(num_rows: int, sent_kb: float, mbit_per_s: float, ms: float) -> float:
    """Time of a layer's rows on a link, over that of the layer here.

    num_rows: of an instance. sent_kb: what two instances send for a token, in all layers together.
    ms: time of a layer with experts.
    """
    # An instance has half of all rows, and sends half of all bytes: sent_kb for each of its rows.
    return 8 * num_rows * sent_kb / (NUM_LAYERS - NUM_DENSE) / mbit_per_s / ms


@cache
def layer_ms(checkpoint: Path, num_rows: int) -> float:
    """Processor time of a layer with experts, for a pass of so many rows that decode: median."""
    rows = LoadPhase(num_rows, 60, 200, 30)
    played = PipelinePlay(checkpoint, [rows], PassesConfig(), num_stages=1).run()
    return median(fmean(each.layers_us[NUM_DENSE:]) for each in played.passes[-20:]) / 1e3


def another_setting(share: float, gpu: float, mbit_per_s: int, measured: Sequence[float]) -> str:
    """What keeps a run over a link from being what the claim is about; empty if nothing.

    share, gpu: of link_share and gpu_share. measured: Mbit/s that the link let through, in each
    direction.
    """
    if any(abs(rate / mbit_per_s - 1) > RATE_ERROR for rate in measured):
        return f"the link is off by more than {RATE_ERROR:.0%}"
    return "a layer has more of the link than a GPU's" if share > gpu else ""


def claim_of(run: LinkRun, costs: PassCosts) -> StageClaim:
    """Measure stages and instances in turn, over two rounds; the link before and after them.

    The better round of each counts. Where it is asked, instances run in one lane and in two, and
    the faster ones count. costs: what stages are levelled with.
    """
    claim = (
        f"two stages over {run.mbit_per_s} Mbit/s against two instances, {run.num_rows} rows, "
        f"{run.checkpoint.name}: tokens/s"
    )
    asked = f">= {LEAST_RATIO}x" if run.is_asked else "shown"
    if reason := why_not():
        return StageClaim(claim, asked, f"not measured: {reason}", None)
    own_rows = run.num_rows // 2
    ms = layer_ms(run.checkpoint, own_rows)
    layouts = ("pipeline", "instances", "lanes") if run.is_asked else ("pipeline", "instances")
    with nodes_behind(run.mbit_per_s):
        before = rates(run.mbit_per_s)
        rounds = [
            [
                decode(run.checkpoint, layout, run.num_rows, run.num_tokens, costs)
                for layout in layouts
            ]
            for _ in range(2 if run.is_asked else 1)
        ]
        measured = (*before, *rates(run.mbit_per_s))
    stages, *others = map(max, zip(*rounds, strict=True))
    ratios = [stages.tokens_per_s / each.tokens_per_s for each in others]
    share = link_share(own_rows, others[0].sent_kb, min(measured), ms)
    gpu = gpu_share(own_rows)
    found = (
        f"{found_of(stages, others)}; a layer takes {ms:.2f} ms, its rows {share:.2f} of that on "
        f"the link (a GPU's {gpu:.2f}); the link let {min(measured):.1f} to {max(measured):.1f} "
        "Mbit/s through"
    )
    can_judge = run.is_asked and len(os.sched_getaffinity(0)) >= 2
    if run.is_asked and (reason := another_setting(share, gpu, run.mbit_per_s, measured)):
        found, can_judge = f"{found}; not judged: {reason}", False
    return StageClaim(claim, asked, found, min(ratios) >= LEAST_RATIO if can_judge else None)


def found_of(stages: Decoded, others: Sequence[Decoded]) -> str:
    """Ratios, and what explains them. others: instances, and instances in two lanes if measured."""
    names = [f"{stages.tokens_per_s / each.tokens_per_s:.2f}x" for each in others]
    if len(names) == 2:
        names[1] += " of those in two lanes"
    instances = others[0]
    return (
        f"{', '.join(names)}; {stages.tokens_per_s:.0f} and {instances.tokens_per_s:.0f} tokens/s; "
        f"members wait for {stages.waiting:.0%} and {instances.waiting:.0%}; "
        f"{stages.sent_kb:.0f} and {instances.sent_kb:.0f} KB a token"
    )


def part_link(
    wide: Path, small: Path, costs_of: Callable[[Path], PassCosts], is_quick: bool
) -> list[StageClaim]:
    """Two stages against two instances over a link, with many rows and with few.

    costs_of: what stages of a checkpoint are levelled with.

    Asked of many wide rows, over 1 Gbit/s and over a link that is nearer to what 1 Gbit/s is beside
    a GPU's layers. Shown with few rows, of preset small, whose rows are narrow, and over a slow
    link.
    """
    runs = [
        LinkRun(wide, 1000, *MANY_ROWS, is_asked=True),
        LinkRun(wide, SLOWER_MBIT_PER_S, *MANY_ROWS, is_asked=True),
        LinkRun(wide, 1000, *FEW_ROWS),
        LinkRun(small, 1000, *MANY_ROWS),
        LinkRun(small, 1000, *FEW_ROWS),
        LinkRun(small, 20, *FEW_ROWS),
    ]
    if is_quick:
        runs = [each._replace(num_rows=2, num_tokens=20, is_asked=False) for each in runs[::3]]
    costs = {checkpoint: costs_of(checkpoint) for checkpoint in (wide, small)}
    return [claim_of(run, costs[run.checkpoint]) for run in runs]


# --- two nodes behind links


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
    with in_process(config, checkpoint, ["sh", "-c", _IN_NAMESPACE]) as (service, _):
        value = service.metrics.registry.get_sample_value

        def seconds(name: str) -> float:
            return sum(value(f"nanocp:{name}_sum", {"engine": str(i)}) or 0.0 for i in range(2))

        def decoded(seed: int) -> Decoded:
            edges: list[tuple[float, float, int]] = []

            def at_edge() -> None:
                spent = seconds("step_exchange_seconds"), seconds("step_seconds")
                edges.append((*spent, _sent_bytes()))

            prompts = random_prompts(checkpoint, num_rows, _PROMPT, seed)
            most = num_tokens + _MOST_BEFORE
            steady = asyncio.run(
                decode_all(service.address, prompts, num_tokens, most, at_edge=at_edge)
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
