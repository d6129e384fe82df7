"""Bytecode instructions of a step beside its arithmetic, here and in another checkout.

    git worktree add /tmp/before COMMIT
    python benchmarks/step_instructions.py --against /tmp/before [--quick] [--json PATH]

Enters: two checkouts. Leaves: the instructions of a decode step in each: the loop around an
instance, plans, tables, rows and reports, of one instance with eight rows and windows of one step.
Does not know: what differs between the two.

The arithmetic of the hash model stands for the device's and is not counted, nor are token streams,
heartbeats and waits for peers. The count is the same in every run, on any machine. With the time
that an instruction takes here it says how many microseconds a step has become longer.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from types import FrameType, SimpleNamespace
from typing import Annotated, Any

import typer
from machine import describe, write_results
from other_checkout import commit_of, count_in

from control_plane.scheduler.scheduler import Scheduler
from data_plane.fake import instance as fake
from data_plane.fake.local_pages import LocalPageRing, local_peer_rings
from data_plane.fake.model import HashModel
from data_plane.member import instance_runner
from data_plane.transport.local import LocalExchange
from nanocp.config.cluster import ClusterConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.whole import Config
from nanocp.values.plan import Arrival, WindowDone
from nanocp.values.sampling import RowInput, SamplingParams
from nanocp.wire.convert import encode_row_input, instance_plan_to_wire
from nanocp.wire.v1 import cluster_pb2 as pb

NUM_ROWS = 8
_NUM_WINDOWS, _QUICK_WINDOWS = 400, 50
_SHUTDOWN = pb.ToInstance(shutdown=pb.Shutdown(reason="enough"))


class ScriptedInbox(Queue[Any]):
    """Messages that came before the loop began; a loop that waits for more is shut down."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next message."""
        return _SHUTDOWN if block and self.empty() else super().get(block, timeout)


def messages(config: Config, num_windows: int) -> list[Any]:
    """What a controller sends for rows that go on and on."""
    params = SamplingParams(max_tokens=num_windows + 9)
    row = encode_row_input(RowInput(3, params, "front-end:1"))
    scheduler = Scheduler(config.cluster, config.scheduler)
    arrivals: list[Any] = [
        Arrival(1 + i, 3, params.max_tokens, row, needs_prefill=False) for i in range(NUM_ROWS)
    ]
    plans, events = [], arrivals
    for window in range(num_windows):
        plan, events = scheduler.plan_window(events, 20_000 * window), []
        (of_instance,) = plan.instances
        plans.append(pb.ToInstance(plan=instance_plan_to_wire(of_instance)))
        if window:
            events = [WindowDone(0, window - 1)]
    return plans


def count(num_windows: int) -> tuple[float, float]:
    """(instructions of a mean step, nanoseconds of one of them when none is counted)."""
    num_instructions = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_instructions
        is_fake = f"{os.sep}fake{os.sep}" in frame.f_code.co_filename
        frame.f_trace_opcodes, frame.f_trace_lines = not is_fake, False
        num_instructions += event == "opcode"
        return trace

    begun_ns: list[int] = []
    _run(num_windows, lambda: None)
    # The plans are made before it begins.
    _run(num_windows, lambda: begun_ns.append(time.thread_time_ns()))
    ns = time.thread_time_ns() - begun_ns[0]
    _run(num_windows, lambda: sys.settrace(trace))
    return num_instructions / num_windows, ns / num_instructions


def _run(num_windows: int, begin: Callable[[], None]) -> None:
    """Drive an instance by a loop of this checkout, whose parts had other arguments before."""
    config = Config(
        cluster=ClusterConfig(num_instances=1, num_frames=256, max_model_len=4096),
        scheduler=SchedulerConfig(steps_per_window=1),
    )
    (named,) = inspect.signature(fake.region_layout).parameters
    layout = fake.region_layout(config if named == "config" else config.cluster)  # type: ignore
    (exchange,) = LocalExchange.create_all(1, layout, config.limits)
    ring: Any = LocalPageRing()
    names = inspect.signature(fake.HashInstance).parameters
    instance: Any = fake.HashInstance(
        config, HashModel(), exchange, [ring] if "rings" in names else None, *local_peer_rings(1)
    )
    instance.rings, instance.connect, instance.enter = [], lambda: 0, lambda start: 0
    link: Any = SimpleNamespace(inbox=ScriptedInbox(), send=lambda message: None)
    tokens: Any = SimpleNamespace(send=lambda tokens: set())
    arguments = [instance, link, tokens, config.limits]
    sent = messages(config, num_windows)
    if "segments" in inspect.signature(instance_runner.DecodeLoop).parameters:
        term = SimpleNamespace(number=1, check=lambda: None)
        segments = SimpleNamespace(term=term)
        arguments.insert(3, segments)
        instance_runner.meet = lambda segments, join: None
        link.inbox.put(pb.ToInstance(term=1, join=pb.Join()))
        for message in sent:
            message.term = 1
    for message in sent:
        link.inbox.put(message)
    loop: Any = instance_runner.DecodeLoop(*arguments)
    begin()
    try:
        loop.run()
    except Exception as error:
        if type(error).__name__ != "ShutdownRequested":
            raise
    finally:
        sys.settrace(None)


def main(
    against: Annotated[
        Path | None, typer.Option(help="A checkout of another commit; none: count only.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Fewer windows.")] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write the result here, the machine beside it.")
    ] = None,
) -> None:
    """Count the instructions of a step, here and in another checkout."""
    load_before = os.getloadavg()[0]
    here, ns = count(_QUICK_WINDOWS if quick else _NUM_WINDOWS)
    result: dict[str, Any] = {"instructions": here, "ns": round(ns)}
    print(f"{here:.0f} instructions a step beside its arithmetic, {ns:.0f} ns each")
    if against is not None:
        before = count_in(against, __file__, quick)
        commit = commit_of(against)
        result |= {"against": commit, "before": before, "more_us": (here - before) * ns / 1000}
        print(f"{before:.0f} in {against} at {commit}: {result['more_us']:+.1f} us a step")
    if json is not None:
        write_results(json, [result], describe(load_before))


if __name__ == "__main__":
    typer.run(main)
