"""The /metrics page, scraped over HTTP and parsed as Prometheus does."""

import re
import socket
import time
import urllib.request
from dataclasses import replace
from functools import partial

import pytest
from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from control_plane.frontend.access.api_keys import OperatorKeys
from control_plane.observe.metrics.families import (
    EXPERTS,
    INSTANCES,
    READ,
    RECOVERY,
    REQUESTS,
    SCHEDULING,
)
from control_plane.observe.metrics.registry import Metrics
from control_plane.observe.metrics.stages import StageMetrics
from control_plane.observe.observer import EndedRequest
from control_plane.observe.status_server import StatusServer, metrics_page
from control_plane.scheduler.pages.offload import OffloadReading
from control_plane.scheduler.scheduler import Scheduler
from harness.services.drained_seat import drained_scheduler
from harness.services.hash_service import CONFIG as SERVICE
from harness.services.hash_service import generate, hash_service, prompt
from harness.waits import until
from nanocp.config.cluster import ClusterConfig
from nanocp.config.prefill import PrefillConfig
from nanocp.config.scheduler import SchedulerConfig
from nanocp.config.service import ServiceConfig
from nanocp.values.plan import Arrival, Ended, FinishReason, SeatsWanted, TransferDone, WindowDone

PROMETHEUS_ACCEPTS = (
    "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


def scrape(address):
    request = urllib.request.Request(
        f"http://{address}/metrics", headers={"Accept": PROMETHEUS_ACCEPTS}
    )
    with urllib.request.urlopen(request, timeout=60) as page:
        families = text_string_to_metric_families(page.read().decode())
        return {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for f in families
            for sample in f.samples
        }


KINDS = {Counter: "counter", Histogram: "histogram", GaugeMetricFamily: "gauge"}
CLUSTER = ClusterConfig(num_instances=2, num_frames=8, max_model_len=1000)


@pytest.fixture
def metrics():
    table = ((4, 0, 90, "nanoflow"),)
    return Metrics(CLUSTER, SchedulerConfig(steps_per_window=2, lanes="random", lane_table=table))


@pytest.fixture
def page(metrics):
    """A function that scrapes the page."""
    server = StatusServer(metrics.registry, lambda: b"{}", OperatorKeys(ServiceConfig()))
    address = f"127.0.0.1:{server.serve('127.0.0.1', 0)}"
    yield lambda: scrape(address)
    server.close()


def test_pages_outside_the_frames_are_counted_by_tier(metrics, page):
    assert not any("kv_offload" in name for name, *_ in page()), "a cluster without slots"
    metrics.offload.planned(OffloadReading((3, 1), (9, 4), (5, 2), 448))
    found = {key: value for key, value in page().items() if "kv_offload" in key[0]}
    of_tiers = {"pages": (3, 1), "stowed_pages_total": (9, 4), "fetched_pages_total": (5, 2)}
    assert found == {("nanocp:kv_offload_hits_total",): 448} | {
        (f"nanocp:kv_offload_{name}", ("tier", tier)): number
        for name, numbers in of_tiers.items()
        for tier, number in zip(("host", "file"), numbers, strict=True)
    }


def test_gauges_are_what_the_scheduler_decided(metrics, page):
    scheduler = Scheduler(
        CLUSTER, SchedulerConfig(policy="dual_balanced", cp_degree_buckets=((64, 1),))
    )
    began_us = time.monotonic_ns() // 1000 - 5_000_000
    scheduler.plan_window([Arrival(1, 200, 10), Arrival(2, 10, 10), Arrival(3, 500, 500)], began_us)
    metrics.scheduling.planned(0.001, scheduler, has_window=False, num_prefilling=1)
    page = page()
    loads = scheduler.requests.loads()
    assert (scheduler.requests.num_running, scheduler.requests.num_waiting) == (2, 1)
    assert page["nanocp:num_requests_running",] == 1
    assert page["nanocp:num_requests_prefilling",] == 1
    assert page["nanocp:num_requests_waiting",] == 2
    load = metrics.scheduling.load
    assert (load.num_running, load.num_prefilling, load.num_waiting) == (1, 1, 2)
    assert 5 <= page["nanocp:head_of_line_age_seconds",] < 15
    for engine, load in enumerate(loads):
        label = ("engine", str(engine))
        assert page["nanocp:kv_tokens", label] == load.kv_tokens
        assert page["nanocp:rows", label] == load.num_rows == 1
        assert (
            page["nanocp:frames_stranded", label]
            == page["nanocp:frames_free", label]
            == load.frames_free
            > 0
        )
        assert page["nanocp:frames_quarantined", label] == load.frames_quarantined
        assert page["nanocp:frames_committed", label] == load.frames_committed > 0
        assert page["nanocp:kv_cache_usage_perc", label] == load.frames_committed / 8
    assert sum(page["nanocp:attention_rows", ("engine", str(engine))] for engine in range(2)) == 3
    tokens = [load.kv_tokens for load in loads]
    assert page["nanocp:kv_balance_ratio",] == pytest.approx(sum(tokens) / 2 / max(tokens))
    assert page["nanocp:scheduler_seconds_count",] == 1
    assert page["nanocp:step_kv_balance_ratio_count",] == 0, "no window was issued"
    info = ("block_size", "64"), ("engine", "1"), ("num_gpu_blocks", "8")
    assert page["nanocp:cache_config_info", *info] == 1


def test_shared_prompt_tokens_are_counted_as_vllm_counts_them(metrics, page):
    scheduler = Scheduler(ClusterConfig(num_instances=1), SchedulerConfig())
    hashes = b"first page", b"second page"
    (transfer,) = scheduler.plan_window([Arrival(1, 130, 10, page_hashes=hashes)], 0).transfers
    scheduler.plan_window(
        [TransferDone(transfer.ticket, 0), Arrival(2, 150, 10, page_hashes=hashes)], 0
    )
    metrics.scheduling.planned(0.001, scheduler, has_window=True)
    page = page()
    assert (
        page["nanocp:prefix_cache_queries_total",],
        page["nanocp:prefix_cache_hits_total",],
    ) == (280, 128)


def test_an_empty_cluster_is_even(metrics, page):
    metrics.scheduling.planned(0.001, Scheduler(CLUSTER, SchedulerConfig()), has_window=True)
    page = page()
    assert (page["nanocp:kv_balance_ratio",], page["nanocp:rows_balance_ratio",]) == (1, 1)
    assert (
        page["nanocp:step_kv_balance_ratio_sum",]
        == page["nanocp:step_rows_balance_ratio_sum",]
        == 1
    )
    assert (
        page["nanocp:head_of_line_age_seconds",]
        == page["nanocp:frames_stranded", ("engine", "0")]
        == 0
    )


def test_counters_and_histograms(metrics, page):
    metrics.scheduling.ended(Ended(1, FinishReason.REFUSED, "max_queued_tokens (10) reached"))
    metrics.scheduling.ended(Ended(2, FinishReason.INVALID, "too long"))
    metrics.scheduling.ended(Ended(3, FinishReason.ABORTED, "aborted"))
    metrics.scheduling.placed(4)
    metrics.instances.resynced()
    metrics.scheduling.preempted()
    metrics.scheduling.moving(3)
    metrics.requests.on_request(2)
    metrics.requests.on_request_over(7)
    metrics.requests.on_submitted(100)
    metrics.requests.on_first_token(0.2)
    metrics.requests.on_token(0.015)
    metrics.requests.on_token(0.015, "term")
    for reason, times in (
        (FinishReason.LENGTH, EndedRequest(100, 3, 30, 0.25, 0.1, 0.1, 0.04)),
        (FinishReason.EXPIRED, EndedRequest(7, 0, 30, 9.0, None, None, None)),
        (FinishReason.REFUSED, EndedRequest(7, 0, 30, 0.01, None, None, None)),
    ):
        metrics.requests.on_finished(reason, times)
    assert metrics.requests.inter_token_sums() == (2, pytest.approx(0.03))
    page = page()
    assert page["nanocp:admission_rejections_total", ("reason", "max_queued_tokens")] == 1
    assert page["nanocp:admission_rejections_total", ("reason", "max_queued_requests")] == 0
    assert page["nanocp:admission_rejections_total", ("reason", "invalid")] == 1
    assert page["nanocp:cp_degree_bucket", ("le", "3.0")] == 0
    assert page["nanocp:cp_degree_bucket", ("le", "4.0")] == 1
    assert page["nanocp:table_resyncs_total",] == 1
    assert page["nanocp:num_preemptions_total",] == 1
    assert page["nanocp:pages_moved_total",] == 3
    assert page["nanocp:request_params_n_sum",] == 2
    assert page["nanocp:request_max_num_generation_tokens_sum",] == 7
    assert page["nanocp:prompt_tokens_total",] == 100
    assert page["nanocp:generation_tokens_total",] == 3
    assert page["nanocp:time_to_first_token_seconds_sum",] == pytest.approx(0.2)
    assert page["nanocp:inter_token_latency_seconds_count",] == 2
    assert page["nanocp:stream_pause_seconds_sum", ("cause", "term")] == pytest.approx(0.015)
    assert page["nanocp:stream_pause_seconds_count", ("cause", "controller")] == 0
    assert page["nanocp:e2e_request_latency_seconds_sum",] == pytest.approx(9.25)
    assert page["nanocp:request_queue_time_seconds_sum",] == pytest.approx(0.1)
    assert page["nanocp:request_inference_time_seconds_sum",] == pytest.approx(0.14)
    assert page["nanocp:request_time_per_output_token_seconds_sum",] == pytest.approx(0.02)
    assert page["nanocp:request_prompt_tokens_bucket", ("le", "50.0")] == 1
    assert page["nanocp:request_prompt_tokens_bucket", ("le", "100.0")] == 2
    assert page["nanocp:request_success_total", ("finished_reason", "length")] == 1
    assert page["nanocp:request_success_total", ("finished_reason", "expired")] == 1
    assert not [name for name, *labels in page if any(label == "instance" for label, _ in labels)]


def test_reports_of_a_window_become_sums_and_its_spread(metrics, page):
    report = partial(
        WindowDone, window=7, num_rows=3, bucket_rows=4, num_received=0, bucket_received=0
    )
    metrics.instances.stepped(
        report(0, step_us=25_000, exchange_us=2_000, num_tokens=6, route_bytes=10, expert_bytes=5),
        False,
    )
    metrics.instances.stepped(report(0, window=8, step_us=1, exchange_us=0), False)
    metrics.instances.stepped(
        report(1, step_us=25_000, exchange_us=9_000, mask_us=300, hidden_us=1_500, num_tokens=4,
               route_bytes=20, num_received=2, bucket_received=2),
        True,
    )  # fmt: skip
    for two_lanes in (1, 0, 1):
        metrics.instances.sent(two_lanes)
    page = page()
    assert page["nanocp:lane_windows_total", ("order", "nanoflow")] == 2
    assert page["nanocp:lane_windows_total", ("order", "one_lane")] == 1
    assert page["nanocp:step_seconds_sum", ("engine", "0")] == pytest.approx(0.025001)
    assert page["nanocp:step_exchange_seconds_sum", ("engine", "1")] == pytest.approx(0.009)
    assert page["nanocp:grammar_mask_seconds_sum", ("engine", "1")] == pytest.approx(0.0003)
    assert page["nanocp:grammar_mask_seconds_count", ("engine", "0")] == 0, "no grammar there"
    # Two steps of a window hide 1.5 ms each.
    assert page["nanocp:hidden_exchange_seconds_total", ("engine", "1")] == pytest.approx(0.003)
    assert page["nanocp:step_spread_seconds_sum",] == pytest.approx(0.007)
    assert page["nanocp:step_spread_seconds_count",] == 1, "instance 1 has yet to report window 8"
    assert page["nanocp:iteration_tokens_total_sum", ("engine", "0")] == 3
    assert page["nanocp:exchange_bytes_total", ("engine", "0"), ("kind", "route")] == 10
    assert page["nanocp:exchange_bytes_total", ("engine", "0"), ("kind", "expert")] == 5
    # Two windows of two steps, a bucket of four for three rows.
    assert page["nanocp:graph_rows_total", ("engine", "0"), ("kind", "own")] == 16
    assert page["nanocp:graph_padding_rows_total", ("engine", "0"), ("kind", "own")] == 4
    assert page["nanocp:graph_rows_total", ("engine", "1"), ("kind", "received")] == 4
    assert page["nanocp:graph_padding_rows_total", ("engine", "1"), ("kind", "received")] == 0
    assert page["nanocp:graph_windows_total", ("bucket_received", "0"), ("bucket_rows", "4")] == 2


def test_drafts_are_counted_by_vllms_names():
    """A draft is a round of one row, its tokens are the guesses (vllm/v1/spec_decode/metrics.py).

    Step rows of drafts are no padding.
    """

    def samples(metrics):
        families = text_string_to_metric_families(metrics_page(metrics.registry).decode())
        found = [sample for family in families for sample in family.samples]
        return {
            (sample.name.removeprefix("nanocp:"), *sample.labels.values()): sample.value
            for sample in found
            if "spec_decode" in sample.name or "padding" in sample.name
        }

    cluster, steps = ClusterConfig(num_instances=1), SchedulerConfig(steps_per_window=2)
    assert not [name for name, *_ in samples(Metrics(cluster, SchedulerConfig())) if "spec" in name]
    metrics = Metrics(cluster, replace(steps, num_drafts=2))
    done = WindowDone(0, 0, num_rows=3, bucket_rows=9, num_received=1, bucket_received=3)
    # The second window has room for one draft, the third for none.
    for drafts in (((6, 4), (4, 1)), ((5, 2),), ()):
        metrics.instances.stepped(replace(done, drafts=drafts), False)
    assert samples(metrics) == {
        ("spec_decode_num_drafts_total", "0"): 6 + 5,
        ("spec_decode_num_draft_tokens_total", "0"): 6 + 4 + 5,
        ("spec_decode_num_accepted_tokens_total", "0"): 4 + 1 + 2,
        ("spec_decode_num_accepted_tokens_per_pos_total", "0", "0"): 4 + 2,
        ("spec_decode_num_accepted_tokens_per_pos_total", "0", "1"): 1,
        ("graph_padding_rows_total", "0", "own"): 2 * (0 + 3 + 6),
        ("graph_padding_rows_total", "0", "received"): 2 * (0 + 1 + 2),
    }


def test_a_port_in_use_is_named(metrics):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            OSError, match=f"port {port} of 127.0.0.1: .* \\(service.metrics_port\\)"
        ):
            StatusServer(metrics.registry, lambda: b"{}", OperatorKeys(ServiceConfig())).serve(
                "127.0.0.1", port
            )


def tokens_of_steps(page):
    """Tokens that the four instances have reported."""
    return sum(
        page["nanocp:iteration_tokens_total_sum", ("engine", str(engine))] for engine in range(4)
    )


def test_a_service_counts_what_its_clients_got():
    with hash_service() as service:
        generate(service.address, prompt(70, 1), 20)
        generate(service.address, prompt(300, 2), 30)
        # A client has its last token before the instances have reported the window.
        until(lambda: tokens_of_steps(scrape(service.metrics_address)) >= 50)
        page = scrape(service.metrics_address)
    assert page["nanocp:prompt_tokens_total",] == 370
    assert page["nanocp:generation_tokens_total",] == 50
    assert page["nanocp:cp_degree_count",] == 2
    assert page["nanocp:cp_degree_sum",] == 1 + 4
    assert page["nanocp:request_success_total", ("finished_reason", "length")] == 2
    for engine in range(4):
        assert page["nanocp:step_seconds_count", ("engine", str(engine))] >= 30
        assert page["nanocp:step_seconds_sum", ("engine", str(engine))] > 0
        assert page["nanocp:exchange_bytes_total", ("engine", str(engine)), ("kind", "expert")] > 0
    # Both requests are generated somewhere, and the long one's row is linked to three others.
    engines = [("engine", str(engine)) for engine in range(4)]
    assert tokens_of_steps(page) == 50
    assert sum(
        page["nanocp:exchange_bytes_total", engine, ("kind", "route")] for engine in engines
    ) >= 3 * 30 * (25 + 8)
    assert (
        page["nanocp:request_decode_time_seconds_count",]
        == page["nanocp:request_queue_time_seconds_count",]
        == 2
    )


def test_no_series_says_when_it_was_created():
    page = metrics_page(Metrics(CLUSTER, SchedulerConfig()).registry).decode()
    assert "nanocp:" in page and not re.search(r"^\S+_created\b", page, re.M)


def test_a_seat_that_serves_nothing_is_in_no_sum_and_no_ratio(metrics, page):
    metrics.scheduling.planned(0.001, drained_scheduler(), has_window=True)
    page = page()
    of_seats = {
        key[0]: value for key, value in page.items() if key[1:] and key[1] == ("engine", "0")
    }
    assert not [
        key
        for key in page
        if ("engine", "1") in key and re.search("frames|kv_|:rows|attention|cache_config", key[0])
    ]
    assert of_seats["nanocp:frames_free"] == of_seats["nanocp:frames_stranded"] == 0
    assert of_seats["nanocp:kv_cache_usage_perc"] == 1
    for name in ("kv_balance_ratio", "rows_balance_ratio", "step_kv_balance_ratio_sum"):
        assert page[f"nanocp:{name}",] == 1, name


def test_the_load_of_a_seat_that_leaves_counts_what_it_has_and_nothing_as_free():
    scheduler = Scheduler(CLUSTER, SchedulerConfig(cp_degree_max=1))
    scheduler.plan_window([Arrival(1, 200, 10), Arrival(2, 200, 10)], 0)
    scheduler.plan_window([SeatsWanted((0,))], 0)
    stays, leaves = scheduler.requests.loads()
    assert stays.num_frames == 8 and stays.frames_free
    assert leaves.frames_free == 0 and leaves.num_frames == leaves.frames_committed > 0


def test_the_page_has_each_row_of_the_table():
    metrics = Metrics(CLUSTER, SchedulerConfig(), PrefillConfig(engines=("http://a:1",)))
    metrics.offload.planned(OffloadReading((3, 1), (9, 4), (5, 2), 448))
    metrics.experts.reported([1.0])
    StageMetrics(metrics.registry, num_stages=2)
    page = {
        family.name.removeprefix("nanocp:"): family
        for family in metrics.registry.collect()
        if not family.name.startswith("process_")
    }
    expected = {*READ, *SCHEDULING, *INSTANCES, *EXPERTS, *RECOVERY, *REQUESTS}
    assert set(page) == expected, f"only in the table, or only set: {set(page) ^ expected}"
    for rows in (READ, SCHEDULING, INSTANCES, EXPERTS, RECOVERY, REQUESTS):
        for name, row in rows.items():
            assert (page[name].documentation, page[name].type) == (row.help, KINDS[row.kind]), name
            known = {
                sample.labels.get(label) for sample in page[name].samples for label in row.labels
            }
            assert known >= {value for values in row.labels.values() for value in values}, name


def test_routers_find_what_they_read_by_the_names_of_vllm():
    metrics = Metrics(CLUSTER, SchedulerConfig(), vllm_model='a "b"\\c')
    scheduler = Scheduler(CLUSTER, SchedulerConfig(cp_degree_max=1))
    arrivals = [Arrival(1, 200, 10), Arrival(2, 10, 10), Arrival(3, 500, 500)]
    scheduler.plan_window(arrivals, time.monotonic_ns() // 1000)
    metrics.scheduling.planned(0.001, scheduler, has_window=False, num_prefilling=1)
    families = text_string_to_metric_families(metrics_page(metrics.registry).decode())
    found = {
        sample.name: (sample.labels, sample.value)
        for family in families
        for sample in family.samples
        if family.name.startswith("vllm:")
    }
    labels = {"model_name": 'a "b"\\c', "engine": "0"}
    num_free = sum(load.frames_free for load in scheduler.requests.loads())
    assert 0 < num_free < 16
    assert found == {
        "vllm:num_requests_running": (labels, 1),
        "vllm:num_requests_waiting": (labels, 2),
        "vllm:kv_cache_usage_perc": (labels, 1 - num_free / 16),
        "vllm:cache_config_info": (labels | {"block_size": "64", "num_gpu_blocks": "16"}, 1),
    }


@pytest.mark.parametrize("is_on", [False, True])
def test_a_service_has_the_names_of_vllm_on_both_ports_if_asked(is_on):
    cluster = replace(SERVICE.cluster, num_instances=1)
    ports = replace(SERVICE.service, vllm_metrics=is_on)
    with hash_service(replace(SERVICE, cluster=cluster, service=ports)) as service:
        pages = [scrape(service.metrics_address), scrape(service.http_address)]
    for page in pages:
        assert page["nanocp:num_requests_running",] == 0
        names = {name.removeprefix("vllm:") for name, *_ in page if name.startswith("vllm:")}
        both = {"num_requests_running", "num_requests_waiting"} if is_on else set()
        assert names == both | ({"kv_cache_usage_perc", "cache_config_info"} if is_on else set())
