"""A real Prometheus scrapes a live cluster: dashboards' queries and alerts' operands have data.

Needs the program `prometheus` (Debian's package of that name) on PATH, or its path in
NANOCP_PROMETHEUS.
"""

import json
import math
import subprocess
import threading
import time
import urllib.parse
import urllib.request

import httpx
import promql_parser
import pytest
import yaml

from harness.exact.settings import configured
from harness.hash_clusters.hash_model import NUM_EXPERTS
from harness.paths import ROOT
from harness.programs.dashboards import ALERTS, dashboard_expressions, filled
from harness.programs.installed import installed
from harness.services.hash_service import CONFIG, generate, hash_service, prompt
from harness.waits import until
from nanocp.serve.process import free_port

pytestmark = pytest.mark.system

_COMPARISONS = (">", "<", ">=", "<=", "==", "!=", "and", "or", "unless")


def operands(node):
    """Yield the largest parts of an alert without a comparison; each must always have data."""
    if isinstance(node, promql_parser.ParenExpr):
        yield from operands(node.expr)
    elif isinstance(node, promql_parser.BinaryExpr) and str(node.op) in _COMPARISONS:
        yield from operands(node.lhs)
        yield from operands(node.rhs)
    elif not isinstance(node, promql_parser.NumberLiteral):
        yield node.prettify()


def ask(address, path, **parameters):
    query = urllib.parse.urlencode(parameters)
    with urllib.request.urlopen(f"http://{address}/api/v1/{path}?{query}", timeout=60) as answer:
        return json.load(answer)["data"]


def values(address, expression):
    result = ask(address, "query", query=expression)["result"]
    return [float(series["value"][1]) for series in result]


@pytest.fixture(scope="module")
def program():
    return installed("prometheus", "NANOCP_PROMETHEUS", "apt-get install prometheus")


@pytest.fixture(scope="module")
def watched(program, tmp_path_factory):
    """(address of Prometheus, service), while requests long and short come and go."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    (folder / "api_key").write_text("a-key\n")
    operators = str(folder / "api_key")
    keys = {"api_keys": ("a-key",), "operator_keys_file": operators}
    settings = configured(CONFIG, num_drafts=1, lanes="random", **keys)
    with hash_service(settings, num_experts=NUM_EXPERTS) as service:
        config["scrape_configs"][0]["authorization"]["credentials_file"] = f"{folder}/api_key"
        intervals = ("scrape_interval", "scrape_timeout", "evaluation_interval")
        config["global"] = dict.fromkeys(intervals, "1s")
        config["rule_files"] = [str(ROOT / "deploy" / "prometheus" / "alerts.yml")]
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [service.metrics_address]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_port()}"
        command = [
            *(program, f"--config.file={folder}/prometheus.yml",
              f"--storage.tsdb.path={folder}/data"),
            f"--web.listen-address={address}",
        ]  # fmt: skip
        with (
            (folder / "log").open("wb") as log,
            subprocess.Popen(command, stdout=log, stderr=log) as process,
        ):
            stop = threading.Event()
            clients = [
                threading.Thread(target=_ask_for_ever, args=(service, stop, number))
                for number in range(6)
            ]
            for client in clients:
                client.start()
            try:
                _wait_for_samples(address, service, folder / "log")
                yield address, service
            finally:
                stop.set()
                for client in clients:
                    client.join(60)
                process.terminate()


def _ask_for_ever(service, stop, number):
    while not stop.is_set():
        headers = {"Authorization": "Bearer a-key"}
        models = httpx.get(f"http://{service.http_address}/v1/models", headers=headers)
        models.raise_for_status()
        length = 30 if number % 2 else 300
        generate(service.address, prompt(length, number), 40 + 10 * number, api_key="a-key")


def _wait_for_samples(address, service, log):
    deadline = time.monotonic() + 180
    scraped = 'count_over_time(up{job="nanocp"}[1m]) > 15'
    while time.monotonic() < deadline:
        try:
            # Instances report the load of experts every 5 s.
            if values(address, scraped) and values(address, "nanocp:expert_imbalance"):
                return
        except OSError:
            pass
        time.sleep(0.5)
    raise AssertionError(log.read_text()[-2000:])


ONLY_AFTER_A_LOSS = (": Recovery", ": Pauses of streams")
"""Panels that say how long recovery took."""
ONLY_WITH_GRAMMARS = ("Waiting for masks in a step",)
"""Panels of a mean that needs a request with structured output."""
ONLY_WITH_ENGINES = (
    "Prefill engines", "Prompts at engines", "Time of prompts at engines",
    "Pages of engines a second",
)  # fmt: skip
"""Panels that are empty here, where NanoCP computes the prompts itself."""
ONLY_WITH_OFFLOAD = (
    "Pages outside the frames",
    "Pages stowed and fetched a second",
    "Prompt tokens from outside the frames",
)
"""Panels of kv_offload, which is off here."""


def test_every_dashboard_query_is_answered_with_data(watched):
    address, _ = watched
    empty = {}
    for name, expression in dashboard_expressions():
        if name.endswith(
            ONLY_WITH_ENGINES + ONLY_WITH_OFFLOAD + ONLY_AFTER_A_LOSS + ONLY_WITH_GRAMMARS
        ):
            continue
        found = values(address, filled(expression, "10s"))
        if not any(math.isfinite(value) for value in found):
            empty[f"{name}: {expression}"] = found
    assert not empty


def test_every_alert_is_loaded_and_sees_data(watched):
    address, _ = watched
    (group,) = ask(address, "rules")["groups"]
    assert {rule["name"]: rule["health"] for rule in group["rules"]} == {
        rule["alert"]: "ok" for rule in ALERTS
    }
    empty = [
        (rule["alert"], operand)
        for rule in ALERTS
        for operand in operands(promql_parser.parse(rule["expr"]))
        if "prefill_engine" not in operand  # there are none here
        and not any(math.isfinite(value) for value in values(address, operand))
    ]
    assert not empty
    firing = [
        alert["labels"]["alertname"]
        for alert in ask(address, "alerts")["alerts"]
        if alert["state"] == "firing"
    ]
    assert firing == [], "a healthy cluster raises no alert"


def test_the_numbers_are_those_of_the_service(watched):
    address, _ = watched
    assert values(address, "count(nanocp:rows)") == [4.0]
    (tokens,) = values(address, "sum(increase(nanocp:generation_tokens_total[20s]))")
    (sampled,) = values(address, "sum(increase(nanocp:iteration_tokens_total_sum[20s]))")
    assert tokens > 0 and sampled == pytest.approx(tokens, rel=0.2), (
        "what instances sample is what clients get"
    )


def test_a_service_that_is_gone_is_down(watched):
    """This test is the last, because it closes the service's status port."""
    address, service = watched
    service._status.close()
    until(lambda: values(address, 'up{job="nanocp"} == 0') == [0.0], limit_s=60)
