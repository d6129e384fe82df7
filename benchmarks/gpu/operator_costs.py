"""Writes what others measured of single operators as a cluster file's set of constants `operators`.

    python -m benchmarks.gpu.operator_costs [--read-package]

The points are those of aiconfigurator-core (NVIDIA, Apache-2.0), in traces/operators.json; only
--read-package needs the package, 114 MB of tables, and takes the points from it again:
`pip install -e '.[calibrate]'`. Each constant has its table, its number of points and its error
beside it. The shapes are DeepSeek-V3's. Kernels are SGLang's, the first of its versions in the
package that has the table.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.gpu.gpu_costs import with_set
from benchmarks.kit import machine
from nanocp.simulator.costs.cluster_file import ClusterFile, Costs, cluster_path, load_cluster_file
from nanocp.simulator.fit.fit import Fit, fit, rounded

NAME, POINTS = "operators", Path(__file__).parents[1] / "traces/operators.json"
CLUSTERS = {
    "h200_sxm": "h200x32-deepseek-v3",
    "h100_sxm": "h100x32-deepseek-v3",
    "b200_sxm": "b200x32-deepseek-v3",
}
"""The package's name of a system -> the cluster file."""
OF_OTHERS = "h200_sxm"
"""A system without a table of its own has this one's."""
HEADS, HIDDEN, VOCABULARY, NODE = 128, 7168, 129_280, 8
MOST_ROWS = 256
_HEAD_ROWS = 64

Points = list[list[float]]
Tables = Mapping[str, Mapping[str, Any]]


class _Package:
    """The tables of the installed package, of one system."""

    def __init__(self, system: str) -> None:
        import importlib.util

        found = importlib.util.find_spec("aiconfigurator_core")
        if found is None or not found.submodule_search_locations:
            raise ValueError("aiconfigurator-core is missing; pip install -e '.[calibrate]'")
        self._data = Path(found.submodule_search_locations[0]) / "systems/data"
        self._system = system

    def tables(self, kind: str, name: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """(path, rows) of a table in SGLang's versions, newest first."""
        import pyarrow.parquet as parquet

        paths = (self._data / self._system / kind / "sglang").glob(f"*/{name}_perf.parquet")
        for path in sorted(paths, key=_version, reverse=True):
            yield str(path.relative_to(self._data)), parquet.read_table(path).to_pylist()

    def points(self) -> dict[str, dict[str, Any]]:
        """What the constants are fitted to: rows and microseconds of each operator."""
        us = 1e3  # the tables have milliseconds
        found: dict[str, dict[str, Any]] = {}

        def keep(what: str, table: str, points: Iterator[list[float]]) -> None:
            unique = {tuple(point[:-1]): point for point in points}
            found[what] = {"table": table, "points": sorted(unique.values())}

        for path, rows in self.tables("mla", "generation_mla"):
            chosen = (
                [r["batch_size"], r["step"] + 1, us * r["latency"]]
                for r in reversed(rows)
                if (r["num_heads"], r["tp_size"], r["kv_cache_dtype"]) == (HEADS, 1, "bfloat16")
                and r["batch_size"] <= MOST_ROWS
                and r["step"] >= 511
            )
            keep("attention", path, chosen)
            break
        for path, rows in self.tables("mla", "wideep_generation_mla"):
            kinds = sorted({r["kernel_source"] for r in rows})
            kind = "fa3" if "fa3" in kinds else kinds[0]
            chosen = (
                [r["batch_size"], r["isl"] + r["step"], us * r["latency"]]
                for r in rows
                if (r["num_heads"], r["kernel_source"]) == (HEADS, kind)
                and r["batch_size"] <= MOST_ROWS
                and r["isl"] + r["step"] >= 512
            )
            keep("attention and its projections", path, chosen)
            break
        for path, rows in self.tables("mlp", "wideep_generation_mlp"):
            chosen = ([r["num_token"], us * r["avg_ms"]] for r in rows if r["num_token"] <= 512)
            keep("shared expert", path, chosen)
            break
        for path, rows in self.tables("gemm", "gemm"):
            gemms = [
                r
                for r in rows
                if (r["gemm_dtype"], r["k"], r["m"]) == ("bfloat16", HIDDEN, _HEAD_ROWS)
            ]
            for what, width in (("router", 256), ("head", VOCABULARY)):
                near = min((r["n"] for r in gemms), key=lambda n: abs(np.log(n / width)))
                best = min(r["latency"] for r in gemms if r["n"] == near)
                keep(what, path, iter([[near, us * best]]))
            break
        for path, rows in self.tables("moe", "wideep_generation_moe"):
            chosen = (
                [256 // ranks, r["num_tokens"] / ranks, us * r["latency"]]
                for r in rows
                if (r["distribution"], r["num_experts"], r["topk"]) == ("uniform", 256, 8)
                and (ranks := r["moe_ep_size"]) >= NODE
                # Every expert has a row, and a rank no more than it would here.
                and 32 <= r["num_tokens"] <= MOST_ROWS * ranks
            )
            keep("experts", path, chosen)
            break
        # The newest version that has the number of nodes.
        wire: dict[int, tuple[str, dict[int, float]]] = {}
        for path, rows in self.tables("comm", "wideep_deepep_ll"):
            here: dict[int, dict[int, float]] = {}
            for r in rows:
                shape = (r["hidden_size"], r["num_topk"], r["num_experts"])
                if shape == (HIDDEN, 8, 256) and r["num_token"] <= MOST_ROWS:
                    # Microseconds already.
                    both_us = r["dispatch_avg_t_us"] + r["combine_avg_t_us"]
                    here.setdefault(r["node_num"], {})[r["num_token"]] = both_us
            for nodes, at in here.items():
                wire.setdefault(nodes, (path, at))
        for nodes, (path, at) in sorted(wire.items()):
            keep(f"wire, {nodes} nodes", path, ([num, us] for num, us in at.items()))
        return found


def _version(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.parent.name)]


def read_package() -> dict[str, Any]:
    """All points that the package's tables have of what the constants need."""
    systems = {}
    for system in CLUSTERS:
        points = _Package(system).points()
        systems[system] = {
            what: {
                "table": one["table"],
                "points": [[float(f"{x:.6g}") for x in point] for point in one["points"]],
            }
            for what, one in points.items()
        }
    return {"package": f"aiconfigurator-core {version('aiconfigurator-core')}", "systems": systems}


class _System:
    """What is fitted to a system's points, and where they are from."""

    def __init__(self, points: Mapping[str, Tables], system: str) -> None:
        self._own, self._others = points[system], points[OF_OTHERS]

    def points(self, what: str) -> tuple[Points, str]:
        """The points of an operator, and their table."""
        one = self._own.get(what) or self._others[what]
        return one["points"], one["table"]

    def fit(self, what: str, *loads: int) -> tuple[tuple[float, ...], str]:
        """Coefficients of a constant and of products of a point's columns; the source in words.

        loads: for each slope, which columns are multiplied, as the digits of a number from 1.
        """
        points, table = self.points(what)
        columns = [
            [1.0, *(np.prod([point[int(d) - 1] for d in str(load)]) for load in loads)]
            for point in points
        ]
        found: Fit = fit(columns, [point[-1] for point in points])
        return found.coefficients, f"{table}: {len(points)} points, median error {found.median:.0%}"

    @property
    def far(self) -> str:
        """The system that the tables of several nodes are of."""
        return self.points("wire, 2 nodes")[1].split("/")[0]

    def wire(self) -> dict[int, tuple[float, float]]:
        """Number of nodes -> (microseconds of no rows, of each row), own ones where there are."""
        return {nodes: self.fit(f"wire, {nodes} nodes", 1)[0] for nodes in (1, 2, 4, 8)}  # type: ignore[misc]


class _Kept:
    """Constants that were found, and the source of each."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}

    def keep(self, source: str, **found: Any) -> None:
        """Note constants of one source, in four digits."""
        for name, value in found.items():
            self.values[name] = rounded(value) if isinstance(value, float) else value
            self.sources[name] = source


def operator_costs(
    points: Mapping[str, Any], system: str, file: ClusterFile
) -> tuple[Costs, dict[str, str]]:
    """(the constants of a system, the source of each). points: of traces/operators.json."""
    here, kept = _System(points["systems"], system), _Kept()
    _keep_compute(kept, here, file)
    _keep_wire(kept, here, _System(points["systems"], here.far), file)
    return replace(file.costs_of("peak"), **kept.values), kept.sources


def _keep_compute(kept: _Kept, here: _System, file: ClusterFile) -> None:
    """Attention, experts, what surrounds them, the head."""
    model = file.model
    (fixed_us, us_a_token, us_a_row), source = here.fit("attention", 12, 1)
    kept.keep(
        source,
        attention_us=fixed_us,
        attention_ps_per_token=1e6 * us_a_token,
        attention_ns_per_row=1e3 * us_a_row,
    )
    kept.keep(
        "as attention_ps_per_token's: it computes as long as it reads",
        attention_ps_per_query=1e6 * us_a_token,
    )
    (experts_us, us_an_expert, us_a_routed_row), source = here.fit("experts", 1, 2)
    kept.keep(
        f"{source}; {us_an_expert:.1f} us an expert",
        weights_gb_per_s=1e3 * model.expert_mb / us_an_expert,
    )
    kept.keep(
        f"the same; {1e3 * us_a_routed_row:.0f} ns a row",
        gemm_tflops=model.experts_per_token * model.expert_mflop / us_a_routed_row,
    )
    (module_us, _, module_row_us), source = here.fit("attention and its projections", 12, 1)
    shared_at = {rows: us for rows, us in here.points("shared expert")[0]}  # noqa: C416
    shared_us = float(np.mean([shared_at[rows] for rows in (32, 64, 128)]))
    shared_row_us = (shared_at[512] - shared_at[128]) / (512 - 128)
    [[_, router_us]], _ = here.points("router")
    kept.keep(
        f"{source}, {module_us:.1f} us less attention_us; shared expert {shared_us:.1f}, router "
        f"{router_us:.1f}, fixed part of experts {experts_us:.1f}",
        other_us=module_us - fixed_us + shared_us + router_us + experts_us,
    )
    kept.keep(
        f"the same, {1e3 * module_row_us:.0f} ns less attention_ns_per_row; shared expert "
        f"{1e3 * shared_row_us:.0f}",
        other_ns_per_row=1e3 * (module_row_us + shared_row_us - us_a_row),
    )
    [[width, head_us]], table = here.points("head")
    kept.keep(
        f"{table}: a GEMM {width:g} wide scaled to {VOCABULARY}, {_HEAD_ROWS} rows; no sampling",
        step_us=head_us * max(1.0, VOCABULARY / width),
    )


def _keep_wire(kept: _Kept, here: _System, others: _System, file: ClusterFile) -> None:
    """Dispatch, combine, and an exchange of the same kernels. others: of the tables of nodes."""
    wire = here.wire()
    near_us, near_row_us = wire[1]
    # A row of FP8 with its scales goes to 8 experts, one of BF16 comes back from each.
    row_bytes = 8 * (HIDDEN + 4 * HIDDEN // 128 + 2 * HIDDEN)
    kept.keep(
        f"{here.points('wire, 1 nodes')[1]}: dispatch and combine of no rows on {NODE} of a node",
        exchange_us=near_us,
    )
    kept.keep(
        f"the same, {row_bytes:,} bytes a row",
        exchange_gb_per_s_within_node=row_bytes / 1e3 / near_row_us,
    )
    kept.keep(
        f"{here.points('wire, 2 nodes')[1]}: no rows on 2 nodes less on 1",
        exchange_us_between_nodes=wire[2][0] - others.wire()[1][0],
    )
    kept.keep(
        f"{here.far}: bytes that leave a node over a row's time, mean of 2, 4 and 8 nodes",
        exchange_gb_per_s_between_nodes=float(
            np.mean([row_bytes * (1 - 1 / n) / 1e3 / wire[n][1] for n in (2, 4, 8)])
        ),
    )
    kept.keep(
        f"{here.points('wire, 4 nodes')[1]}: no rows on 4 nodes", dispatch_combine_us=wire[4][0]
    )
    table_us = {NODE * n: us + 128 * row_us for n, (us, row_us) in wire.items()}
    peak = dict(file.costs_of("peak").dispatch_combine_us_at_128_rows)
    table_us |= {size: table_us[64] * peak[size] / peak[64] for size in (128, 256)}
    kept.keep(
        "the same tables, 1, 2, 4 and 8 nodes; wider ones by the ratios of peak",
        dispatch_combine_us_at_128_rows=tuple(
            (ep_size, rounded(us)) for ep_size, us in table_us.items()
        ),
    )
    kept.keep("both kernels are of one hop each way", hides_queries=True)


def main(
    read_package_: Annotated[
        bool, typer.Option("--read-package", help="Take the points from the package first.")
    ] = False,
) -> None:
    """Write the set of constants `operators` of three cluster files."""
    try:
        if read_package_:
            POINTS.write_text(_as_text(read_package()))
        points = json.loads(POINTS.read_text())
        for system, cluster in CLUSTERS.items():
            file, path = load_cluster_file(cluster), cluster_path(cluster)
            costs, sources = operator_costs(points, system, file)
            origin = f"tables of {points['package']}, Apache-2.0 (benchmarks/gpu/operator_costs.py)"
            path.write_text(with_set(path.read_text(), NAME, costs, sources, origin))
            load_cluster_file(cluster)
            print(f"{path.relative_to(machine.ROOT)}:")
            for name, value in asdict(costs).items():
                print(f"  {name}: {value}  ({sources[name]})")
    except (ValueError, OSError) as error:
        sys.exit(f"operator_costs: {error}")


def _as_text(points: Mapping[str, Any]) -> str:
    """JSON with a line for each table."""
    lines = [f'{{"package": {json.dumps(points["package"])}, "systems": {{']
    for system, tables in points["systems"].items():
        lines.append(f"{json.dumps(system)}: {{")
        rows: Sequence[str] = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in tables.items()]
        lines += [*(f"{row}," for row in rows[:-1]), rows[-1], "},"]
    return "\n".join([*lines[:-1], "}", "}}"]) + "\n"


if __name__ == "__main__":
    typer.run(main)
