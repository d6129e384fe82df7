"""What masks of structured output add to a step, on a real service.

    python benchmarks/structured_output.py [--quick] [--blocks N] [--json PATH]

Enters: a preset's checkpoint. Leaves: the processor time of a step with and without constraints
over that of a service whose structured output is off; exit status 1 if a claim does not hold. Does
not know: how a mask is made.

Processor time is the instance's, all its threads together: masks that are computed beside the step
count in full, and other work on the machine hardly counts.

32 streams decode greedily on one instance. Blocks of three measurements, in an order drawn anew:
structured output off, on without a constraint, on with one for each row (a schema, an expression or
a grammar, none of which ends by itself).
"""

from __future__ import annotations

import asyncio
import contextlib
import json as json_library
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import psutil
import typer
from intervals import median_interval
from machine import describe, write_results
from rich.console import Console
from service import checkpoint_of, decode, random_prompts

from nanocp.serve.process import Serving, serving

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
    {"json_schema": json_library.dumps({"type": "array", "items": _ITEM, "minItems": 10_000})},
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
    """The processor time of a step over that with structured output off."""

    rows: str
    """with or without a constraint."""
    step_ms: float
    """Processor time with structured output off, the median."""
    ratio: float
    low: float
    high: float
    """The median over the blocks, and the interval that has it with 95%."""
    at_most: float
    num_blocks: int

    @property
    def verdict(self) -> str:
        """holds, does not hold, or cannot be judged by this run."""
        if self.high <= self.at_most:
            return "holds"
        return "does not hold" if self.low > self.at_most else "cannot be judged by this run"


def main(
    quick: Annotated[
        bool, typer.Option(help="Under a minute: preset tiny, 4 blocks; judges no claim.")
    ] = False,
    blocks: Annotated[int, typer.Option(help="Blocks of three measurements.")] = 30,
    json: Annotated[
        Path | None, typer.Option(help="Write the results here, the machine beside it.")
    ] = None,
) -> None:
    """Measure in turn, so that a drift of the machine meets all alike."""
    console, load_before = Console(), os.getloadavg()[0]
    preset, num_blocks = ("tiny", 4) if quick else ("small", blocks)
    measured = measure(checkpoint_of(preset), num_blocks, console)
    results = [ratio_of(measured, "with", MAX_WITH), ratio_of(measured, "without", MAX_WITHOUT)]
    for result in results:
        console.print(
            f"{result.rows} constraints a step takes {result.ratio:.3f} of the processor time "
            f"({result.low:.3f} to {result.high:.3f}) of {result.step_ms:.1f} ms; "
            f"at most {result.at_most}: {result.verdict}"
        )
    if json is not None:
        machine = describe(load_before) | {"preset": preset}
        write_results(json, [asdict(r) | {"verdict": r.verdict} for r in results], machine)
    if quick:
        console.print("--quick: preset tiny, whose steps are short. The claims are about small.")
    elif any(result.verdict == "does not hold" for result in results):
        raise typer.Exit(1)


def measure(checkpoint: Path, num_blocks: int, console: Console) -> dict[str, list[float]]:
    """Milliseconds of processor time of a step, for each of ROUNDS one value a block."""
    prompts = random_prompts(checkpoint, BATCH, PROMPT_LEN)
    step_ms: dict[str, list[float]] = {name: [] for name in ROUNDS}
    draw = random.Random(0)
    with contextlib.ExitStack() as held:
        services = {
            "off": held.enter_context(
                _service(checkpoint, {"cluster.bounds.max_grammar_bytes": 0})
            ),
            "on": held.enter_context(_service(checkpoint, {})),
        }
        for name in ROUNDS:  # The first tokens pay for compiling and page faults.
            _step_ms(services, name, prompts, 8)
        for block in range(num_blocks):
            for name in draw.sample(list(ROUNDS), len(ROUNDS)):
                step_ms[name].append(_step_ms(services, name, prompts, 32))
            latest = ", ".join(f"{name} {values[-1]:.2f}" for name, values in step_ms.items())
            console.print(f"block {block + 1} of {num_blocks}: ms a step: {latest}")
    return step_ms


def ratio_of(step_ms: Mapping[str, Sequence[float]], rows: str, at_most: float) -> Ratio:
    """Steps of one of ROUNDS over those of "off", block by block."""
    off = np.array(step_ms["off"])
    ratios = np.array(step_ms[rows]) / off
    low, high = median_interval(ratios)
    median = float(np.median(ratios))
    return Ratio(rows, float(np.median(off)), median, low, high, at_most, len(ratios))


def _service(
    checkpoint: Path, settings: Mapping[str, object]
) -> contextlib.AbstractContextManager[Serving]:
    return serving(checkpoint, 1, {"data_plane.threads_per_instance": 1, **settings}, ray=False)


def _step_ms(
    services: Mapping[str, Serving], name: str, prompts: list[list[int]], num_tokens: int
) -> float:
    service, constraints = ROUNDS[name]
    (pid,) = services[service].instance_pids()
    cpu_s: list[float] = []

    def at_edge() -> None:
        times = psutil.Process(pid).cpu_times()
        cpu_s.append(times.user + times.system)

    steady = asyncio.run(
        decode(
            services[service].target,
            prompts,
            num_tokens,
            at_edge=at_edge,
            constraints=constraints,
        )
    )
    num_steps = (steady.end_s - steady.begin_s) * steady.tokens_per_s / BATCH
    return 1e3 * (cpu_s[1] - cpu_s[0]) / num_steps


if __name__ == "__main__":
    typer.run(main)
