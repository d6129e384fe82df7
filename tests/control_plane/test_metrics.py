"""The /metrics page, scraped over HTTP and parsed as Prometheus does."""

import socket
import urllib.request

import pytest
from hash_service import generate, hash_service, prompt
from prometheus_client.parser import text_string_to_metric_families

from control_plane.metrics import Metrics
from control_plane.scheduler import Scheduler
from nanocp.config import ClusterConfig, SchedulerConfig
from nanocp.plan import Arrival, Ended, FinishReason, WindowDone


def scrape(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as page:
        families = text_string_to_metric_families(page.read().decode())
        return {(sample.name, *sorted(sample.labels.items())): sample.value for f in families for sample in f.samples}


@pytest.fixture
def metrics():
    metrics = Metrics()
    yield metrics
    metrics.close()


def test_gauges_are_what_the_brain_decided(metrics):
    scheduler = Scheduler(ClusterConfig(num_instances=2, num_frames=8), SchedulerConfig(cp_degree_buckets=((64, 1),)))
    scheduler.plan_window([Arrival(1, 200, 10), Arrival(2, 10, 10), Arrival(3, 500, 500)], 0)
    metrics.planned(0.001, scheduler)
    port = metrics.serve("127.0.0.1", 0)
    page = scrape(f"127.0.0.1:{port}")
    loads = scheduler.loads()
    assert page["nanocp:num_requests_running",] == scheduler.num_running == 2
    assert page["nanocp:num_requests_waiting",] == scheduler.num_waiting == 1
    for engine, load in enumerate(loads):
        label = ("engine", str(engine))
        assert page["nanocp:kv_tokens", label] == load.kv_tokens
        assert page["nanocp:rows", label] == load.num_rows
        assert page["nanocp:frames_free", label] == load.frames_free
        assert page["nanocp:frames_quarantined", label] == load.frames_quarantined
        assert page["nanocp:frames_committed", label] == load.frames_committed > 0
    tokens = [load.kv_tokens for load in loads]
    assert page["nanocp:kv_balance_ratio",] == pytest.approx(sum(tokens) / 2 / max(tokens))
    assert page["nanocp:scheduler_seconds_count",] == 1


def test_an_empty_cluster_is_even(metrics):
    port = metrics.serve("127.0.0.1", 0)
    page = scrape(f"127.0.0.1:{port}")
    assert (page["nanocp:kv_balance_ratio",], page["nanocp:rows_balance_ratio",]) == (1, 1)


def test_counters_and_histograms(metrics):
    metrics.ended(Ended(1, FinishReason.REFUSED, "max_queued_tokens (10) reached"))
    metrics.ended(Ended(2, FinishReason.INVALID, "too long"))
    metrics.ended(Ended(3, FinishReason.ABORTED, "aborted"))
    metrics.placed(4)
    metrics.stepped(WindowDone(3, 0, (), 25_000, 2_000))
    metrics.resynced()
    metrics.preempted()
    metrics.moving(3)
    metrics.on_submitted(100)
    metrics.on_first_token(0.2)
    metrics.on_token(0.015)
    metrics.on_token(0.015)
    metrics.on_finished(FinishReason.LENGTH, 3, 0.23)
    metrics.on_finished(FinishReason.REFUSED, 0, 0.01)
    page = scrape(f"127.0.0.1:{metrics.serve('127.0.0.1', 0)}")
    assert page["nanocp:admission_rejections_total", ("reason", "max_queued_tokens")] == 1
    assert page["nanocp:admission_rejections_total", ("reason", "max_queued_requests")] == 0
    assert page["nanocp:admission_rejections_total", ("reason", "invalid")] == 1
    assert page["nanocp:cp_degree_bucket", ("le", "3.0")] == 0
    assert page["nanocp:cp_degree_bucket", ("le", "4.0")] == 1
    assert page["nanocp:step_seconds_sum", ("engine", "3")] == pytest.approx(0.025)
    assert page["nanocp:step_exchange_seconds_sum", ("engine", "3")] == pytest.approx(0.002)
    assert page["nanocp:table_resyncs_total",] == 1
    assert page["nanocp:num_preemptions_total",] == 1
    assert page["nanocp:pages_moved_total",] == 3
    assert page["nanocp:prompt_tokens_total",] == 100
    assert page["nanocp:generation_tokens_total",] == 3
    assert page["nanocp:time_to_first_token_seconds_sum",] == pytest.approx(0.2)
    assert page["nanocp:inter_token_latency_seconds_count",] == 2
    assert page["nanocp:e2e_request_latency_seconds_count",] == 1
    assert page["nanocp:request_success_total", ("finished_reason", "length")] == 1
    assert page["nanocp:request_success_total", ("finished_reason", "expired")] == 0
    assert not [name for name, *labels in page if any(label == "instance" for label, _ in labels)]


def test_a_port_in_use_is_named(metrics):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} of 127.0.0.1: .* \\(service.metrics_port\\)"):
            metrics.serve("127.0.0.1", port)


def test_a_service_counts_what_its_clients_got():
    with hash_service() as service:
        generate(service.address, prompt(70, 1), 20)
        generate(service.address, prompt(300, 2), 30)
        page = scrape(service.metrics_address)
    assert page["nanocp:prompt_tokens_total",] == 370
    assert page["nanocp:generation_tokens_total",] == 50
    assert page["nanocp:cp_degree_count",] == 2
    assert page["nanocp:cp_degree_sum",] == 1 + 4
    assert page["nanocp:request_success_total", ("finished_reason", "length")] == 2
    assert all(page["nanocp:step_seconds_count", ("engine", str(engine))] >= 30 for engine in range(4))
