"""`nanocp overlap run`: a checkpoint in the order of a policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging.handlers import BufferingHandler
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from nanocp.config.choices import Positive, none_of

_NUM_FORWARDS = 5
_TAGS = (("Attention", "attention"), ("Experts", "experts"), ("MLP", "shared"))
"""The end of a class's name, and the tag of its modules."""
_ORDERS = ("sequential", "single_batch_overlap", "nanoflow", "dual_batch_overlap")


@dataclass(frozen=True, slots=True)
class Batch:
    """Random prompts."""

    rows: Positive = 16
    """Prompts of the batch."""
    tokens: Positive = 32
    """Tokens of each."""
    inductor: bool = False
    """Compile operators, and the model beside them."""


def run(
    checkpoint: Annotated[Path, typer.Argument(help="A Hugging Face folder for transformers.")],
    batch: Batch,
    policy: Annotated[
        str,
        typer.Option(help=f"{', '.join(_ORDERS)}, or a .yaml of overlap search --cluster."),
    ] = "nanoflow",
) -> None:
    """Run a checkpoint in the order of a policy (DynaFlow), and beside it as it is.

    A GPU is taken if there is one: only there they run side by side. Needs the extra serve, and a
    checkpoint, such as nanocp make-checkpoint writes.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from nanocp.overlap.engine.backend import overlap
    from nanocp.overlap.engine.engine import OverlapEngine
    from nanocp.overlap.ops import SplitModule
    from nanocp.overlap.policies.orders import Sequential

    order_of = _order(policy)
    if not (checkpoint / "config.json").is_file():
        raise ValueError(f"{checkpoint} has no config.json; nanocp make-checkpoint writes one")
    disable_progress_bar()
    loaded: Any = AutoModelForCausalLM.from_pretrained(checkpoint, local_files_only=True)
    model = loaded.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    classes = dict.fromkeys(map(type, model.modules()))
    tags = {each: tag for each in classes for end, tag in _TAGS if each.__name__.endswith(end)}
    order = order_of([SplitModule(each, tag) for each, tag in tags.items()])
    engines: list[OverlapEngine] = []
    mine = overlap(model, order, engines.append, batch.inductor)
    plain = overlap(model, Sequential(), inductor=True) if batch.inductor else model
    torch.manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (batch.rows, batch.tokens), device=model.device)
    logging.getLogger("nanocp.overlap.engine").addHandler(warned := BufferingHandler(1000))
    logits, best_ms, copied = [ids, ids], [inf, inf], [0]
    for number in (0, 1) * (1 + _NUM_FORWARDS):
        begin_s = perf_counter()
        with torch.no_grad():
            logits[number] = (mine, plain)[number](ids, use_cache=False).logits
        if ids.is_cuda:
            torch.cuda.synchronize()
        best_ms[number] = min(best_ms[number], 1e3 * (perf_counter() - begin_s))
        copied.append(sum(each.num_copied_bytes for each in engines))
    reasons = [each.getMessage() for each in warned.buffer]
    if not reasons and not any(made for each in engines for made in each.recordings.values()):
        reasons = ["all: the policy neither splits this batch nor runs anything beside it"]
    apart = float((logits[0] - logits[1]).abs().max())
    num_operators = sum(len(each.program.operators) for each in engines)
    for name, said in {
        "operators": f"{num_operators}; cut: {', '.join(each.__name__ for each in tags)}",
        "logits": f"at most {apart:.1e} apart" if apart else "equal in every bit",
        "forward": "{:.1f} ms, the model itself {:.1f} ms".format(*best_ms),
        "copied": f"{copied[-1] - copied[-3]:,} bytes a forward",
        "in program order": "\n".join(reasons) or "nothing",
    }.items():
        print(f"{name:17} {said}")


def _order(name: str) -> Callable[[Sequence[Any]], Any]:
    """The policy of a name, or of a schedule's file, by its rules. Raises ValueError."""
    from nanocp.overlap import schedule as schedules
    from nanocp.overlap.policies.registry import POLICIES
    from nanocp.overlap.policies.scheduled import Scheduled
    from nanocp.simulator.costs import nano_batches
    from nanocp.simulator.costs.cluster_file import load_cluster_file
    from nanocp.simulator.costs.cost import CostModel

    if name in ("token_weave", "flux", "comet"):
        raise ValueError(f"--policy {name} needs a fused kernel, which no checkpoint brings")
    if not name.endswith(".yaml"):
        if name not in _ORDERS:
            raise ValueError(f"--policy is {name!r}; {none_of(name, _ORDERS)}, or a .yaml")
        return POLICIES[name]
    case = schedules.case_of(Path(name))
    cluster, constants = case.get("cluster"), case.get("constants")
    if cluster is None or constants is None:
        raise ValueError(f"--policy {name} was not made by nanocp overlap search --cluster")
    model = CostModel(load_cluster_file(cluster), constants)
    schedule = nano_batches.read(Path(name), cluster, constants, model)
    names = {slot.nano.operation.name for slot in schedule.slots}
    return lambda rules: Scheduled([each for each in rules if each.tag in names], schedule)
