"""Numbers of an outcome as JSON, and as a table of policies."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from nanocp.simulator.outcome import Outcome

_ROWS = (
    ("requests judged", "num_judged", "{:,}"),
    ("missed the SLO", "num_missed", "{:,}"),
    ("within the SLO", "attainment", "{:.2%}"),
    ("refused", "num_refused", "{:,}"),
    ("not judged (began before, or not late yet)", "num_not_judged", "{:,}"),
    ("TTFT p50, ms", "ttft_ms_p50", "{:.1f}"),
    ("TTFT p99, ms", "ttft_ms_p99", "{:.1f}"),
    ("TPOT p50, ms", "tpot_ms_p50", "{:.1f}"),
    ("TPOT p99, ms", "tpot_ms_p99", "{:.1f}"),
    ("normalized latency p50, ms", "normalized_ms_p50", "{:.1f}"),
    ("normalized latency p99, ms", "normalized_ms_p99", "{:.1f}"),
    ("drift of the requests in the cluster", "drift", "{:+.1%}"),
    ("queueing p99, ms", "queueing_ms_p99", "{:.1f}"),
    ("waiting, most", "num_waiting_max", "{:,}"),
    ("frames in use", "frames_used_share", "{:.1%}"),
    ("frames free while some wait", "free_frames_share_while_waiting", "{:.1%}"),
    ("step, ms", "step_ms_mean", "{:.2f}"),
    ("rows in the cluster", "num_rows_mean", "{:,.0f}"),
    ("KV imbalance, (max - mean) / mean", "kv_imbalance", "{:.1%}"),
    ("row imbalance", "row_imbalance", "{:.1%}"),
    ("requests with CP", "cp_share", "{:.2%}"),
    ("windows in two lanes", "two_lanes_share", "{:.1%}"),
    ("windows by the schedule", "scheduled_share", "{:.1%}"),
    ("prompt tokens shared", "prefix_hit_rate", "{:.1%}"),
    ("prompt tokens from memory", "host_hit_rate", "{:.1%}"),
    ("scheduler, ms a window", "plan_ms_mean", "{:.2f}"),
    ("scheduler, share of the step", "plan_share", "{:.2%}"),
    ("times real time", "times_real_time", "{:.1f}"),
)


def numbers_of(outcome: Outcome) -> dict[str, Any]:
    """The outcome's fields, with layers' times as objects."""
    return {
        **asdict(outcome),
        "layer_us": outcome.layer_us._asdict(),
        "layer_us_max": outcome.layer_us_max._asdict(),
    }


def all_judged(num_judged: Mapping[str, int]) -> bool:
    """True if each policy had requests to judge; prints a remedy if not."""
    for policy, number in num_judged.items():
        if not number:
            print(
                f"{policy}: nothing was judged, since no request that arrived after the warm-up "
                "ended in the measured time or was late; measure longer (--seconds), or spread a "
                "trace's times",
                file=sys.stderr,
            )
    return all(num_judged.values())


def table_of(results: dict[str, dict[str, Any]]) -> Table:
    """A column for each policy, with parts of a layer last."""
    from rich.table import Table

    table = Table()
    table.add_column("")
    for policy in results:
        table.add_column(policy, justify="right")
    for label, key, form in _ROWS:
        table.add_row(label, *(cell_of(numbers, key, form) for numbers in results.values()))
    for name in next(iter(results.values()))["layer_us"]:
        label = f"a layer's {name.removesuffix('_us').replace('_', ' + ')}, us"
        table.add_row(label, *(f"{n['layer_us'][name]:.1f}" for n in results.values()))
    return table


def cell_of(numbers: Mapping[str, Any], key: str, form: str) -> str:
    """A number in a table; "-" without judged requests."""
    is_judged = key.startswith(("attainment", "ttft_", "tpot_", "normalized_", "e2el_"))
    return "-" if is_judged and not numbers["num_judged"] else form.format(numbers[key])
