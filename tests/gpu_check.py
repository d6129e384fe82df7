"""Checks on this machine's GPU what the CPU tests can only interpret.

    PYTHONPATH=. python3 tests/gpu_check.py [--json PATH] [--limit-s 450]

Every kernel against its reference; whole steps, eager and captured, against `transformers`; the
exchange between instances and processes on one card; installed packages against the signatures that
are pinned here.

Needs torch, Triton and, for tokens, transformers; no pytest, no network, no Ray. Prints a line for
each check; the exit status is 1 if one fails. A check that passed according to PATH is not run
again, so a run that ended at its limit goes on where it stopped. A check that faults on the device
ends all GPU work of its process: the later checks run in another process.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

# Streams of several instances on one card need a queue each. Kernels are loaded before one of them
# can spin.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import torch

from benchmarks.kit import machine
from data_plane.startup.experimental.nvshmem_put import device_library
from harness.gpu.check_run import run
from harness.gpu.gpu_exchange_checks import (
    FULL_WIDTHS,
    captured_exchange,
    exchange_between_processes,
    exchange_checks,
)
from harness.gpu.gpu_kernel_checks import (
    attention_checks,
    captured_lengths_change,
    fused_checks,
    merge_and_expert_checks,
    package_checks,
    pages_in_pinned_memory,
)
from harness.gpu.gpu_layer_checks import layer_checks
from harness.gpu.gpu_loss_checks import survives_a_kill
from harness.gpu.gpu_token_checks import reference_checks


def all_checks():
    """Yield (name, check) of all checks; a fault of one would explain those after it."""
    yield from layer_checks("cuda")
    yield from attention_checks("cuda", (512, 64), 128)
    yield from merge_and_expert_checks("cuda")
    yield from exchange_checks("cuda", 4, 8, FULL_WIDTHS)
    yield "routed exchange, captured, a stream each", captured_exchange
    yield "a captured step with new lengths", captured_lengths_change
    yield "pages in pinned memory", pages_in_pinned_memory
    if find_spec("transformers") is None:
        print("no tokens are compared: transformers is not installed")
    else:
        with tempfile.TemporaryDirectory() as directory:
            yield from reference_checks(Path(directory))
            if find_spec("msgspec") is not None:  # rows are encoded as in a service
                from harness.gpu.gpu_drafts import draft_checks

                yield from draft_checks(Path(directory))
            yield (
                "tokens, one of two is killed and a third comes",
                lambda: one_is_killed(Path(directory)),
            )
    yield "routed exchange between two processes", exchange_between_processes
    # Without MPS NVSHMEM makes no teams of two processes on a card.
    if device_library() is not None and "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield "puts by NVSHMEM between two processes", partial(exchange_between_processes, True)
    yield from package_checks()
    yield from fused_checks("cuda")


def is_named(each, words):
    """Whether one of the words is in the check's name."""
    return any(word in each[0] for word in words)


def one_is_killed(checkpoint):
    """Kill one of two processes on this card inside a step, and let another one come."""
    from data_plane.reference.oracle import Oracle

    survives_a_kill(checkpoint, Oracle(checkpoint))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument(
        "--limit-s", type=int, default=450, help="begin no further check after this time"
    )
    parser.add_argument(
        "--only",
        metavar="WORD",
        action="append",
        default=[],
        help="run checks with it in their name",
    )
    parser.add_argument(
        "--after",
        metavar="CHECK",
        help="go on after this check, by which another process lost the device",
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(
            "gpu_check: no NVIDIA GPU is here (torch sees none); run it on a machine that has one"
        )
    torch.backends.cuda.matmul.allow_tf32 = False

    described = machine.describe(os.getloadavg()[0]) | {"gpu": torch.cuda.get_device_name()}

    def keep(results):
        if options.json:
            machine.write_results(options.json, results, described)

    deadline = time.monotonic() + options.limit_s
    checks = (each for each in all_checks() if not options.only or is_named(each, options.only))
    results = run(checks, machine.read_results(options.json), deadline, keep, options.after)
    is_lost = bool(results) and results[-1].pop("is_lost", False)
    keep(results)
    if is_lost:
        run_the_rest(results[-1]["check"], options, deadline)
    sys.exit(any(result["error"] for result in results))


def run_the_rest(lost_at, options, deadline):
    """Run the checks after the one that lost the device, in another process."""
    if options.json is None:
        print("this process has lost the device; with --json the other checks would run in another")
        return
    left_s = str(max(0, round(deadline - time.monotonic())))
    command = [sys.executable, __file__, "--json", options.json, "--limit-s", left_s]
    command += ["--after", lost_at, *(f"--only={word}" for word in options.only)]
    subprocess.run(command, check=False)


if __name__ == "__main__":
    main()
