"""The queries of the shipped dashboards and alerts, as Grafana and Prometheus send them."""

import json

import yaml

from harness.paths import ROOT

GRAFANA = ROOT / "deploy" / "grafana"
ALERTS = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"][0][
    "rules"
]


def dashboard_expressions():
    for path in sorted((GRAFANA / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"]


def filled(expression, interval="1m"):
    """Fill an expression's variables in, as Grafana does before it sends it."""
    return expression.replace("$__rate_interval", interval).replace("$job", "nanocp")
