"""`nanocp experts`: how even the load of experts is, where they are, and what moves.

Exit status: 1 if the service has no such loads, 2 if none answers.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Annotated, Any

import typer

from nanocp.cli.operate.status_port import OperatorKey, Refused, Target, fetch_json

_MAX_LAYERS, _MAX_EXPERTS = 5, 3


def experts(
    target: Target = "127.0.0.1:9464",
    as_json: Annotated[bool, typer.Option("--json", help="Print all layers as JSON.")] = False,
    operator_key: OperatorKey = "",
) -> None:
    """Show how even the load of experts is, layer by layer, and how experts follow it.

    `nanocp simulate --set experts=FILE` reads what --json prints.
    """
    try:
        found = fetch_json(target, "/cluster/experts", operator_key)
        if "why" in found:
            raise Refused(found["why"])
    except ValueError as error:
        print(f"nanocp experts: {error}", file=sys.stderr)
        raise typer.Exit(1 if isinstance(error, Refused) else 2) from None
    print(json.dumps(found) if as_json else "\n".join(lines_of(found)))


def lines_of(found: dict[str, Any]) -> list[str]:
    """The answer of /cluster/experts in lines: the worst layers first, then changes."""
    imbalances: list[float] = found["imbalances"]
    worst = sorted(range(len(imbalances)), key=lambda layer: -imbalances[layer])
    more = len(worst) - _MAX_LAYERS
    return [
        "load of the hottest instance over the mean, by MoE layer:",
        *(_layer(found, layer) for layer in worst[:_MAX_LAYERS]),
        *([f"{more} more layers are more even (--json has all)"] if more > 0 else []),
        *_changes(found),
    ]


def _layer(found: dict[str, Any], layer: int) -> str:
    table, loads, pairs = (found[name][layer] for name in ("table", "loads", "pairs"))
    if not (total := sum(loads)):
        return f"  layer {layer}: no row has come to its experts"
    num_slots, seats = found["num_slots"], found["seats"]
    hot = seats[max(range(len(seats)), key=pairs.__getitem__)]
    serving = [each for seat in seats for each in table[seat * num_slots : (seat + 1) * num_slots]]
    replicas = Counter(serving)
    held = {each for each in table[hot * num_slots : (hot + 1) * num_slots] if each >= 0}
    heaviest = sorted(held, key=lambda each: -loads[each] / replicas[each])[:_MAX_EXPERTS]
    named = ", ".join(
        f"{each} with {loads[each] / total:.1%} of the pairs"
        + (f" in {replicas[each]} replicas" if replicas[each] > 1 else "")
        for each in heaviest
    )
    num_empty = replicas.pop(-1, 0)
    return (
        f"  layer {layer}: {found['imbalances'][layer]:.2f} at instance {hot}; its hottest "
        f"experts: {named}; {num_empty} slots empty, {replicas.total() - len(replicas)} with "
        "replicas"
    )


def _changes(found: dict[str, Any]) -> list[str]:
    now = "no change is under way"
    if found["is_changing"]:
        now = "rows leave the slots of a change"
    if num := found["num_loading"]:
        now = f"instances load {num} experts"
    counts = ", ".join(f"{number} {outcome}" for outcome, number in found["changes"].items())
    failure = [f"the last change that failed: {found['failure']}"] if found["failure"] else []
    rate = f"at {found['expert_load_mb_per_s']} MB/s (cluster.expert_load_mb_per_s)"
    stay = (
        "experts stay where they are; cluster.redundant_experts and cluster.expert_load_mb_per_s "
        "let them follow the load (docs/use/experts.md)"
    )
    return [
        f"{now}; changes so far: {counts}",
        *failure,
        f"experts follow the load, {rate}" if found["is_on"] else stay,
    ]
