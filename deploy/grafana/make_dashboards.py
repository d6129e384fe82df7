"""Write the dashboards of this folder.

    python deploy/grafana/make_dashboards.py

The result is checked in, so that users run nothing. A test compares it with this program.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from panels import Panel, mean, panel, quantiles, rate

FOLDER = Path(__file__).parent / "dashboards"
_COLUMNS, _HEIGHT = 3, 8

ENGINE = " by (engine)"

DASHBOARDS: dict[str, list[Panel]] = {
    "service-health": [
        panel(
            "Scrapes",
            "short",
            ('up{job="$job"}', "{{instance}}"),
            about="1 if the last scrape succeeded.",
        ),
        panel(
            "Requests",
            "short",
            ("sum(nanocp:num_requests_running)", "running"),
            ("sum(nanocp:num_requests_waiting)", "waiting"),
            ("sum(nanocp:num_requests_prefilling)", "of them prefilling"),
            ("sum(nanocp:rows_parked)", "parked rows"),
        ),
        panel(
            "Head of line",
            "s",
            ("nanocp:head_of_line_age_seconds", "age of the first waiting request"),
        ),
        panel(
            "Ended",
            "reqps",
            (rate("request_success_total", " by (finished_reason)"), "{{finished_reason}}"),
        ),
        panel(
            "Refused", "reqps", (rate("admission_rejections_total", " by (reason)"), "{{reason}}")
        ),
        panel(
            "HTTP responses",
            "reqps",
            (rate("http_requests_total", " by (handler, status)"), "{{handler}} {{status}}"),
        ),
        panel(
            "Preemptions, resyncs",
            "ops",
            (rate("num_preemptions_total"), "preemptions"),
            (rate("table_resyncs_total"), "resyncs"),
        ),
        panel("Frames in use", "percentunit", ("nanocp:kv_cache_usage_perc", "engine {{engine}}")),
        panel(
            "Prefix-cache hit rate",
            "percentunit",
            (
                f"{rate('prefix_cache_hits_total')} / {rate('prefix_cache_queries_total')}",
                "prefix cache hits",
            ),
        ),
        panel(
            "Memory of the control plane",
            "bytes",
            ('process_resident_memory_bytes{job="$job"}', "resident"),
        ),
        panel(
            "Processor of the control plane",
            "percentunit",
            ('rate(process_cpu_seconds_total{job="$job"}[$__rate_interval])', "cores"),
        ),
    ],
    "latency-slos": [
        quantiles("Time to first token", "time_to_first_token_seconds"),
        quantiles("Inter-token latency", "inter_token_latency_seconds"),
        quantiles("Time per output token, by request", "request_time_per_output_token_seconds"),
        quantiles("End to end", "e2e_request_latency_seconds"),
        quantiles("Queue", "request_queue_time_seconds", about="From arrival to placement."),
        quantiles(
            "Prefill", "request_prefill_time_seconds", about="From placement to first token."
        ),
        quantiles("Decode", "request_decode_time_seconds", about="From first to last token."),
        quantiles(
            "Inference", "request_inference_time_seconds", about="From placement to last token."
        ),
        panel(
            "Share within the objective",
            "percentunit",
            *(
                (
                    f'sum(rate(nanocp:{metric}_bucket{{le="{limit}"}}[$__rate_interval])) / '
                    f"sum(rate(nanocp:{metric}_count[$__rate_interval]))",
                    text,
                )
                for metric, limit, text in (
                    ("inter_token_latency_seconds", "0.05", "tokens within 50 ms"),
                    ("time_to_first_token_seconds", "2.5", "first tokens within 2.5 s"),
                )
            ),
        ),
        panel(
            "Inter-token latency, distribution",
            "s",
            (
                (
                    "sum by (le) "
                    "(increase(nanocp:inter_token_latency_seconds_bucket[$__rate_interval]))"
                ),
                "",
            ),
            kind="heatmap",
        ),
    ],
    "throughput": [
        panel(
            "Tokens a second",
            "short",
            (rate("generation_tokens_total"), "generated"),
            (rate("prompt_tokens_total"), "prompt"),
        ),
        panel("Requests a second", "reqps", (rate("e2e_request_latency_seconds_count"), "ended")),
        panel(
            "Tokens in a step",
            "short",
            (mean("iteration_tokens_total", ENGINE), "engine {{engine}}"),
        ),
        quantiles("Prompt lengths", "request_prompt_tokens", "short"),
        quantiles("Output lengths", "request_generation_tokens", "short"),
        quantiles("Longest choice of a request", "request_max_num_generation_tokens", "short"),
        quantiles("max_tokens", "request_params_max_tokens", "short"),
        panel("Choices of a request", "short", (mean("request_params_n"), "mean n")),
        panel(
            "Steps a second",
            "short",
            ("max(rate(nanocp:step_seconds_count[$__rate_interval]))", "windows"),
        ),
    ],
    "balance": [
        panel(
            "KV tokens",
            "short",
            ("nanocp:kv_tokens", "engine {{engine}}"),
            about="What attention reads in a step.",
        ),
        panel(
            "Rows",
            "short",
            ("nanocp:rows", "engine {{engine}}"),
            about="Requests with their MoE binding on this instance.",
        ),
        panel(
            "Attention rows",
            "short",
            ("nanocp:attention_rows", "engine {{engine}}"),
            about="Own rows, and rows received from other instances.",
        ),
        panel(
            "Balance, mean / max",
            "percentunit",
            (mean("step_kv_balance_ratio"), "KV"),
            (mean("step_rows_balance_ratio"), "rows"),
            about="All planned windows; 1 is even.",
        ),
        panel(
            "Balance, the worst tenth of windows",
            "percentunit",
            (
                (
                    "histogram_quantile(0.1, sum by (le) "
                    "(rate(nanocp:step_kv_balance_ratio_bucket[$__rate_interval])))"
                ),
                "KV, p10",
            ),
            (
                (
                    "histogram_quantile(0.1, sum by (le) "
                    "(rate(nanocp:step_rows_balance_ratio_bucket[$__rate_interval])))"
                ),
                "rows, p10",
            ),
        ),
        panel(
            "Balance now",
            "percentunit",
            ("nanocp:kv_balance_ratio", "KV"),
            ("nanocp:rows_balance_ratio", "rows"),
        ),
        panel(
            "CP degree",
            "short",
            (mean("cp_degree"), "mean"),
            (
                (
                    "histogram_quantile(0.99, sum by (le) "
                    "(rate(nanocp:cp_degree_bucket[$__rate_interval])))"
                ),
                "p99",
            ),
            about="Instances that hold a request's KV when it is placed.",
        ),
        panel(
            "Frames",
            "short",
            ("sum(nanocp:frames_committed)", "committed"),
            ("sum(nanocp:frames_free)", "free"),
            ("sum(nanocp:frames_quarantined)", "quarantined"),
            ("sum(nanocp:frames_stranded)", "stranded: free while requests wait"),
        ),
        panel(
            "Moves a second",
            "short",
            (rate("pages_moved_total"), "pages"),
            (rate("binding_changes_total"), "re-bindings and changed KV bindings"),
        ),
        panel(
            "Prefill engines",
            "short",
            ("nanocp:prefill_engine_up", "{{url}} is up"),
            (rate("prefill_engine_requests_total", " by (url, outcome)"), "{{url}} {{outcome}}/s"),
            about="Only with prefill.engines.",
        ),
        panel(
            "Prompts at engines",
            "short",
            ("nanocp:prefill_engine_tokens_in_flight", "{{url}}: tokens"),
            ("sum(nanocp:frames_awaiting_prefill)", "frames that wait for pages"),
        ),
        panel(
            "Time of prompts at engines",
            "s",
            (
                "sum by (url, phase) (rate(nanocp:prefill_seconds_total[$__rate_interval])) / "
                "ignoring (phase) group_left sum by (url) "
                '(rate(nanocp:prefill_engine_requests_total{outcome="done"}[$__rate_interval]))',
                "{{url}} {{phase}}",
            ),
            about="Mean time until the engine answers, and from there until all pages are there.",
        ),
        panel(
            "Pages of engines a second",
            "short",
            (rate("prefill_pages_total", " by (url)"), "{{url}}"),
        ),
    ],
    "engine-internals": [
        panel(
            "Step",
            "s",
            (mean("step_seconds", ENGINE), "engine {{engine}}"),
            about="Mean wall time.",
        ),
        panel(
            "Waiting for others in a step",
            "s",
            (mean("step_exchange_seconds", ENGINE), "engine {{engine}}"),
        ),
        panel(
            "Busy in a step",
            "s",
            (
                "(sum by (engine) (rate(nanocp:step_seconds_sum[$__rate_interval])) - "
                "sum by (engine) (rate(nanocp:step_exchange_seconds_sum[$__rate_interval]))) / "
                "sum by (engine) (rate(nanocp:step_seconds_count[$__rate_interval]))",
                "engine {{engine}}",
            ),
            about="This differs between instances: every step waits for the busiest one.",
        ),
        quantiles(
            "Spread of a step", "step_spread_seconds", about="Busiest minus least busy instance."
        ),
        panel(
            "Exchange, bytes a second",
            "Bps",
            (rate("exchange_bytes_total", " by (kind)"), "{{kind}}"),
            about="route: queries and partials. expert: dispatch and combine.",
        ),
        panel(
            "Exchange, bytes a window",
            "bytes",
            (
                "sum by (kind) (rate(nanocp:exchange_bytes_total[$__rate_interval])) / "
                "ignoring (kind) group_left max(rate(nanocp:step_seconds_count[$__rate_interval]))",
                "{{kind}}",
            ),
        ),
        quantiles("Scheduler, one call", "scheduler_seconds"),
        panel(
            "Scheduler, busy share",
            "percentunit",
            ("sum(rate(nanocp:scheduler_seconds_sum[$__rate_interval]))", "busy"),
        ),
        panel(
            "Buckets replayed",
            "short",
            (
                rate("graph_windows_total", " by (bucket_rows, bucket_received)"),
                "{{bucket_rows}} + {{bucket_received}}",
            ),
            about="Rows + received attention rows of the captured step, windows a second.",
        ),
        panel(
            "Padding",
            "percentunit",
            (
                "sum by (kind) (rate(nanocp:graph_padding_rows_total[$__rate_interval])) / "
                "(sum by (kind) (rate(nanocp:graph_rows_total[$__rate_interval])) > 0)",
                "{{kind}}",
            ),
            about="Share of computed rows that are padding.",
        ),
        panel(
            "Configuration",
            "short",
            ("nanocp:cache_config_info", "{{num_gpu_blocks}} frames of {{block_size}}"),
        ),
    ],
}


def dashboards() -> Iterator[tuple[Path, str]]:
    """(file, text) of each dashboard."""
    for name, panels in DASHBOARDS.items():
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
        dashboard = {
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
        yield FOLDER / f"{name}.json", json.dumps(dashboard, indent=1) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in dashboards():
        path.write_text(text)
