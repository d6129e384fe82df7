"""Gain of searched schedules: the paper's 70B pipeline, and the mission's model by rows.

two_lanes: the cost model's step in two lanes over one.
"""

from __future__ import annotations

from typing import Any

from benchmarks.kit.bench import BenchRun, at_least, bench
from nanocp.overlap import paper
from nanocp.overlap.layers import collective_forms
from nanocp.overlap.search import BestSchedule, search
from nanocp.simulator.costs import nano_batches
from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.costs.cost import CostModel

CLUSTER = "h200x32-deepseek-v3"
ROWS = (64, 128, 256, 512)
KV_TOKENS, LINKS = 300_000, 4
MIN_GAIN = 1.11
"""Claim, of the paper's pipeline."""


@bench("A second a search: judges no claim.")
def main(run: BenchRun) -> None:
    """Search for minutes at each size."""
    limit_s = 1.0 if run.is_quick else 60.0
    found = search(collective_forms(paper.layer()), 128 / paper.BATCH, paper.TABLE_3, limit_s)
    results = [point("LLaMA-2 70B", paper.BATCH, found, paper.TABLE_3.source, None)]
    file = load_cluster_file(CLUSTER)
    model = CostModel(file, file.default_constants)
    for rows in run.track(ROWS, "searching", len(ROWS)):
        case = nano_batches.Case(CLUSTER, file.default_constants, rows, KV_TOKENS, LINKS)
        layer = nano_batches.layer_operations(model, case.loads)
        found = search([layer], 1 / rows, model.interference, limit_s)
        one_us, two_us = (
            step(case.loads).step_us for step in (model.step, model.step_in_two_lanes)
        )
        results.append(point(CLUSTER, rows, found, model.interference.source, two_us / one_us))
    run.table("searched schedules against program order", results)
    run.keep(*results, kv_tokens=KV_TOKENS, links=LINKS)
    claim = at_least("the paper's pipeline gains {}", float(results[0]["gain"]), MIN_GAIN)
    run.judge([claim], run.too_quick)


def point(
    what: str, rows: int, found: BestSchedule, source: str, two_lanes: float | None
) -> dict[str, Any]:
    """Line of the table."""
    return {
        "what": what,
        "rows": rows,
        "sequential_us": round(found.sequential_us),
        "schedule_us": round(found.schedule.period_us),
        "gain": round(found.gain, 4),
        "bound": round(found.sequential_us / found.fluid_us, 3),
        "two_lanes": two_lanes and round(two_lanes, 3),
        "interference": source,
    }


if __name__ == "__main__":
    main()
