"""What CP over KV tokens gains with each kind of attention: latent KV and K/V heads.

    python benchmarks/attention_kinds.py [--quick] [--json PATH]

The simulator's cluster files on 32 H200, fitted constants. First the cost model: one request alone,
split evenly within a node. Then the scheduler: the same load under the paper's policy and without
CP. Everything is computed or simulated, and nothing is measured; --quick leaves the second out.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from machine import describe, write_results

from nanocp.simulator.cluster_file import ClusterFile, load_cluster_file
from nanocp.simulator.cost import CostModel, profile_cp_degrees
from nanocp.simulator.outcome import Outcome
from nanocp.simulator.trial import Trial
from nanocp.simulator.workload import Workload

CLUSTERS = ("h200x32-deepseek-v3", "h200x32-kimi-k2", "h200x32-qwen3-235b", "h200x32-glm-4.5")
CONSTANTS = "fitted"
LENGTH = 131_072
WORKLOAD, RATE = "issue-1", 8.0
SECONDS = 20
POLICIES = ("dual_balanced", "least_batch")


def alone_us(model: CostModel, length: int, degree: int) -> float:
    """Attention and exchange of a layer, us, for one request on `degree` instances of a node."""
    return model.attention_us(length / degree, 1) + model.exchange_us(degree - 1, 0, 1)


def cost_row(name: str, file: ClusterFile) -> dict[str, Any]:
    """What the cost model says about one cluster file."""
    model = CostModel(file, CONSTANTS)
    buckets = profile_cp_degrees(model, file.cp_degrees, file.cluster.max_model_len)
    one, best = (alone_us(model, LENGTH, degree) for degree in (1, max(file.cp_degrees)))
    return {
        "cluster": name,
        "kv_bytes_per_layer": file.model.kv_bytes_per_token // file.model.num_layers,
        "bytes_per_link": file.model.wire_form("").bytes_per_link,
        "cp_from_tokens": buckets[0][0],
        "alone_us": one,
        "alone_most_cp_us": best,
    }


def outcomes(file: ClusterFile) -> dict[str, Outcome]:
    """What each policy makes of the same load."""
    found = {}
    for policy in POLICIES:
        trial = Trial(
            file, policy, Workload(WORKLOAD, RATE, seed=1), CONSTANTS,
            warm_up_us=10_000_000, measure_us=SECONDS * 1_000_000,
        )  # fmt: skip
        found[policy] = trial.filled().play()
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the cost model only: a second")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write what was found to PATH")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    rows = []
    steps = "" if options.quick else f" | step, ms: {' / '.join(POLICIES)} | within the SLO"
    print(
        "| cluster | KV, B a layer | link, B | CP from, tokens | "
        f"{LENGTH:,} tokens alone, us: degree 1 / 8 | of it{steps} |"
    )
    print("|---|" + "---:|" * (5 if options.quick else 7))
    for name in CLUSTERS:
        file = load_cluster_file(name)
        row = cost_row(name, file)
        share = row["alone_most_cp_us"] / row["alone_us"]
        cells = [
            f"{row['kv_bytes_per_layer']:,}", f"{row['bytes_per_link']:,}",
            f"{row['cp_from_tokens']:,}",
            f"{row['alone_us']:.0f} / {row['alone_most_cp_us']:.0f}", f"{share:.2f}",
        ]  # fmt: skip
        if not options.quick:
            found = outcomes(file)
            row["step_ms"] = {policy: one.step_ms_mean for policy, one in found.items()}
            row["attainment"] = {policy: one.attainment for policy, one in found.items()}
            cells.append(" / ".join(f"{ms:.1f}" for ms in row["step_ms"].values()))
            cells.append(" / ".join(f"{share:.0%}" for share in row["attainment"].values()))
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
        rows.append(row)
    if options.json:
        write_results(options.json, rows, describe(load_before))


if __name__ == "__main__":
    main()
