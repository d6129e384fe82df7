"""Panels of experts: how even their load is, and the changes that follow it."""

from __future__ import annotations

from panels import Panel, panel, rate


def expert_panels() -> list[Panel]:
    """Panels for the dashboard of balance."""
    return [
        panel(
            "Experts: hottest instance over the mean",
            "short",
            ("max(nanocp:expert_imbalance)", "the least even layer"),
            ("avg(nanocp:expert_imbalance)", "mean of the layers"),
            about="Pairs of a row and an expert, by MoE layer; 1 is even. `nanocp experts` names "
            "layers and experts.",
        ),
        panel(
            "Experts: changes",
            "short",
            (
                "sum by (outcome) (increase(nanocp:expert_changes_total[$__rate_interval]))",
                "{{outcome}}",
            ),
            (rate("experts_loaded_total"), "experts loaded a second"),
            (rate("expert_load_seconds_sum"), "share of the time that experts load"),
            about="Changes of the table by outcome. Nothing without cluster.expert_load_mb_per_s.",
        ),
    ]
