"""Panels of a dashboard, of metrics of the selected job; the dashboard around them."""

from __future__ import annotations

import re
from typing import Any

Panel = dict[str, Any]
_COLUMNS, _HEIGHT = 3, 8
ENGINE = " by (engine)"
"""Appended to a sum: one line for each instance."""


def _of_job(expression: str) -> str:
    """The expression with each NanoCP metric restricted to the selected job."""

    def narrowed(match: re.Match[str]) -> str:
        name, labels = match[1], match[2]
        return f'{name}{{job="$job"' + (f", {labels[1:]}" if labels else "}")

    return re.sub(r"(nanocp:\w+)(\{[^}]*\})?", narrowed, expression)


def panel(
    title: str, unit: str, *queries: tuple[str, str], about: str, kind: str = "timeseries"
) -> Panel:
    """A panel of (expression, legend) pairs. `nanocp:x` means that metric of the selected job.

    about: the panel's description, which Grafana shows beside the title.
    """
    targets = [
        {
            "refId": chr(ord("A") + number),
            "expr": _of_job(expression),
            "legendFormat": legend,
            "range": True,
        }
        for number, (expression, legend) in enumerate(queries)
    ]
    options: dict[str, Any] = {
        "tooltip": {"mode": "multi", "sort": "desc"},
        "legend": {"showLegend": True},
    }
    if kind == "heatmap":
        targets[0] |= {"format": "heatmap", "legendFormat": "{{le}}"}
        options = {"calculate": False, "yAxis": {"unit": unit}}
    if kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "value_and_name"}
    return {
        "title": title,
        "description": about,
        "type": kind,
        "datasource": {"type": "prometheus", "uid": "${DS_PROMETHEUS}"},
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 8}},
            "overrides": [],
        },
        "options": options,
        "targets": targets,
    }


def quantiles(title: str, metric: str, unit: str = "s", *, about: str) -> Panel:
    """p50, p90 and p99 of a histogram."""
    return panel(
        title,
        unit,
        *(
            (
                (
                    f"histogram_quantile({q}, sum by (le) "
                    f"(rate(nanocp:{metric}_bucket[$__rate_interval])))"
                ),
                f"p{q * 100:g}",
            )
            for q in (0.5, 0.9, 0.99)
        ),
        about=about,
    )


def mean(metric: str, by: str = "") -> str:
    """A histogram's mean since the previous point."""
    rates = [
        f"sum{by} (rate(nanocp:{metric}_{part}[$__rate_interval]))" for part in ("sum", "count")
    ]
    return " / ".join(rates)


def rate(metric: str, by: str = "") -> str:
    """A counter's rate per second, summed."""
    return f"sum{by} (rate(nanocp:{metric}[$__rate_interval]))"


def dashboard(name: str, panels: list[Panel]) -> dict[str, Any]:
    """A dashboard of these panels, three in a row."""
    width = 24 // _COLUMNS
    placed = [
        {
            "id": number + 1,
            **one,
            "gridPos": {
                "h": _HEIGHT,
                "w": width,
                "x": number % _COLUMNS * width,
                "y": number // _COLUMNS * _HEIGHT,
            },
        }
        for number, one in enumerate(panels)
    ]
    title = name.replace("-", " ")
    return {
        "uid": f"nanocp-{name}",
        "title": f"NanoCP: {title.replace('slos', 'SLOs')}",
        "tags": ["nanocp"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "DS_PROMETHEUS",
                    "type": "datasource",
                    "query": "prometheus",
                    "label": "Prometheus",
                },
                {
                    "name": "job",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "${DS_PROMETHEUS}"},
                    "query": {
                        "query": "label_values(nanocp:num_requests_running, job)",
                        "refId": "job",
                    },
                    "refresh": 2,
                },
            ]
        },
        "links": [
            {"title": "NanoCP", "type": "dashboards", "tags": ["nanocp"], "asDropdown": True}
        ],
        "panels": placed,
    }
