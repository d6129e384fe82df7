"""Panels of recovery: seats, losses, terms, pauses, and what is repeated or dropped."""

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
            ("max(nanocp:recovering)", "recovers now"),
            ("sum(nanocp:requests_held)", "held requests"),
            ("sum(nanocp:tickets_open)", "open tickets"),
            about="Time from the end of a term to the next one, in which no token comes.",
        ),
        panel(
            "What recovery repeats and drops",
            "short",
            (rate("request_attempts_total"), "later attempts"),
            (rate("stale_messages_total", " by (kind)"), "stale {{kind}}"),
            (rate("event_log_dropped_total"), "calls not logged"),
            about="Requests that were submitted again; messages of an earlier term; calls that the "
            "event log lacks because its disk hung.",
        ),
    ]
