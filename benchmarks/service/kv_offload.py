"""What pages outside the frames save in conversations, and what they cost a step.

Enters: a preset's checkpoint. Leaves: prompt tokens that no prefill had to write, beside those that
were predicted; the processor time of a step with kv_offload over that without. Does not know: which
page is where.

Conversations take turns on a service with few frames, so that their pages leave the frames between
two rounds. The prediction counts each full page of a round's prompt that the round before had.

Processor time is the instance's, all its threads together: copies beside the step count in full.
Every block has new prompts, and each row fills at least one page that is stowed.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

from benchmarks.kit.bench import BenchRun, Claim, bench
from benchmarks.kit.service import checkpoint_of, random_prompts, step_cpu_ms
from benchmarks.service.structured_output import Ratio, in_turn
from nanocp.client import Client
from nanocp.serve.process import serving

BATCH, PROMPT_LEN, STEPS = 16, 20, 64
MAX_TOKENS = 2000
"""Enough for what the first row generates while prompts of others are computed."""
MAX_STEP = 1.03
"""Claim: the processor time of a step over that without kv_offload."""
PAGE = 64
HITS = ("nanocp:kv_offload_hits_total", "nanocp:prefix_cache_hits_total")


@bench("Under a minute: preset tiny, whose steps are short, 3 blocks; judges no step.")
def main(run: BenchRun, blocks: Annotated[int, "Blocks of two measurements."] = 20) -> None:
    """Play conversations, then measure steps in turn."""
    saved = converse(checkpoint_of("tiny"), *((4, 3) if run.is_quick else (12, 5)))
    is_equal = saved["saved"] == saved["predicted"] and saved["outside"] > 0
    what = (
        f"{saved['rounds']} rounds: {saved['saved']} of {saved['prompt_tokens']} prompt tokens "
        f"were there, predicted {saved['predicted']}; {saved['outside']} came from outside frames"
    )
    run.judge([Claim(what, is_equal)])
    preset, num_blocks = ("tiny", 3) if run.is_quick else ("small", blocks)
    step = Ratio.of(measure(checkpoint_of(preset), num_blocks, run.say), "on", MAX_STEP)
    run.keep(saved, step.result(), preset=preset)
    run.judge([step.claim("with kv_offload a step")], run.too_quick)


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


def measure(
    checkpoint: Path, num_blocks: int, say: Callable[[str], None]
) -> dict[str, list[float]]:
    """Milliseconds of processor time of a step, without kv_offload and with it, one a block."""
    settings = {"data_plane.threads_per_instance": 1, "cluster.num_frames": 528}
    more = {"off": {}, "on": {"kv_offload.host_gib": 1.0}}
    with contextlib.ExitStack() as held:
        services = {
            name: held.enter_context(
                serving(checkpoint, 1, settings | each, ray=False, synthetic_kv=False)
            )
            for name, each in more.items()
        }

        def step_ms(name: str, seed: int, num_tokens: int = STEPS) -> float:
            prompts = random_prompts(checkpoint, BATCH, PROMPT_LEN, seed)
            return step_cpu_ms(services[name], prompts, num_tokens, MAX_TOKENS)

        for name in services:  # The first tokens pay for compiling and page faults.
            step_ms(name, 999, 8)
        return in_turn({name: partial(step_ms, name) for name in services}, num_blocks, say)


if __name__ == "__main__":
    main()
