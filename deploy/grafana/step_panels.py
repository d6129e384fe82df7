"""Panels of a step: its time, waits for others, what lanes hide of those, and drafts.

Enters: nothing. Leaves: panels of the dashboard of an engine's parts. Does not know: other panels.
"""

from __future__ import annotations

from panels import ENGINE, Panel, mean, panel, rate


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
            "Windows by the order of their lanes",
            "ops",
            ("sum by (order) (rate(nanocp:lane_windows_total[$__rate_interval]))", "{{order}}"),
            about="One lane where two would not pay.",
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
        panel(
            "Drafts accepted, by place",
            "percentunit",
            (
                f"{rate('spec_decode_num_accepted_tokens_per_pos_total', ' by (position)')} / "
                f"ignoring (position) group_left {rate('spec_decode_num_drafts_total')}",
                "place {{position}}",
            ),
            (
                f"{rate('spec_decode_num_accepted_tokens_total')} / "
                f"{rate('spec_decode_num_draft_tokens_total')}",
                "of all that were checked",
            ),
            about="Share of a row's steps in which the draft at that place behind its known token "
            "was right. Only with scheduler.num_drafts.",
        ),
        panel(
            "Tokens of a row in a step",
            "short",
            (
                f"1 + {rate('spec_decode_num_accepted_tokens_total')} / "
                f"{rate('spec_decode_num_drafts_total')}",
                "of rows with drafts",
            ),
            about="A step takes longer with drafts: it pays if this grows more than the step "
            "does. Only with scheduler.num_drafts.",
        ),
    ]
