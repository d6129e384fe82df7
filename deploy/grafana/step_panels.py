"""Panels of a step's time: all of it, waits for others, and what lanes hide of those.

Enters: nothing. Leaves: panels of the dashboard of an engine's parts. Does not know: other panels.
"""

from __future__ import annotations

from panels import ENGINE, Panel, mean, panel


def step_panels() -> list[Panel]:
    """By instance."""
    return [
        panel(
            "Step",
            "s",
            (mean("step_seconds", ENGINE), "engine {{engine}}"),
            about="Mean wall time.",
        ),
        panel(
            "Waiting for others in a step",
            "s",
            (mean("step_exchange_seconds", ENGINE), "engine {{engine}}"),
            about="Mean time of a step in which the instance waits for peers. The busiest instance "
            "waits least.",
        ),
        panel(
            "Hidden by lanes",
            "s",
            (
                "sum by (engine) (rate(nanocp:hidden_exchange_seconds_total[$__rate_interval]))",
                "engine {{engine}}",
            ),
            about="At most so much of a second one lane computed while the other waited; nothing "
            "without lanes.",
        ),
        panel(
            "Busy in a step",
            "s",
            (
                "(sum by (engine) (rate(nanocp:step_seconds_sum[$__rate_interval])) - "
                "sum by (engine) (rate(nanocp:step_exchange_seconds_sum[$__rate_interval]))) / "
                "sum by (engine) (rate(nanocp:step_seconds_count[$__rate_interval]))",
                "engine {{engine}}",
            ),
            about="This differs between instances: every step waits for the busiest one.",
        ),
    ]
