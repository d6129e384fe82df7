"""What drafts of the MTP layer win and cost, by the simulator's cost model.

Enters: clusters that ship, rates, the share of drafts that is right. Leaves: a table, which claims
hold, and a list of {cluster, rate, drafts, tpot_ms_p50, running}. Does not know: tokens. Which
drafts are right is drawn.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.kit.bench import BenchRun, Claim, at_most, bench
from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.costs.cost import CostModel, Loads
from nanocp.simulator.drafted_rows import Speculation
from nanocp.simulator.loads.workload import Workload
from nanocp.simulator.trial import Trial

CLUSTERS = ("h200x32-kimi-k2", "h200x32-deepseek-v3")
RIGHT = 0.85
"""The share of drafts that is right: what DeepSeek-V3's report has (arXiv 2412.19437, 5.4.3)."""
WAYS = {"none": "", "always": f"1:{RIGHT}:always", "measured": f"1:{RIGHT}"}
RATES = (4.0, 8.0, 12.0, 20.0, 28.0, 32.0)
CLAIMED_RATE = 12.0
MAX_OF_NONE = {"h200x32-kimi-k2": 0.60, "h200x32-deepseek-v3": 0.75}
"""Claim: at 12 requests a second a token takes at most this part of its time without drafts."""
MAX_OF_BETTER = 1.02
"""Claim: where each window has as many as pay, a token takes at most this, of the better of none
and all."""
LONG, SHORT, NUM_SHORT = 512 * 1024, 4096, 8
MAX_LONG = 0.52
"""Claim: a token of one long request of DeepSeek-V3 beside short ones takes at most this part with
CP degree 8 and a draft, of its time with neither."""


@bench("12 requests a second only, 60 s of each; it judges all but the other rates.")
def main(run: BenchRun) -> None:
    """Simulate each cluster at each rate, in each way."""
    rates = (CLAIMED_RATE,) if run.is_quick else RATES
    cases = [(cluster, rate, way) for cluster in CLUSTERS for rate in rates for way in WAYS]
    for cluster, rate, way in run.track(cases, "simulating"):
        trial = Trial(
            load_cluster_file(cluster),
            "cost_aware",
            Workload("issue-1", rate, num_instances=32, instances_per_node=8),
            speculation=Speculation.read(WAYS[way]) if WAYS[way] else None,
            warm_up_us=20_000_000 if run.is_quick else 40_000_000,
        )
        if run.is_quick:
            trial = replace(trial, measure_us=60_000_000)
        outcome = trial.filled().play()
        found = {"tpot_ms_p50": outcome.tpot_ms_p50, "running": outcome.num_rows_mean}
        run.keep({"cluster": cluster, "rate": rate, "drafts": way, **found})
    formats = {"cluster": "", "rate": ".0f", "drafts": "", "tpot_ms_p50": ".1f", "running": ".0f"}
    run.table("Time per token", run.results, **formats)
    run.judge([*_claims(run), _long_request(run)])


def _claims(run: BenchRun) -> list[Claim]:
    found = {
        (each["cluster"], each["rate"], each["drafts"]): each["tpot_ms_p50"] for each in run.results
    }
    claims = []
    for cluster, rate in dict.fromkeys((cluster, rate) for cluster, rate, _ in found):
        none, always, measured = (found[cluster, rate, way] for way in WAYS)
        if rate == CLAIMED_RATE:
            what = f"{cluster} at {rate:g}/s: a token's time with a draft over that without"
            claims.append(at_most(what, measured / none, MAX_OF_NONE[cluster]))
        what = f"{cluster} at {rate:g}/s: drafts as measured over the better of none and all"
        claims.append(at_most(what, measured / min(none, always), MAX_OF_BETTER))
    return claims


def _long_request(run: BenchRun) -> Claim:
    """One long request alone, on one instance or on eight, beside short ones on all."""
    model = CostModel(load_cluster_file(CLUSTERS[1]), "fitted")
    ms = {
        (degree, drafts): _token_ms(model, degree, drafts) for degree in (1, 8) for drafts in (0, 1)
    }
    for (degree, drafts), token_ms in ms.items():
        run.say(
            f"a token of {LONG} tokens of KV, degree {degree}, {drafts} drafts: {token_ms:.1f} ms"
        )
    what = "one request of 512K tokens: degree 8 and a draft over neither"
    return at_most(what, ms[8, 1] / ms[1, 0], MAX_LONG)


def _token_ms(model: CostModel, degree: int, num_drafts: int) -> float:
    num = 32
    tokens, rows, links = [NUM_SHORT * SHORT] * num, [NUM_SHORT] * num, [0] * num
    attention_rows = list(rows)
    rows[0] += 1
    for instance in range(degree):
        tokens[instance] += LONG // degree
        attention_rows[instance] += 1
        links[instance] = 1 if instance else degree - 1
    loads = Loads(tokens, rows, attention_rows, links, [0] * num)
    step_us = model.step_with_drafts(loads, num_drafts).step_us
    return step_us / 1e3 / (1 + RIGHT * num_drafts)


if __name__ == "__main__":
    main()
