"""Dashboards and alerts: expressions parse and name metrics that a service has; runbooks exist."""

import importlib
import json
import re
import shutil
import subprocess

import promql_parser
import pytest
import yaml

from control_plane.observe.metrics.registry import Metrics
from control_plane.scheduler.pages.offload import OffloadReading
from harness.paths import ROOT
from harness.programs.dashboards import ALERTS, GRAFANA, dashboard_expressions, filled
from nanocp.config.cluster import ClusterConfig
from nanocp.config.prefill import PrefillConfig
from nanocp.config.scheduler import SchedulerConfig

OPERATE = (ROOT / "docs/use/operate.md").read_text()

EXPRESSIONS = [
    *((name, filled(expression)) for name, expression in dashboard_expressions()),
    *((rule["alert"], rule["expr"]) for rule in ALERTS),
]


def selectors(node):
    """Every vector selector of a parsed expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("lhs", "rhs", "expr", "args", "vs", "vector_selector"):
        child = getattr(node, name, None)
        for one in child if isinstance(child, list | tuple) else [child]:
            if one is not None and type(one).__module__.startswith("promql_parser"):
                yield from selectors(one)


def registry_of_a_service():
    """The metrics of a service with engines, pages outside the frames, and loads of experts."""
    metrics = Metrics(
        ClusterConfig(), SchedulerConfig(), PrefillConfig(engines=("http://engine:8000",))
    )
    metrics.offload.planned(OffloadReading((0, 0), (0, 0), (0, 0), 0))
    metrics.experts.reported([1.0])
    return metrics.registry


@pytest.fixture(scope="module")
def exposed():
    """Names of all samples, and the labels of each, that a service can expose."""
    registry = registry_of_a_service()
    names = {"up": {"job", "instance"}}
    for family in registry.collect():
        suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}.get(
            family.type, ("",)
        )
        for suffix in suffixes:
            labels = {label for sample in family.samples for label in sample.labels}
            names[family.name + suffix] = labels | {"le", "engine", "job"}
    names["nanocp:request_success_total"] |= {"finished_reason"}
    names["nanocp:http_requests_total"] = {"handler", "method", "status", "job"}
    return names


@pytest.mark.parametrize(("name", "expression"), EXPRESSIONS, ids=[name for name, _ in EXPRESSIONS])
def test_an_expression_parses_and_names_what_is_exposed(exposed, name, expression):
    found = list(selectors(promql_parser.parse(expression)))
    assert found, "no metric at all"
    assert len(found) == len(re.findall(r"nanocp:\w+|\bup\b|process_\w+", expression)), (
        "a selector was missed"
    )
    for selector in found:
        assert selector.name in exposed, f"{selector.name} is not exposed"
        for matcher in selector.matchers.matchers:
            assert matcher.name in exposed[selector.name], (
                f"{selector.name} has no label {matcher.name}"
            )


def test_a_metric_that_does_not_exist_would_be_seen(exposed):
    (selector,) = selectors(promql_parser.parse("sum by (le) (rate(nanocp:no_such_bucket[5m]))"))
    assert selector.name == "nanocp:no_such_bucket" and selector.name not in exposed
    with pytest.raises(ValueError):
        promql_parser.parse("sum by (le) (rate(nanocp:step_seconds_bucket[5m])")


def test_every_metric_of_ours_is_explained_and_shown(exposed):
    families = {
        family.name
        for family in registry_of_a_service().collect()
        if family.name.startswith("nanocp:")
    }
    shown = " ".join(expression for _, expression in EXPRESSIONS)
    for family in families:
        assert re.search(rf"{family}(_total|_bucket|_sum|_count)?\b", shown), (
            f"{family} is in no panel of deploy/grafana and no alert"
        )
        assert re.search(rf"`{family.removeprefix('nanocp:')}(_total)?`", OPERATE), (
            f"{family} is not in docs/use/operate.md"
        )


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_to_do(rule):
    section = f"/docs/use/operate.md#{rule['alert'].lower()}"
    assert rule["annotations"]["runbook_url"] == "{{ $externalLabels.runbooks }}" + section
    assert f"### {rule['alert']}\n" in OPERATE
    assert rule["labels"]["severity"] in ("critical", "warning") and rule["annotations"]["summary"]


def test_dashboards_are_what_their_maker_writes(monkeypatch):
    monkeypatch.syspath_prepend(GRAFANA)
    maker = importlib.import_module("make_dashboards")
    made = dict(maker.dashboards())
    assert set(made) == set((GRAFANA / "dashboards").glob("*.json"))
    for path, text in made.items():
        assert path.read_text() == text, (
            f"run python deploy/grafana/make_dashboards.py: {path.name} differs"
        )


def test_every_panel_says_what_it_shows():
    for path in sorted((GRAFANA / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            assert re.fullmatch(r"\S.*\.", panel["description"]), f"{path.stem}: {panel['title']}"


def test_links_of_alerts_are_absolute():
    text = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text()
    labels = yaml.safe_load(text)["global"]["external_labels"]
    assert labels["runbooks"].startswith("https://")


def test_compose_mounts_what_is_there():
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", volume).split(":")[0]
            path = ROOT / "deploy" / source
            assert source in compose["volumes"] or path.is_dir() or path.is_char_device(), source


PROMETHEUS = ROOT / "deploy" / "prometheus"


@pytest.mark.parametrize(
    "command",
    [["promtool", "test", "rules", "alerts_test.yml"],
     ["promtool", "check", "config", "--syntax-only", "prometheus.yml"],
     ["amtool", "check-config", "alertmanager.yml"]],
    ids=lambda command: " ".join(command[:3]),
)  # fmt: skip
def test_prometheus_own_programs_accept_the_files_and_their_tests(command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"no program `{command[0]}`: Debian's prometheus, prometheus-alertmanager")
    done = subprocess.run(command, cwd=PROMETHEUS, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_reach_a_receiver_by_their_severity():
    """Every severity has a route, and every route and secret a place that the comment names."""
    receivers = yaml.safe_load((PROMETHEUS / "alertmanager.yml").read_text())
    names = {each["name"] for each in receivers["receivers"]}
    routes = receivers["route"]["routes"]
    matched = {matcher for route in routes for matcher in route["matchers"]}
    severities = {rule["labels"]["severity"] for rule in ALERTS}
    assert matched == {f'severity="{severity}"' for severity in severities}
    assert {route["receiver"] for route in routes} | {receivers["route"]["receiver"]} <= names
    asked = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["alerting"]
    (target,) = asked["alertmanagers"][0]["static_configs"][0]["targets"]
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    assert f"--web.listen-address={target}" in compose["alertmanager"]["command"]


def test_numbers_and_pages_outside_the_frames_are_on_a_dashboard():
    panels = {
        panel["title"]: panel["type"]
        for path in (GRAFANA / "dashboards").glob("*.json")
        for panel in json.loads(path.read_text())["panels"]
    }
    assert [panels[title] for title in ("Requests now", "Tokens a second now", "Version")] == [
        "stat"
    ] * 3
    for metric in ("pages", "stowed_pages_total", "fetched_pages_total", "hits_total"):
        assert any(f"nanocp:kv_offload_{metric}" in one for _, one in dashboard_expressions())
