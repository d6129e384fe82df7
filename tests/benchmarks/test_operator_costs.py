"""operator_costs.py: the shipped constants are found again in the committed points."""

import json
import re
from dataclasses import asdict, replace

import pytest

from benchmarks.gpu import operator_costs
from nanocp.simulator.costs.cluster_file import SHIPPED, load_cluster_file

TABLES = json.loads(operator_costs.POINTS.read_text())


@pytest.mark.parametrize("system", operator_costs.CLUSTERS)
def test_the_shipped_constants_are_those_of_the_points(system):
    name = operator_costs.CLUSTERS[system]
    file = load_cluster_file(name)
    costs, sources = operator_costs.operator_costs(TABLES, system, file)
    found, shipped = asdict(costs), asdict(file.costs_of("operators"))
    assert shipped.pop("dispatch_combine_us_at_128_rows") == found.pop(
        "dispatch_combine_us_at_128_rows"
    )
    assert shipped == pytest.approx(found, rel=0.01)
    text = (SHIPPED / f"{name}.yaml").read_text().partition("  operators:")[2]
    assert TABLES["package"] in text.splitlines()[0] and "Apache-2.0" in text.splitlines()[0]
    for constant, source in sources.items():
        assert re.search(rf"    {constant}: .*  # {re.escape(source)}\n", text), constant


def test_the_points_are_few_and_each_has_its_table():
    assert operator_costs.POINTS.stat().st_size <= 50_000
    for tables in TABLES["systems"].values():
        for one in tables.values():
            assert one["table"].endswith("_perf.parquet") and one["points"]


def test_constants_are_found_again_in_what_they_made():
    file = load_cluster_file("h200x32-deepseek-v3")
    costs = replace(file.costs_of("peak"), attention_us=30.0, exchange_us=17.0)
    row_us = 173_824 / (1e3 * costs.exchange_gb_per_s_within_node)
    made = {
        "attention": [
            [rows, tokens, costs.layer_attention_us(rows * tokens, rows)]
            for rows in (1, 16, 256)
            for tokens in (512, 8192)
        ],
        "wire, 1 nodes": [[rows, costs.exchange_us + row_us * rows] for rows in (1, 64, 256)],
    }
    here = TABLES["systems"]["h200_sxm"]
    changed = {what: {**here[what], "points": points} for what, points in made.items()}
    tables = {"systems": {**TABLES["systems"], "h200_sxm": here | changed}}
    found, _ = operator_costs.operator_costs(tables, "h200_sxm", file)
    for name in (
        *("attention_us", "attention_ps_per_token", "attention_ns_per_row", "exchange_us"),
        "exchange_gb_per_s_within_node",
    ):
        assert getattr(found, name) == pytest.approx(getattr(costs, name), rel=2e-3), name
