"""What pages outside the frames save in conversations, and what they cost a step.

    python benchmarks/kv_offload.py [--quick] [--blocks N] [--json PATH]

Enters: a preset's checkpoint. Leaves: prompt tokens that no prefill had to write, beside those that
were predicted; the processor time of a step with kv_offload over that without; exit status 1 if a
claim does not hold, 2 if a step cannot be judged. Does not know: which page is where.

Conversations take turns on a service with few frames, so that their pages leave the frames between
two rounds. The prediction counts each full page of a round's prompt that the round before had.

Processor time is the instance's, all its threads together: copies beside the step count in full.
Every block has new prompts, and each row fills at least one page that is stowed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import psutil
import typer
from machine import describe, write_results
from measured_twice import CANNOT_JUDGE
from rich.console import Console
from service import checkpoint_of, decode, random_prompts
from structured_output import ratio_of

from nanocp.client import Client
from nanocp.serve.process import Serving, serving

BATCH, PROMPT_LEN, STEPS = 16, 20, 64
MAX_TOKENS = 2000
"""Enough for what the first row generates while prompts of others are computed."""
MAX_STEP = 1.03
"""Claim: the processor time of a step over that without kv_offload."""
PAGE = 64
HITS = ("nanocp:kv_offload_hits_total", "nanocp:prefix_cache_hits_total")


def main(
    quick: Annotated[
        bool, typer.Option(help="Under a minute: preset tiny, 3 blocks; judges no step.")
    ] = False,
    blocks: Annotated[int, typer.Option(help="Blocks of two measurements of a step.")] = 20,
    json: Annotated[
        Path | None, typer.Option(help="Write the results here, the machine beside it.")
    ] = None,
) -> None:
    """Play conversations, then measure steps in turn."""
    console, load_before = Console(), os.getloadavg()[0]
    saved = converse(checkpoint_of("tiny"), *((4, 3) if quick else (12, 5)))
    console.print(
        f"{saved['rounds']} rounds: {saved['saved']} of {saved['prompt_tokens']} prompt tokens "
        f"were there, predicted {saved['predicted']}; {saved['outside']} came from outside frames"
    )
    preset, num_blocks = ("tiny", 3) if quick else ("small", blocks)
    step = ratio_of(measure(checkpoint_of(preset), num_blocks, console), "on", MAX_STEP)
    console.print(
        f"with kv_offload a step takes {step.ratio:.3f} of the processor time ({step.low:.3f} to "
        f"{step.high:.3f}) of {step.step_ms:.1f} ms; at most {MAX_STEP}: {step.verdict}"
    )
    if json is not None:
        machine = describe(load_before) | {"preset": preset}
        write_results(json, [saved, asdict(step) | {"verdict": step.verdict}], machine)
    is_equal = saved["saved"] == saved["predicted"] and saved["outside"] > 0
    console.print(f"{'holds' if is_equal else 'DOES NOT HOLD'}: exactly the predicted tokens")
    if quick:
        console.print("--quick: preset tiny, whose steps are short. The claim is about small.")
    if not is_equal or (not quick and step.verdict == "does not hold"):
        raise typer.Exit(1)
    if not quick and step.verdict != "holds":
        raise typer.Exit(CANNOT_JUDGE)


def converse(checkpoint: Path, num_conversations: int, num_rounds: int) -> dict[str, int]:
    """Let conversations take turns, and count what their prompts found."""
    draw = random.Random(0)
    histories = random_prompts(checkpoint, num_conversations, 90)
    settings = {"cluster.num_frames": 12, "kv_offload.host_gib": 0.25}
    result = dict.fromkeys(("rounds", "prompt_tokens", "predicted"), 0)
    with serving(checkpoint, 2, settings, ray=False, synthetic_kv=False) as service:
        with Client(service.target) as client:
            for number in range(num_rounds):
                for history in histories:
                    if number:
                        # The last token of the answer has no KV.
                        result["predicted"] += (len(history) - 1) // PAGE * PAGE
                        history += random_prompts(checkpoint, 1, draw.randrange(5, 60), number)[0]
                    result["rounds"] += 1
                    result["prompt_tokens"] += len(history)
                    answer = client.generate(
                        list(history), max_tokens=70, temperature=0.0, ignore_eos=True
                    )
                    history += [token for chunk in answer for token in chunk.token_ids]
        outside, inside = (round(service.metrics()[name, ""]) for name in HITS)
    return result | {"saved": outside + inside, "outside": outside}


def measure(checkpoint: Path, num_blocks: int, console: Console) -> dict[str, list[float]]:
    """Milliseconds of processor time of a step, without kv_offload and with it, one a block."""
    step_ms: dict[str, list[float]] = {"off": [], "on": []}
    draw = random.Random(0)
    with contextlib.ExitStack() as held:
        services = {
            "off": held.enter_context(_service(checkpoint, {})),
            "on": held.enter_context(_service(checkpoint, {"kv_offload.host_gib": 1.0})),
        }
        for service in services.values():  # The first tokens pay for compiling and page faults.
            _step_ms(service, random_prompts(checkpoint, BATCH, PROMPT_LEN, 999), 8)
        for block in range(num_blocks):
            prompts = random_prompts(checkpoint, BATCH, PROMPT_LEN, block)
            for name in draw.sample(list(services), 2):
                step_ms[name].append(_step_ms(services[name], prompts, STEPS))
            latest = ", ".join(f"{name} {values[-1]:.2f}" for name, values in step_ms.items())
            console.print(f"block {block + 1} of {num_blocks}: ms a step: {latest}")
    return step_ms


def _service(
    checkpoint: Path, settings: Mapping[str, object]
) -> contextlib.AbstractContextManager[Serving]:
    more = {"data_plane.threads_per_instance": 1, "cluster.num_frames": 528, **settings}
    return serving(checkpoint, 1, more, ray=False, synthetic_kv=False)


def _step_ms(service: Serving, prompts: list[list[int]], num_tokens: int) -> float:
    (pid,) = service.instance_pids()
    cpu_s: list[float] = []

    def at_edge() -> None:
        times = psutil.Process(pid).cpu_times()
        cpu_s.append(times.user + times.system)

    steady = asyncio.run(decode(service.target, prompts, num_tokens, MAX_TOKENS, at_edge))
    num_steps = (steady.end_s - steady.begin_s) * steady.tokens_per_s / BATCH
    return 1e3 * (cpu_s[1] - cpu_s[0]) / num_steps


if __name__ == "__main__":
    typer.run(main)
