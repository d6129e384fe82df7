"""What CP over KV tokens gains with each kind of attention: latent KV and K/V heads.

The simulator's cluster files on 32 H200, fitted constants. First the cost model: one request alone,
split evenly within a node. Then the scheduler: the same load under the paper's policy and without
CP. Everything is computed or simulated, and nothing is measured; --quick leaves the second out.
Claimed is what docs/use/models.md says of its table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.kit.bench import BenchRun, Claim, bench
from nanocp.simulator.costs.cluster_file import ClusterFile, load_cluster_file
from nanocp.simulator.costs.cost import CostModel, profile_cp_degrees
from nanocp.simulator.loads.workload import Workload
from nanocp.simulator.outcome import Outcome
from nanocp.simulator.trial import Trial

CLUSTERS = (
    "h200x32-deepseek-v3",
    "h200x32-kimi-k2",
    "h200x32-qwen3-235b",
    "h200x32-qwen3.5-397b",
    "h200x32-glm-4.5",
)
CONSTANTS, FORM = "fitted", "latent"
LENGTH = 131_072
WORKLOAD, RATE = "issue-1", 8.0
RATES = {"h200x32-qwen3.5-397b": 32.0}
"""Requests a second in place of RATE, where a step at RATE has hardly any KV to read."""
SECONDS = 20
POLICIES = ("dual_balanced", "least_batch")


def alone_us(model: CostModel, length: int, degree: int) -> float:
    """Attention and exchange of a layer, us, for one request on `degree` instances of a node."""
    return model.attention_us(length / degree, 1) + model.exchange_us(degree - 1, 0, 1)


def cost_row(name: str, file: ClusterFile) -> dict[str, Any]:
    """What the cost model says about one cluster file."""
    model = CostModel(file, CONSTANTS, wire_form=FORM)
    buckets = profile_cp_degrees(model, file.cp_degrees, file.cluster.max_model_len)
    one, best = (alone_us(model, LENGTH, degree) for degree in (1, max(file.cp_degrees)))
    return {
        "cluster": name,
        "kv_bytes_per_layer": file.model.kv_bytes_per_token // file.model.num_full_layers,
        "bytes_per_link": file.model.wire_form(FORM).bytes_per_link,
        "cp_from_tokens": buckets[0][0],
        "alone_us": one,
        "alone_most_cp_us": best,
    }


def outcomes(file: ClusterFile, rate: float) -> dict[str, Outcome]:
    """What each policy makes of the same load."""
    found = {}
    for policy in POLICIES:
        trial = Trial(
            file, policy, Workload(WORKLOAD, rate, seed=1), CONSTANTS,
            warm_up_us=10_000_000, measure_us=SECONDS * 1_000_000, wire_form=FORM,
        )  # fmt: skip
        found[policy] = trial.filled().play()
    return found


@bench("The cost model only: a second.")
def main(run: BenchRun) -> None:
    """Compute and simulate one cluster file after the other."""
    for name in CLUSTERS:
        file = load_cluster_file(name)
        row = cost_row(name, file)
        if not run.is_quick:
            row["rate"] = RATES.get(name, RATE)
            found = outcomes(file, row["rate"])
            row["step_ms"] = {policy: one.step_ms_mean for policy, one in found.items()}
            row["attainment"] = {policy: one.attainment for policy, one in found.items()}
            run.say(f"{name}: {row['step_ms']}, {row['attainment']}")
        run.keep(row)
    run.table(f"{LENGTH:,} tokens alone, us", run.results)
    run.judge(claims(run.results))


def claims(rows: Sequence[dict[str, Any]]) -> Iterator[Claim]:
    """What is claimed of models in the order of their KV."""
    rows = sorted(rows, key=lambda row: row["kv_bytes_per_layer"])
    for less, more in pairwise(rows):
        if less["kv_bytes_per_layer"] == more["kv_bytes_per_layer"]:
            continue
        shares = [row["alone_most_cp_us"] / row["alone_us"] for row in (less, more)]
        what = f"{more['cluster']} against {less['cluster']}, which has less KV: CP leaves "
        what += f"{shares[1]:.2f} and {shares[0]:.2f} of the time, and pays from "
        what += f"{more['cp_from_tokens']} and {less['cp_from_tokens']} tokens"
        is_more = shares[1] < shares[0] and more["cp_from_tokens"] < less["cp_from_tokens"]
        yield Claim(f"{what}: more is won where there is more KV", is_more)
    for row in (row for row in rows if "step_ms" in row):
        ours, theirs = (row["step_ms"][policy] for policy in POLICIES)
        what = f"{row['cluster']} at {row['rate']:g}/s: a step takes {ours:.1f} ms"
        yield Claim(f"{what}, without CP {theirs:.1f} ms: less", ours < theirs)


if __name__ == "__main__":
    main()
