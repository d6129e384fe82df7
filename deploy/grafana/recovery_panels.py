"""Panels of recovery: seats, losses, terms, pauses, and what is repeated, kept or dropped."""

from __future__ import annotations

from panels import Panel, panel, rate


def recovery_panels() -> list[Panel]:
    """Panels for the dashboard of the service's health."""
    return [
        panel(
            "Seats",
            "short",
            ("sum by (state) (nanocp:seats)", "{{state}}"),
            about="Seats that serve, drain, load or are empty, and spares that stand by for one.",
        ),
        panel(
            "Losses and terms",
            "short",
            (
                "sum by (kind, cause) (increase(nanocp:members_lost_total[$__rate_interval]))",
                "{{kind}} lost: {{cause}}",
            ),
            (
                "sum by (cause) (increase(nanocp:regroups_total[$__rate_interval]))",
                "term began: {{cause}}",
            ),
            ("max(nanocp:term)", "term"),
            about="Members that were lost, and the terms that began after. A term in which every "
            "member stays lasts for ever.",
        ),
        panel(
            "Recovery",
            "s",
            (
                "histogram_quantile(0.9, sum by (le) "
                "(increase(nanocp:recovery_seconds_bucket[1h])))",
                "p90 of the last hour",
            ),
            (
                "sum by (phase) (rate(nanocp:recovery_phase_seconds_sum[1h])) / "
                "sum by (phase) (rate(nanocp:recovery_phase_seconds_count[1h]))",
                "mean: {{phase}}",
            ),
            ("max(nanocp:recovering)", "recovers now"),
            ("sum(nanocp:requests_held)", "held requests"),
            ("sum(nanocp:tickets_open)", "open tickets"),
            about="Time from the end of a term to the next one, in which no token comes, and what "
            "it is spent on: instances leave the term, processes load, instances join.",
        ),
        panel(
            "Pauses of streams",
            "s",
            *(
                (
                    f"histogram_quantile({q}, sum by (cause, le) "
                    "(increase(nanocp:stream_pause_seconds_bucket[1h])))",
                    f"p{q * 100:g} of the last hour: {{{{cause}}}}",
                )
                for q in (0.5, 0.99)
            ),
            about="How long clients waited for the next token of a request that began again.",
        ),
        panel(
            "What recovery repeats and drops",
            "short",
            (rate("request_attempts_total"), "later attempts"),
            (rate("replayed_tokens_total"), "tokens computed for later attempts"),
            (rate("pages_kept_total"), "pages found by later attempts"),
            (rate("stale_messages_total", " by (kind)"), "stale {{kind}}"),
            (rate("event_log_dropped_total"), "calls not logged"),
            about="Requests that were submitted again, what of their KV was computed and "
            "what was found; messages of an earlier term; calls that the event log lacks because "
            "its disk hung.",
        ),
    ]
