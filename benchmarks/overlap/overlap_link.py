"""Two halves of a batch over a link that takes time, against the whole batch.

Enters: nothing. Leaves: a table, and a list of {link_of_compute, whole_us, halves_us, hidden, ...}.
Does not know: in which order operators run.

A Llama is cut over two processes, each with half of every layer; they sum its outputs over TCP
(gloo). The kernel paces their sockets. The whole batch and its halves run by turns; the fastest
forward of each counts.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.kit.bench import BenchRun, Claim, bench
from benchmarks.kit.measured_twice import (
    Ways,
    claims_of_choices,
    claims_of_long_waits,
    point_of,
    quiet,
)
from data_plane.profiling.late_puts import let_others_in
from nanocp.overlap.engine.backend import overlap
from nanocp.overlap.engine.engine import OverlapEngine
from nanocp.overlap.ops import SplitFunc
from nanocp.overlap.policies.orders import NETWORK, NanoFlow, Sequential

MAX_RATIO = 0.75
"""Claim: the halves take at most this much of the whole where the link is as long as compute."""
AS_LONG = (0.8, 1.25)
"""What counts as "as long": the link over compute."""
MAX_OF_WHOLE = 1.03
"""Claim: what is chosen takes at most this much of the whole where halves are no faster."""
MIN_GAIN = 0.03
"""The halves are chosen if they save at least this much."""
WANTED = (0.0, 0.4, 0.9, 1.1, 2.0)
"""Link over compute."""
NUM_PROCESSES = 2
HIDDEN_SIZE = 1024
"""Compute grows with its square."""
TOKENS = (8, 64)
"""Rows of the batch, and tokens of each: so many that a half needs little more than half the time.
"""
_SO_MAX_PACING_RATE = 47
"""Linux's number; the module socket has no name for it."""
_NO_LIMIT = 2**32 - 1


class LinkTimes(NamedTuple):
    """Microseconds of the fastest forward, and of the sums alone."""

    whole_us: float
    halves_us: float
    link_us: float
    is_equal: bool
    """Whether halves and whole gave the same bits."""


@bench("Half a minute: two layers, few rounds; judges only the bits.")
def main(run: BenchRun) -> None:
    """Measure links of several rates; the rates are calibrated in the run."""
    num_layers, wanted, num_rounds = (1, (0.0, 1.0), 3) if run.is_quick else (4, WANTED, 5)
    with two_processes(num_layers) as ask:
        points = measure(ask, wanted, num_layers, num_rounds)
        results = list(run.track(points, "measuring", len(wanted)))
    run.table("halves of a batch over a link, against the whole batch", results)
    run.keep(*results, layers=num_layers)
    run.judge([("halves give the bits of the whole", all(point["equal"] for point in results))])
    judged, reason = quiet(results)
    run.judge(claims_of(judged if judged else results), run.too_quick or reason)


Ask = Callable[[float, int], LinkTimes]
"""Forwards at a rate of the link, in bytes a second (0: nothing slows it), and of that many rounds.
"""


def measure(
    ask: Ask, wanted: tuple[float, ...], num_layers: int, num_rounds: int
) -> Iterator[dict[str, Any]]:
    """A point for each wanted length of the link.

    Compute is measured beside each point, over a link that nothing slows down: a machine that is
    slower for a while is so for both.
    """
    # Each process sends as many bytes as the sum has: gloo's halves go there and back.
    num_bytes = 2 * num_layers * TOKENS[0] * TOKENS[1] * HIDDEN_SIZE * 4
    for share in wanted:
        free, rate = [ask(0.0, num_rounds)], 0.0
        if share:
            link_s = share * compute_us_of(free) / 1e6
            rate = num_bytes / link_s
            rate *= ask(rate, num_rounds).link_us / (1e6 * link_s)
        first = ask(rate, num_rounds)
        free.append(ask(0.0, num_rounds))
        second = ask(rate, num_rounds)
        compute_us = compute_us_of(free)
        whole_us, halves_us, link_us = map(min, zip(first[:3], second[:3], strict=True))
        yield {
            "mbit_per_s": round(8 * rate / 1e6) or "free",
            "compute_us": round(compute_us),
            "link_of_compute": round(link_us / compute_us, 2),
            "whole_us": round(whole_us),
            "halves_us": round(halves_us),
            "of_longer": round(halves_us / max(compute_us, link_us), 2),
            "hidden": round((whole_us - halves_us) / (whole_us - compute_us), 2) if share else None,
            "equal": first.is_equal and second.is_equal,
            **point_of(
                Ways(*first[:2]),
                Ways(*second[:2]),
                other_is_chosen=first.halves_us <= (1 - MIN_GAIN) * first.whole_us,
            ),
        }


def compute_us_of(free: Sequence[LinkTimes]) -> float:
    """What a whole forward takes without its sums."""
    return min(each.whole_us - each.link_us for each in free)


def claims_of(points: list[dict[str, Any]]) -> Iterator[Claim]:
    """What is claimed of points; nothing without points."""
    yield from claims_of_choices(points, MAX_OF_WHOLE)
    as_long = [point for point in points if AS_LONG[0] <= point["link_of_compute"] <= AS_LONG[1]]
    named = ((f"the link is {point['link_of_compute']} of compute", point) for point in as_long)
    yield from claims_of_long_waits(named, "halves take {} of the whole", MAX_RATIO)
    if points and not as_long:
        yield Claim(f"a link is {AS_LONG[0]} to {AS_LONG[1]} of compute", False)


# --- two processes


@contextlib.contextmanager
def two_processes(num_layers: int) -> Iterator[Ask]:
    """The processes, from ready to stopped; the times are those of the slower one.

    Raises RuntimeError if one of them dies.
    """
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(NUM_PROCESSES):
            ours, theirs = context.Pipe()
            arguments = (rank, f"{folder}/store", num_layers, theirs)
            processes.append(context.Process(target=_run, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)

        def ask(bytes_per_s: float, num_rounds: int) -> LinkTimes:
            for pipe in pipes:
                pipe.send((bytes_per_s, num_rounds))
            try:
                answers = [pipe.recv() for pipe in pipes]
            except EOFError:
                raise RuntimeError("a process died while it measured") from None
            longest = map(max, zip(*(answer[:3] for answer in answers), strict=True))
            return LinkTimes(*longest, is_equal=all(answer.is_equal for answer in answers))

        try:
            yield ask
        finally:
            for process in processes:
                process.kill()
                process.join()


def _run(rank: int, store: str, num_layers: int, pipe: Connection) -> None:
    """Answer until killed."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_PROCESSES
    )
    let_others_in()  # gloo's threads run already
    with torch.no_grad(), contextlib.suppress(EOFError):
        forwards = _Forwards(rank, num_layers)
        while True:
            bytes_per_s, num_rounds = pipe.recv()
            pace(bytes_per_s)
            pipe.send(forwards.times(num_rounds))


def pace(bytes_per_s: float) -> None:
    """Let the kernel send no faster on every TCP connection of this process; 0: no limit."""
    rate = struct.pack("I", round(bytes_per_s) or _NO_LIMIT)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as end:
                if end.family in (socket.AF_INET, socket.AF_INET6):
                    end.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)


class _Summed(nn.Module):
    """A linear of which each process has a part; the outputs are summed."""

    def __init__(self, linear: nn.Module, group: str) -> None:
        super().__init__()
        self._linear, self._group = linear, group

    def forward(self, rows: Tensor) -> Tensor:
        return summed(self._linear(rows), self._group)


def summed(part: Tensor, group: str) -> Tensor:
    """The sum of every process's part: it begins at once, and an operator of its own awaits it."""
    begun = torch.ops._c10d_functional.all_reduce(part, "sum", group)
    whole: Tensor = torch.ops._c10d_functional.wait_tensor(begun)
    return whole


class _Forwards:
    """One process's part of the model, compiled in program order and in halves."""

    def __init__(self, rank: int, num_layers: int) -> None:
        torch.manual_seed(0)  # embeddings and the head are the same in both
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=HIDDEN_SIZE,
                intermediate_size=2752 // NUM_PROCESSES,
                num_hidden_layers=num_layers,
                num_attention_heads=16 // NUM_PROCESSES,
                num_key_value_heads=16 // NUM_PROCESSES,
                head_dim=64,
            )
        ).eval()
        assert dist.group.WORLD is not None
        self._group = dist.group.WORLD.group_name
        torch.manual_seed(1 + rank)
        for layer in model.model.layers:
            for linear in layer.modules():
                if isinstance(linear, nn.Linear):
                    linear.reset_parameters()
            layer.self_attn.o_proj = _Summed(layer.self_attn.o_proj, self._group)
            layer.mlp.down_proj = _Summed(layer.mlp.down_proj, self._group)
        rules = (SplitFunc("all_reduce.*", NETWORK),)
        self._whole = overlap(model, Sequential(rules))
        self._engines: list[OverlapEngine] = []
        self._halves = overlap(model, NanoFlow(rules), self._engines.append)
        self._ids = torch.arange(TOKENS[0] * TOKENS[1]).reshape(TOKENS) % 64
        self._part = torch.ones(*TOKENS, HIDDEN_SIZE)
        self._num_sums = 2 * num_layers

    def times(self, num_rounds: int) -> LinkTimes:
        """Run each form that often, by turns."""
        best_us = [float("inf")] * 3
        is_equal = True
        for _ in range(num_rounds):
            logits = []
            for index, form in enumerate((self._whole, self._halves)):
                dist.barrier()
                begin_ns = time.perf_counter_ns()
                logits.append(form(self._ids, use_cache=False).logits)
                best_us[index] = min(best_us[index], (time.perf_counter_ns() - begin_ns) / 1000)
            is_equal &= torch.equal(*logits)
            dist.barrier()
            begin_ns = time.perf_counter_ns()
            for _ in range(self._num_sums):
                summed(self._part, self._group)
            best_us[2] = min(best_us[2], (time.perf_counter_ns() - begin_ns) / 1000)
        (engine,) = self._engines
        assert all(engine.recordings.values()), "the batch was not split"
        return LinkTimes(*best_us, is_equal)


if __name__ == "__main__":
    main()
