"""The table of metrics: each name once, with its kind, help, labels and buckets.

An instance's number is the label `engine`, as in vLLM: Prometheus owns `instance`.
docs/use/operate.md explains the metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from control_plane.observe.observer import PAUSES
from nanocp.values.plan import FinishReason

PREFIX = "nanocp:"
CAPS = ("max_queued_requests", "max_queued_tokens")
"""Refusals name the cap, which becomes the label `reason`."""
PHASES = ("leave", "load", "join")
"""Phases before a term: instances leave the last one, processes come, instances attach."""
NOT_ADMITTED = (FinishReason.REFUSED, FinishReason.INVALID)
"""Counted by their cap, as admission_rejections."""

# fmt: off
# The same as vLLM's (vllm/v1/metrics/loggers.py), so that panels made for vLLM show the same.
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
          10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
INTER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
                 10.0, 20.0, 40.0, 80.0)
REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0, 50.0,
             60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
LENGTHS = tuple(m * 10**power for power in range(10) for m in (1, 2, 5))
"""Buckets of lengths; those above the model's longest are left out."""
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Ours.
PAUSE_S = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0)
STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
SPREAD_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0,
            30.0)
SCHEDULER_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.5)
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99, 1.0)
CP_DEGREES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)
# fmt: on


class MetricRow(NamedTuple):
    """One metric."""

    kind: type[Counter] | type[Histogram] | type[GaugeMetricFamily]
    help: str
    labels: Mapping[str, Sequence[str]] = {}
    """Label values shown before they occur, so that a query has an answer and a rate sees the
    first."""
    buckets: Sequence[float] = ()


def _gauge(text: str, *labels: str) -> MetricRow:
    return MetricRow(GaugeMetricFamily, text, dict.fromkeys(labels, ()))


def _counter(text: str, *labels: str, **known: Sequence[str]) -> MetricRow:
    return MetricRow(Counter, text, dict.fromkeys(labels, ()) | known)


def _histogram(
    text: str, buckets: Sequence[float], *labels: str, **known: Sequence[str]
) -> MetricRow:
    return MetricRow(Histogram, text, dict.fromkeys(labels, ()) | known, buckets)


# fmt: off
SCHEDULING = {
    "step_kv_balance_ratio": _histogram("kv_balance_ratio of each window planned.", RATIOS),
    "step_rows_balance_ratio": _histogram("rows_balance_ratio of each window planned.", RATIOS),
    "scheduler_seconds": _histogram("One call of the scheduler.", SCHEDULER_S),
    "cp_degree": _histogram("Instances that hold KV of a request, when placed.", CP_DEGREES),
    "pages_moved": _counter("Pages sent from one instance to another while their row runs."),
    "binding_changes": _counter("Placed requests that were re-bound, or whose KV binding changed."),
    "admission_rejections": _counter(
        "Requests refused, by the cap.", reason=(*CAPS, FinishReason.INVALID.value)),
    "num_preemptions": _counter("Requests that were preempted for their frames."),
}
"""What the scheduler did."""
INSTANCES = {
    "step_spread_seconds": _histogram(
        "Most minus least time that an instance was busy in a window's mean step, without waits.",
        SPREAD_S),
    "table_resyncs": _counter("Full tables sent after a digest mismatch."),
}
"""What all instances reported of a window."""
EXPERTS = {
    "expert_changes": _counter(
        "Changes of the expert table, by outcome.", outcome=("done", "failed", "lost")),
    "experts_loaded": _counter("Experts that changes have loaded into slots."),
    "expert_load_seconds": _histogram("Loading of the experts of a change.", PAUSE_S),
}
"""Experts that follow the load."""
RECOVERY = {
    "members_lost": _counter(
        "Members that were lost, by cause.", kind=("instance", "prefill", "puller"),
        cause=("exit", "stream", "silent", "stuck", "gone", "unread")),
    "regroups": _counter("Terms that began, by cause.", cause=("loss", "request")),
    "recovery_seconds": _histogram("From the end of a term to the next one.", PAUSE_S),
    "recovery_phase_seconds": _histogram(
        "The parts of recovery_seconds, by what the next term waited for.", PAUSE_S, phase=PHASES),
    "request_attempts": _counter("Submissions of requests that were submitted before."),
    "replayed_tokens": _counter("Tokens whose KV later attempts computed."),
    "pages_kept": _counter("Pages whose KV later attempts found."),
    "stale_messages": _counter(
        "Messages of an earlier term, dropped.",
        kind=("window_done", "transfer_done", "transfer_fenced")),
}
"""What was lost, and what it cost."""
REQUESTS = {
    "time_to_first_token_seconds": _histogram("Arrival to first token.", TTFT_S),
    "inter_token_latency_seconds": _histogram("Token to token.", INTER_TOKEN_S),
    "stream_pause_seconds": _histogram(
        "Token to token, across the beginning of another attempt.", PAUSE_S, cause=PAUSES),
    "request_time_per_output_token_seconds": _histogram(
        "Mean token to token of a request.", INTER_TOKEN_S),
    "e2e_request_latency_seconds": _histogram("Arrival to end.", REQUEST_S),
    "request_queue_time_seconds": _histogram("Arrival to placement.", REQUEST_S),
    "request_inference_time_seconds": _histogram("Placement to last token.", REQUEST_S),
    "request_prefill_time_seconds": _histogram("Placement to first token.", REQUEST_S),
    "request_decode_time_seconds": _histogram("First token to last.", REQUEST_S),
    "request_prompt_tokens": _histogram("Prompt tokens of requests that ended.", LENGTHS),
    "request_generation_tokens": _histogram("Tokens that ended requests generated.", LENGTHS),
    "request_params_max_tokens": _histogram("max_tokens of requests that ended.", LENGTHS),
    "request_max_num_generation_tokens": _histogram(
        "Tokens of the longest choice of a client's request.", LENGTHS),
    "request_params_n": _histogram("Choices that a client asks for.", (1, 2, 5, 10, 20)),
    "prompt_tokens": _counter("Prompt tokens of requests submitted."),
    "generation_tokens": _counter("Tokens generated."),
    "request_success": _counter(
        "Requests that ended.",
        finished_reason=tuple(each.value for each in FinishReason if each not in NOT_ADMITTED)),
    "http_requests": _counter(
        "HTTP responses, refusals included.", "handler", "method", "status"),
}
"""Requests of clients; names and buckets are vLLM's, where it has the metric."""
READ = {
    # What the scheduler decided.
    "num_requests_running": _gauge(
        "Requests that decode: their KV is there, and they have not ended."),
    "num_requests_prefilling": _gauge("Requests that are placed and whose KV is not there yet."),
    "num_requests_waiting": _gauge(
        "Requests that do not decode yet: in the waiting queue or prefilling."),
    "head_of_line_age_seconds": _gauge(
        "How long the first request of the queue has waited; 0 if the queue is empty."),
    "tenants_waiting": _gauge("Tenants with a request in the waiting queue."),
    "tenant_service_spread_tokens": _gauge(
        "Served tokens of the waiting tenant that was served most, less those of the least."),
    "prefix_cache_queries": _counter(
        "Prompt tokens of placed requests, looked up in the prefix cache."),
    "prefix_cache_hits": _counter("Looked-up tokens whose pages were there and are shared."),
    "kv_tokens": _gauge("KV tokens resident or in transfer.", "engine"),
    "rows": _gauge("Rows: requests whose MoE binding it is.", "engine"),
    "rows_parked": _gauge("Rows that wait for a frame during their output.", "engine"),
    "attention_rows": _gauge("Attention rows: its own and those received.", "engine"),
    "frames_free": _gauge("Frames free.", "engine"),
    "frames_quarantined": _gauge("Frames quarantined.", "engine"),
    "frames_committed": _gauge("Frames committed.", "engine"),
    "frames_stranded": _gauge("Frames free while requests wait.", "engine"),
    "kv_cache_usage_perc": _gauge(
        "Share of frames that are not free; 1 means 100 percent.", "engine"),
    "kv_tokens_free": _gauge("KV tokens that all instances together have room for."),
    "rows_free": _gauge("Rows that all instances together have room for."),
    "longest_prompt_tokens": _gauge(
        "Tokens of the longest prompt whose KV fits now, over as many instances as it needs."),
    "load_tokens": _gauge(
        "KV tokens and rows of the mean instance, a row counted as the tokens that it costs."),
    "kv_balance_ratio": _gauge("Mean / max of kv_tokens over the instances; 1 is even."),
    "rows_balance_ratio": _gauge("Mean / max of rows over the instances; 1 is even."),
    "cache_config_info": _gauge("Pages and frames.", "engine", "block_size", "num_gpu_blocks"),
    "build_info": _gauge("Always 1; the program's version.", "version"),
    # Pages outside the frames.
    "kv_offload_pages": _gauge("Pages outside the frames.", "tier"),
    "kv_offload_stowed_pages": _counter("Pages that went there.", "tier"),
    "kv_offload_fetched_pages": _counter("Pages that came back from there.", "tier"),
    "kv_offload_hits": _counter(
        "Prompt tokens of placed requests whose pages came from outside the frames."),
    # What the instances reported of their windows.
    "exchange_bytes": _counter("Bytes of rows put into others' memory.", "engine", "kind"),
    "graph_rows": _counter("Rows of the buckets replayed, padding included.", "engine", "kind"),
    "graph_padding_rows": _counter("Padding rows of the buckets replayed.", "engine", "kind"),
    "hidden_exchange_seconds": _counter(
        "Time, at most, that one lane of a step computed while the other awaited the exchange.",
        "engine"),
    "lane_windows": _counter("Windows by the order of their lanes, or one_lane.", "order"),
    "graph_windows": _counter("Windows by the bucket replayed.", "bucket_rows", "bucket_received"),
    "step_seconds": _histogram("Mean step of a window.", STEP_S, "engine"),
    "step_exchange_seconds": _histogram(
        "Mean wait for the exchange in a step of a window.", STEP_S, "engine"),
    "grammar_mask_seconds": _histogram(
        "Mean wait for masks in a step of a window that has structured output.", SPREAD_S,
        "engine"),
    "iteration_tokens_total": _histogram("Tokens of a step.", ITERATION_TOKENS, "engine"),
    "spec_decode_num_drafts": _counter(
        "Rows of steps that checked a draft, each once a step, however many drafts it had.",
        "engine"),
    "spec_decode_num_draft_tokens": _counter(
        "Drafts that were checked. Those behind a wrong one are not; vLLM counts them too.",
        "engine"),
    "spec_decode_num_accepted_tokens": _counter("Drafts that became tokens.", "engine"),
    "spec_decode_num_accepted_tokens_per_pos": _counter(
        "Drafts that became tokens, by their place behind the row's known token, from 0.",
        "engine", "position"),
    "expert_imbalance": _gauge(
        "Pairs of a row and an expert at the hottest instance over the mean, lately.", "layer"),
    # The stages of a pipeline.
    "stage_wait_seconds": _counter(
        "Time that a stage idled while a pass was in flight, by cause.", "engine", "cause"),
    # The prefill's engines.
    "frames_awaiting_prefill": _gauge(
        "Frames of placed requests whose pages the prefill has yet to write."),
    "prefill_engine_up": _gauge("1 if the engine has passed its latest probe.", "url"),
    "prefill_engine_tokens_in_flight": _gauge("Prompt tokens that it is asked for.", "url"),
    "prefill_engine_requests": _counter(
        "Prompts that the engine was asked for, by outcome.", "url", "outcome"),
    "prefill_pages": _counter("Pages that the engine has sent.", "url"),
    "prefill_seconds": _counter(
        "Seconds of prompts that are done: until the answer, and until all pages arrived.",
        "url", "phase"),
    # Recovery.
    "term": _gauge("Number of the latest term that served."),
    "recovering": _gauge("1 while no term serves after one ended."),
    "requests_held": _gauge("Requests that wait for their next attempt."),
    "tickets_open": _gauge("Tickets of the prefill that some receiver has not answered."),
    "seats": _gauge("Seats by state.", "state"),
    "event_log_dropped": _counter("Calls that the event log lacks."),
}
"""Read when a page is made; the others are written as things happen."""
# fmt: on


class Recorded:
    """Counters and histograms that are written as things happen."""

    def __init__(
        self, registry: CollectorRegistry, rows: Mapping[str, MetricRow], max_model_len: int = 0
    ) -> None:
        """max_model_len: the highest bucket of LENGTHS is not above it."""
        self.counters: dict[str, Counter] = {}
        self.histograms: dict[str, Histogram] = {}
        for name, (kind, text, labels, buckets) in rows.items():
            made: Counter | Histogram
            if kind is Counter:
                made = self.counters[name] = Counter(PREFIX + name, text, labels, registry=registry)
            else:
                assert kind is Histogram, f"{name} is a gauge; its row belongs to READ"
                if buckets is LENGTHS:
                    buckets = [length for length in LENGTHS if length <= max_model_len]
                made = self.histograms[name] = Histogram(
                    PREFIX + name, text, labels, buckets=buckets, registry=registry
                )
            for values in product(*labels.values()) if labels else ():
                made.labels(*values)

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Add `by` to a counter."""
        counter = self.counters[name]
        (counter.labels(*labels) if labels else counter).inc(by)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add a value to a histogram."""
        histogram = self.histograms[name]
        (histogram.labels(*labels) if labels else histogram).observe(value)


def families(values: Mapping[str, float | Mapping[Any, float]]) -> list[Metric]:
    """Make gauges and counters for a page.

    values: by a metric's name its value, or those by its label, or by a tuple of labels.
    """
    made: list[Metric] = []
    for name, found in values.items():
        kind, text, labels, _ = READ[name]
        make = CounterMetricFamily if kind is Counter else GaugeMetricFamily
        family = make(PREFIX + name, text, labels=list(labels))
        for key, value in (found if isinstance(found, Mapping) else {(): found}).items():
            family.add_metric(list(map(str, key if isinstance(key, tuple) else (key,))), value)
        made.append(family)
    return made


def histogram_family(name: str) -> HistogramMetricFamily:
    """Make a histogram without values, for a page."""
    row = READ[name]
    return HistogramMetricFamily(PREFIX + name, row.help, labels=list(row.labels))
