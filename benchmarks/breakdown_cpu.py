"""Where the time of a decode step goes: samples of a running instance's stack, by what it did.

    python benchmarks/breakdown_cpu.py [--instances N] [--dtype D] [--batch B] [--preset P]
    [--kernels K] [--json PATH]

Enters: a preset's checkpoint. Leaves: shares of the decode thread's time. Does not know: how long a
step takes. py-spy (part of `ray[default]`) takes the samples from outside: the instance runs as it
always does.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from machine import describe, write_results
from rich.console import Console
from rich.table import Table
from service import checkpoint_of, decode, random_prompts

from nanocp.serve.process import Serving, serving
from nanocp.values.plan import PAGE_SIZE

PROMPT_LEN = 200
MAX_TOKENS = 1024
"""Limit of each request: more than it generates while the samples are taken."""
SAMPLES_PER_S = 100
DECODE_LOOP = "(data_plane/member/instance_runner.py"

KINDS = {
    "waiting for peers": ("_wait_for_flag",),
    "waiting for the controller": ("get (queue.py",),
    "experts": ("visit_experts",),
    "dispatch and combine": ("dispatch", "run_experts"),
    "gate": ("gate (",),
    "attention": (
        "paged_attention",
        "AttentionPlan",
        "(data_plane/attention",
        "run (data_plane/native",
    ),
    "query, KV and output projections": (
        "attention_rows",
        "attention_queries",
        "finish_attention",
        "after_attention",
        "_merged",
    ),
    "dense and shared MLP": ("gated_mlp",),
    "lm_head": ("logits (",),
    "norms": ("rms_norm",),
    "Q and result exchange": ("_send_q", "_answer_received"),
    "append to frames": ("append (",),
    "routes and tables of the step": ("_Routes", "LocalStep", "replay (", "_load_row_state"),
    "sampling": ("_sample",),
    "the rest of the step": ("run (data_plane/step/cpu.py",),
    "begin: plan and staging": ("begin (",),
    "messages and tokens": ("_between_steps", "_deliver", "_take"),
}
"""Kind -> marks in a frame's text "function (file:line)". From the innermost frame outwards, the
first mark wins."""


def main(
    instances: Annotated[
        int, typer.Option(help="Instances of the service; instance 0 is sampled.")
    ] = 1,
    dtype: Annotated[str, typer.Option(help="data_plane.dtype")] = "float32",
    batch: Annotated[int, typer.Option(help="Requests at once.")] = 32,
    preset: Annotated[str, typer.Option(help="Of the checkpoint.")] = "small",
    kernels: Annotated[
        str, typer.Option(help="data_plane.cpu_kernels: auto, torch or native.")
    ] = "auto",
    seconds: Annotated[int, typer.Option(help="How long to sample.")] = 8,
    json: Annotated[
        Path | None, typer.Option(help="Write the results here, the machine beside it.")
    ] = None,
) -> None:
    """Decode, sample, count."""
    console, load_before = Console(), os.getloadavg()[0]
    checkpoint = checkpoint_of(preset)
    pages = -(-(PROMPT_LEN + MAX_TOKENS) // PAGE_SIZE)
    settings = {
        "data_plane.dtype": dtype,
        "data_plane.cpu_kernels": kernels,
        "cluster.num_frames": batch * pages,
    }
    with (
        console.status(f"{instances} x {preset}, {dtype}, batch {batch}"),
        serving(checkpoint, instances, settings, ray=False) as service,
    ):
        stacks = asyncio.run(
            _sample(service, random_prompts(checkpoint, batch, PROMPT_LEN), seconds)
        )
    kinds = shares(stacks)
    table = Table(title=f"decode thread of instance 0 of {instances}, {dtype}, batch {batch}")
    table.add_column("doing")
    table.add_column("share", justify="right")
    for kind, share in kinds.items():
        table.add_row(kind, f"{share:.1%}")
    console.print(table)
    if json is not None:
        results = [{"doing": kind, "share": round(share, 4)} for kind, share in kinds.items()]
        setting = {
            "preset": preset,
            "instances": instances,
            "dtype": dtype,
            "batch": batch,
            "kernels": kernels,
        }
        write_results(json, results, describe(load_before) | setting)


async def _sample(service: Serving, prompts: list[list[int]], seconds: int) -> list[str]:
    """Sample instance 0 with py-spy while every request runs: "outermost;...;innermost count"."""
    steady = asyncio.Event()
    decoding = asyncio.create_task(
        decode(service.target, prompts, MAX_TOKENS, MAX_TOKENS, steady.set)
    )
    try:
        await asyncio.wait(
            {decoding, asyncio.create_task(steady.wait())}, return_when=asyncio.FIRST_COMPLETED
        )
        if decoding.done():
            decoding.result()
        with tempfile.NamedTemporaryFile("r") as output:
            pyspy = Path(sys.executable).with_name("py-spy")
            options = [
                "--format",
                "raw",
                "--idle",
                "--rate",
                str(SAMPLES_PER_S),
                "--duration",
                str(seconds),
            ]
            pid = str(service.instance_pids()[0])
            process = await asyncio.create_subprocess_exec(
                str(pyspy),
                "record",
                *options,
                "--pid",
                pid,
                "--output",
                output.name,
                stdout=subprocess.DEVNULL,
            )
            if await process.wait():
                raise RuntimeError(
                    f"py-spy ended with status {process.returncode}; it needs the right to ptrace"
                )
            return Path(output.name).read_text().splitlines()
    finally:
        decoding.cancel()
        await asyncio.gather(decoding, return_exceptions=True)


def shares(stacks: Iterable[str]) -> dict[str, float]:
    """Compute each kind's share of the decode thread's samples, largest first.

    Other threads' stacks are passed over.
    """
    counts: Counter[str] = Counter()
    for line in stacks:
        stack, _, count = line.rpartition(" ")
        if DECODE_LOOP in stack and "_watch_ring" not in stack:
            counts[kind_of(stack.split(";"))] += int(count)
    total = counts.total()
    return {kind: count / total for kind, count in counts.most_common()}


def kind_of(frames: list[str]) -> str:
    """What a stack was doing."""
    for frame in reversed(frames):
        for kind, marks in KINDS.items():
            if any(mark in frame for mark in marks):
                return kind
    return "other"


if __name__ == "__main__":
    typer.run(main)
