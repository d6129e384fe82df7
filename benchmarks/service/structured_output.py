"""What masks of structured output add to a step, on a real service.

Enters: a preset's checkpoint. Leaves: the processor time of a step with and without constraints
over that of a service whose structured output is off. Does not know: how a mask is made.

Processor time is the instance's, all its threads together: masks that are computed beside the step
count in full, and other work on the machine hardly counts.

32 streams decode greedily on one instance. Blocks of three measurements, in an order drawn anew:
structured output off, on without a constraint, on with one for each row (a schema, an expression or
a grammar, none of which ends by itself).
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from benchmarks.kit.bench import BenchRun, Claim, Interval, bench
from benchmarks.kit.service import checkpoint_of, random_prompts, step_cpu_ms
from nanocp.serve.process import serving

BATCH, PROMPT_LEN = 32, 200
MAX_WITH, MAX_WITHOUT = 1.05, 1.01
"""Claims: the processor time of a step over that with structured output off."""
_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "amount": {"type": "number"},
        "kind": {"enum": ["first", "second", "third"]},
    },
    "required": ["name", "amount", "kind"],
    "additionalProperties": False,
}
ENDLESS: tuple[Mapping[str, str], ...] = (
    {"json_schema": json.dumps({"type": "array", "items": _ITEM, "minItems": 10_000})},
    {"regex": r"([A-Z][a-z ]{10,60}\. ){1000}"},
    {"grammar": 'root ::= line root\nline ::= [a-z]+ "=" [0-9] [0-9]? [0-9]? "\\n"\n'},
)
"""Forms that leave the model a choice and do not end within a measurement."""
ROUNDS: Mapping[str, tuple[str, Sequence[Mapping[str, str]]]] = {
    "off": ("off", ({},)),
    "without": ("on", ({},)),
    "with": ("on", ENDLESS),
}
"""name -> (which service, constraints of its rows)."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """The processor time of a step over that of one whose service has something off."""

    rows: str
    """What of the service's is on, or which rows."""
    step_ms: float
    """Processor time with it off, the median."""
    ratio: float
    low: float
    high: float
    """The median over the blocks, and the interval that has it with 95%."""
    at_most: float
    num_blocks: int

    @classmethod
    def of(cls, step_ms: Mapping[str, Sequence[float]], rows: str, at_most: float) -> Ratio:
        """Compare steps of these rows with those of "off", block by block."""
        ratios = [one / off for one, off in zip(step_ms[rows], step_ms["off"], strict=True)]
        interval = Interval.of(ratios)
        return cls(rows, float(median(step_ms["off"])), *interval, at_most, len(ratios))

    def claim(self, what: str) -> Claim:
        """Judge the ratio by its interval. what: takes so much of the processor time."""
        off = f"of the processor time of {self.step_ms:.1f} ms"
        interval = Interval(self.ratio, self.low, self.high)
        return interval.at_most(f"{what} takes {{}} {off}", self.at_most)

    def result(self) -> dict[str, Any]:
        """One object for the results."""
        verdict = {True: "holds", False: "does not hold", None: "cannot be judged by this run"}
        return asdict(self) | {"verdict": verdict[self.claim("").holds]}


@bench("Under a minute: preset tiny, whose steps are short, 4 blocks; judges no claim.")
def main(run: BenchRun, blocks: Annotated[int, "Blocks of three measurements."] = 30) -> None:
    """Measure in turn, so that a drift of the machine meets all alike."""
    preset, num_blocks = ("tiny", 4) if run.is_quick else ("small", blocks)
    measured = measure(checkpoint_of(preset), num_blocks, run.say)
    ratios = [Ratio.of(measured, "with", MAX_WITH), Ratio.of(measured, "without", MAX_WITHOUT)]
    run.keep(*(ratio.result() for ratio in ratios), preset=preset)
    claims = (ratio.claim(f"{ratio.rows} constraints a step") for ratio in ratios)
    run.judge(claims, run.too_quick)


def in_turn(
    step_ms: Mapping[str, Callable[[int], float]], num_blocks: int, say: Callable[[str], None]
) -> dict[str, list[float]]:
    """Measure each way once a block, in an order drawn anew. step_ms: takes the block's number."""
    draw = random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in step_ms}
    for block in range(num_blocks):
        for name in draw.sample(list(step_ms), len(step_ms)):
            found[name].append(step_ms[name](block))
        latest = ", ".join(f"{name} {values[-1]:.2f}" for name, values in found.items())
        say(f"block {block + 1} of {num_blocks}: ms a step: {latest}")
    return found


def measure(
    checkpoint: Path, num_blocks: int, say: Callable[[str], None]
) -> dict[str, list[float]]:
    """Milliseconds of processor time of a step, for each of ROUNDS one value a block."""
    prompts = random_prompts(checkpoint, BATCH, PROMPT_LEN)
    settings = {"off": {"cluster.bounds.max_grammar_bytes": 0}, "on": {}}
    with contextlib.ExitStack() as held:
        services = {
            name: held.enter_context(
                serving(checkpoint, 1, {"data_plane.threads_per_instance": 1, **more}, ray=False)
            )
            for name, more in settings.items()
        }
        calls = {
            name: partial(step_cpu_ms, services[service], prompts, constraints=constraints)
            for name, (service, constraints) in ROUNDS.items()
        }
        for call in calls.values():  # The first tokens pay for compiling and page faults.
            call(8)
        return in_turn(
            {name: lambda _, call=call: call(32) for name, call in calls.items()}, num_blocks, say
        )


if __name__ == "__main__":
    main()
