"""promtool plays the alerts over the metrics of a cluster, one of whose seats was drained.

Needs the program `promtool` (Debian's package prometheus) on PATH.
"""

import json
import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from control_plane.observe.metrics.registry import Metrics
from control_plane.observe.status_server import metrics_page
from control_plane.scheduler.scheduler import Scheduler
from harness.paths import ROOT
from harness.programs.dashboards import ALERTS
from harness.services.drained_seat import BEFORE, CLUSTER, drained_scheduler
from nanocp.config.scheduler import SchedulerConfig

pytestmark = pytest.mark.system

_MINUTES = 60
_COUNTERS = ("_total", "_sum", "_count", "_bucket")


def firing(tmp_path, metrics):
    """Names of the alerts that fire when a cluster looks like this for an hour."""
    if shutil.which("promtool") is None:
        pytest.skip("no program `promtool`: apt-get install prometheus")
    series = [{"series": 'up{job="nanocp"}', "values": f"1x{_MINUTES}"}]
    for family in text_string_to_metric_families(metrics_page(metrics.registry).decode()):
        for sample in family.samples:
            labels = ",".join(
                f"{name}={json.dumps(value)}"
                for name, value in {"job": "nanocp", **sample.labels}.items()
            )
            start, step = (
                (0, sample.value) if sample.name.endswith(_COUNTERS) else (sample.value, 0)
            )
            values = f"{start}+{step}x{_MINUTES}"
            series.append({"series": f"{sample.name}{{{labels}}}", "values": values})
    names = [alert["alert"] for alert in ALERTS]
    tests = {
        "rule_files": [str(ROOT / "deploy" / "prometheus" / "alerts.yml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "external_labels": {"runbooks": ""},
                "input_series": series,
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})',
                        "eval_time": f"{_MINUTES - 5}m",
                        "exp_samples": [],
                    }
                    for name in names
                ],
            }
        ],
    }
    path = tmp_path / "alerts.json"
    path.write_text(json.dumps(tests))
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode in (0, 1) and "parse" not in said, said
    return {name for name in names if f'="{name}"' in said.replace("\\", "")}


def metrics_of(scheduler, *states):
    metrics = Metrics(CLUSTER, SchedulerConfig())
    metrics.recovery.seats(states)
    for done in BEFORE[: states.count("serving")]:
        metrics.instances.stepped(done, is_complete=done is BEFORE[states.count("serving") - 1])
    metrics.scheduling.planned(0.001, scheduler, has_window=True)
    return metrics


def test_beside_a_drained_seat_the_alerts_say_what_the_others_lack(tmp_path):
    metrics = metrics_of(drained_scheduler(), "serving", "empty")
    expected = {"NanoCPDegraded", "NanoCPFramesShort", "NanoCPHeadOfLineWaits"}
    assert firing(tmp_path, metrics) == expected, "neither stranded nor uneven"


def test_an_idle_cluster_raises_no_alert(tmp_path):
    idle = Scheduler(CLUSTER, SchedulerConfig())
    idle.plan_window([], 0)
    assert firing(tmp_path, metrics_of(idle, "serving", "serving")) == set()
