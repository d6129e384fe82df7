"""Writes what gpu_attention and gpu_step measured as a cluster file's set of constants `measured`.

    python -m benchmarks.gpu.gpu_costs [--results DIR] [--cluster NAME_OR_PATH] [--base SET]
    [--backend NAME] --out FILE.yaml

Reads gpu_attention.json and gpu_step.json of DIR, with what is said there of machine and code.
FILE.yaml is the cluster file with the set in it; each constant has its source beside it. One card
has no wire and a step of one instance no peers: those constants are the base's, and say so. The
shapes measured are DeepSeek-V3's.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.kit import machine
from nanocp.simulator.costs.cluster_file import ClusterFile, Costs, cluster_path, load_cluster_file
from nanocp.simulator.fit.fit import fit, rounded

NAME = "measured"
ATTENTION, EXPERTS = ("flashmla", "triton"), "triton"
"""Whose attention counts, the first that was measured, and whose expert GEMMs: as `auto` takes."""
LAUNCHES = (*("put Q", "wait for nobody", "take Q", "put RES", "wait for nobody", "merge"),)
"""What an instance with links launches for its exchange; the merge takes the partials itself."""

Result = dict[str, Any]


def _line(
    what: str, points: Sequence[Result], loads: list[list[float]]
) -> tuple[tuple[float, ...], str]:
    """Fit the points' microseconds to their loads: the coefficients, and the source in words."""
    if len(points) < len(loads[0] if loads else " "):
        raise ValueError(
            f"{what}: {len(points)} results are too few to fit; run `make gpu-bench` to its end"
        )
    found = fit(loads, [point["us"] for point in points])
    return found.coefficients, f"{len(points)} points of {what}, median error {found.median:.0%}"


def exchange_costs(step: Sequence[Result], costs: Costs) -> tuple[Costs, str] | None:
    """Constants with a measured exchange and its source; None if its launches were not measured.

    The launches of a step's stream hide behind nothing. On one card there is no wire: the partials'
    way is the base's, and that of Q is taken to be behind own attention. Bytes of both ways are
    charged.
    """
    us = {r["backend"]: r["us"] for r in step if r["kind"] == "exchange"}
    if not us.keys() >= {*LAUNCHES}:
        return None
    launches_us, back_us = sum(us[name] for name in LAUNCHES), costs.exchange_us / 2
    source = (
        f"gpu_step: {', '.join(LAUNCHES)} {launches_us:.1f} us; attention_us of received rows; "
        f"partials' way {back_us:.1f} us, not measured on one card"
    )
    exchange_us = rounded(launches_us + costs.attention_us + back_us)
    return replace(costs, exchange_us=exchange_us, hides_queries=False), source


def expert_costs(gemms: Sequence[Result], file: ClusterFile, costs: Costs) -> tuple[Costs, str]:
    """Constants with measured expert GEMMs, and their source.

    With one number of experts, what does not grow with them is in weights_gb_per_s. With two it is
    left to other_us, which is what a whole step has beside the rest.
    """
    model = file.model
    what = f"gpu_attention, experts, {EXPERTS}, bf16 weights"
    counts = {r.get("experts") for r in gemms}
    if len(counts) > 1:
        loads = [[1, r["experts"], r["experts"] * r["rows"]] for r in gemms]
        (fixed_us, us_an_expert, us_a_visit), source = _line(what, gemms, loads)
        weights_mb, mflop = model.expert_mb, model.expert_mflop
        source += f"; {fixed_us:.1f} us of any number of experts are in other_us"
    else:
        (us_an_expert, us_a_visit), source = _line(what, gemms, [[1, r["rows"]] for r in gemms])
        weights_mb = model.expert_mb * model.num_experts / file.cluster.num_instances
        mflop = model.expert_mflop * model.experts_per_token
    return replace(
        costs,
        weights_gb_per_s=rounded(1e3 * weights_mb / max(us_an_expert, 1e-3)),
        gemm_tflops=rounded(mflop / max(us_a_visit, 1e-3)),
    ), source


def measured_costs(
    attention: Sequence[Result],
    step: Sequence[Result],
    file: ClusterFile,
    base: str,
    backend: str = "",
) -> tuple[Costs, dict[str, str]]:
    """(the constants, the source of each). attention, step: results of gpu_attention and gpu_step.

    backend: whose attention counts; empty: the first of ATTENTION that was measured. Raises
    ValueError if they lack what a constant is fitted to, or are of another model than the cluster
    file.
    """
    costs, model = file.costs_of(base), file.model
    sources = dict.fromkeys(asdict(costs), f"as {base}: not measured on one card")

    rows = [r for r in attention if r["kind"] == "attention" and r["kv"] == "bf16"]
    measured = {r["backend"] for r in rows}
    backend = backend or next((name for name in ATTENTION if name in measured), ATTENTION[-1])
    cells = [r for r in rows if r["backend"] == backend]
    (fixed_us, us_per_token, us_per_row), source = _line(
        f"gpu_attention, {backend}, bf16 KV",
        cells,
        [[1, r["batch"] * r["context"], r["batch"]] for r in cells],
    )
    costs = replace(
        costs,
        attention_us=rounded(fixed_us),
        attention_ps_per_token=rounded(1e6 * us_per_token),
        attention_ns_per_row=rounded(1e3 * us_per_row),
    )
    sources |= dict.fromkeys(
        ("attention_us", "attention_ps_per_token", "attention_ns_per_row"), source
    )

    gemms = [r for r in attention if r["kind"] == "experts" and r["backend"] == EXPERTS]
    # A row visits as many experts as an instance of the cluster has: each sees as many rows as the
    # mean instance.
    costs, source = expert_costs(gemms, file, costs)
    sources |= dict.fromkeys(("weights_gb_per_s", "gemm_tflops"), source)

    if (exchange := exchange_costs(step, costs)) is not None:
        costs, source = exchange
        sources |= dict.fromkeys(("exchange_us", "hides_queries"), source)

    rest = []
    for r in (r for r in step if r["kind"] == "step" and r["variant"] == backend):
        layers, moe_layers = r["layers"], r["moe_layers"]
        if (layers, moe_layers) != (model.num_layers, model.num_moe_layers):
            raise ValueError(
                f"gpu_step measured {layers} layers, {moe_layers} with experts; "
                f"the cluster file's model has {model.num_layers} and {model.num_moe_layers}"
            )
        attention_us = costs.layer_attention_us(r["rows"] * r["context"], r["rows"])
        known_us = (
            layers * attention_us
            + moe_layers * file.layer_expert_us(costs, r["rows"])
            + costs.step_us
        )
        rest.append({"rows": r["rows"], "us": (r["replay_us"] - known_us) / layers})
    if any(r["us"] <= 0 for r in rest):
        for name in ("other_us", "other_ns_per_row"):
            sources[name] = (
                f"as {base}: a step was shorter than its attention, experts and lm_head alone"
            )
        return costs, sources
    (fixed_us, us_per_row), source = _line(
        "gpu_step, less attention, experts and lm_head", rest, [[1, r["rows"]] for r in rest]
    )
    sources |= dict.fromkeys(("other_us", "other_ns_per_row"), source)
    return replace(
        costs, other_us=rounded(fixed_us), other_ns_per_row=rounded(1e3 * us_per_row)
    ), sources


def with_set(text: str, name: str, costs: Costs, sources: dict[str, str], origin: str) -> str:
    """Add a set to the text of a cluster file, whose last key is `costs`.

    A set of the same name is replaced.
    """
    text = re.sub(rf"(?m)^  {name}:.*\n(?:    .*\n)*", "", text.rstrip("\n") + "\n")
    lines = [f"  {name}:  # {origin}"]
    for name, value in asdict(costs).items():
        lines.append(f"    {name}: {json.dumps(value)}  # {sources[name]}")
    return text + "\n".join(lines) + "\n"


def origin_of(described: Result) -> str:
    """Turn a machine's description into the source of all that was measured there."""
    versions = described["versions"]
    code = described["commit"][:12] if described["commit"] else f"code {described['code']}"
    if described["has_local_changes"]:
        code += " with local changes"
    packages = ", ".join(
        f"{name} {versions[name]}" for name in ("torch", "triton") if name in versions
    )
    return (
        f"one {described['gpu']}, {packages}, {code}, {described['date'][:10]} "
        "(benchmarks/gpu/gpu_costs.py)"
    )


def main(
    out: Annotated[
        Path, typer.Option(help="The cluster file with the measured set; may be the one read.")
    ],
    results: Annotated[
        Path, typer.Option(help="Folder of gpu_attention.json and gpu_step.json.")
    ] = machine.ROOT / "benchmarks/results",
    cluster: Annotated[
        str, typer.Option(help="Cluster file: a name that ships, or a path.")
    ] = "h200x32-deepseek-v3",
    base: Annotated[
        str, typer.Option(help="The set that says what one card cannot.")
    ] = "operators",
    backend: Annotated[
        str, typer.Option(help="Whose attention counts: flashmla, triton. Default: as measured.")
    ] = "",
) -> None:
    """Write a cluster file with what was measured on a GPU."""
    try:
        file = load_cluster_file(cluster)
        found, origins = [], []
        for name in ("gpu_attention", "gpu_step"):
            path = results / f"{name}.json"
            if not path.exists():
                raise ValueError(
                    f"{path} is not there: `make gpu-bench` on a machine with a GPU writes it"
                )
            found.append(json.loads(path.read_text()))
            origins.append(origin_of(json.loads(path.with_suffix(".machine.json").read_text())))
        costs, sources = measured_costs(found[0], found[1], file, base, backend)
        text, origin = cluster_path(cluster).read_text(), "; ".join(dict.fromkeys(origins))
        out.write_text(with_set(text, NAME, costs, sources, origin))
        load_cluster_file(str(out))
    except (ValueError, OSError) as error:
        sys.exit(f"gpu_costs: {error}")
    for name, value in asdict(costs).items():
        print(f"{name}: {value}, {base} {getattr(file.costs_of(base), name)}  ({sources[name]})")


if __name__ == "__main__":
    typer.run(main)
