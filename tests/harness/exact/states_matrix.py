"""Play every story of every model with states at any depth, window and kernels, resumable.

    PYTHONPATH=tests python -m harness.exact.states_matrix --progress states_matrix.jsonl
    PYTHONPATH=tests python -m harness.exact.states_matrix --only 'ling chaos'

A cell is a family, a story, a depth (newest tokens that are never folded), the steps of a window
and the kernels. One line of JSON is written for each, with the code that played it; cells whose
last line is of the present code and has no error are not played again. Tokens are judged by one
forward of `transformers` over prompt and output, and compared with its cached generation. At depths
other than 1 the step of a linear attention layer itself is torch's, whatever the kernels. Exits 1
if a token was wrong, or a cell failed or was not played.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

from harness.exact.decode_cluster import Prompt
from harness.exact.exact_runs import judge
from harness.exact.exact_stories import STORIES
from harness.exact.models import Model, makes_models
from harness.paths import present_code

FAMILIES = ("tiny-qwen3-next", "tiny-qwen3.5", "tiny-kimi-linear", "tiny-ling")
DEPTHS = (1, 4)
WINDOWS = (1, 4)
KERNELS = ("torch", "native")


class Cell(NamedTuple):
    """One story as it is played once."""

    family: str
    story: str
    depth: int
    num_steps: int
    kernels: str

    @property
    def name(self) -> str:
        """What a line of the progress file calls it."""
        return " ".join(map(str, self))

    @property
    def settings(self) -> dict[str, Any]:
        """What the story is played with, by name."""
        return {
            "depth": self.depth, "steps_per_window": self.num_steps, "cpu_kernels": self.kernels,
        }  # fmt: skip


CELLS = [Cell(*each) for each in product(FAMILIES, STORIES, DEPTHS, WINDOWS, KERNELS)]


class Judge:
    """A family's checkpoint and reference; equal outputs of equal prompts are judged once."""

    def __init__(self, model: Model) -> None:
        self.checkpoint, self._oracle = model.path, model.oracle
        self._generated: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def counts(self, prompts: list[Prompt]) -> dict[str, int]:
        """Count tokens, wrong ones and near-ties; and outputs that cached generation has not."""
        counts: Counter[str] = Counter(tokens=0, wrong=0, near_ties=0, unlike_cached=0)
        for prompt in prompts:
            key = tuple(prompt.ids), tuple(prompt.output)
            verdict, num = judge(self._oracle, *key), prompt.params.max_tokens
            counts["tokens"] += len(prompt.output)
            counts["wrong"] += (not verdict.exact) + (len(prompt.output) != num)
            counts["near_ties"] += verdict.near_ties
            counts["unlike_cached"] += prompt.output != self._cached(key[0], num)
            counts["bindings"] += len({placement.moe_binding for placement in prompt.placements})
            counts["preemptions"] += prompt.num_preemptions
        return dict(counts)

    def _cached(self, prompt_ids: tuple[int, ...], num_tokens: int) -> list[int]:
        key = prompt_ids, num_tokens
        if key not in self._generated:
            self._generated[key] = _generate(self._oracle._model, prompt_ids, num_tokens)
        return self._generated[key]


@torch.inference_mode()
def _generate(model: Any, prompt_ids: tuple[int, ...], num_tokens: int) -> list[int]:
    """Greedy tokens of a model of `transformers`, one after another over its cache."""
    output_ids: list[int] = []
    given, past = torch.tensor([prompt_ids]), None
    for _ in range(num_tokens):
        out = model(given, past_key_values=past, use_cache=True, logits_to_keep=1)
        given, past = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
        output_ids.append(int(given))
    return output_ids


def main() -> int:
    """Play the cells that are missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="words that a cell's name must have, all of them"
    )
    parser.add_argument("--progress", type=Path, default=Path("states_matrix.jsonl"))
    arguments = parser.parse_args()
    code, wanted = present_code(), arguments.only.split()
    cells = [cell for cell in CELLS if all(word in cell.name for word in wanted)]
    texts = arguments.progress.read_text().splitlines() if arguments.progress.exists() else []
    lines = {line["cell"]: line for line in map(json.loads, filter(None, texts))}
    lines = {name: line for name, line in lines.items() if line["code"] == code}
    with tempfile.TemporaryDirectory() as folder, arguments.progress.open("a") as file:
        models = makes_models(Path(folder))
        judges = cache(lambda family: Judge(models(family)))
        for cell in Random(0).sample(cells, len(cells)):  # a part of them has all of everything
            if "error" in lines.get(cell.name, {"error": "not played"}):
                lines[cell.name] = line = _played(cell, judges) | {"code": code}
                print(json.dumps(line), file=file, flush=True)
                if line.get("wrong") or "error" in line:
                    print(line, flush=True)
    totals: Counter[str] = Counter()
    of_cells = [lines[cell.name] for cell in cells]
    for line in of_cells:
        totals.update({key: value for key, value in line.items() if isinstance(value, int)})
    num_failed = sum("error" in line for line in of_cells)
    print(f"{len(of_cells)} cells, {num_failed} failed: {dict(totals)}")
    return bool(num_failed or totals["wrong"])


def _played(cell: Cell, judges: Any) -> dict[str, Any]:
    begin_s, line = time.process_time(), {"cell": cell.name}
    try:
        of_family = judges(cell.family)
        line |= of_family.counts(STORIES[cell.story](of_family.checkpoint, **cell.settings))
    except Exception as raised:
        line["error"] = f"{type(raised).__name__}: {raised}"
    return line | {"cpu_s": round(time.process_time() - begin_s, 2)}


if __name__ == "__main__":
    sys.exit(main())
