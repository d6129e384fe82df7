"""Write the dashboards of this folder.

    python deploy/grafana/make_dashboards.py

The result is checked in, so that users run nothing. A test compares it with this program.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from expert_panels import expert_panels
from memory_panels import now_panels, offload_panels
from panels import ENGINE, Panel, dashboard, mean, panel, quantiles, rate
from recovery_panels import recovery_panels
from step_panels import step_panels

FOLDER = Path(__file__).parent / "dashboards"

DASHBOARDS: dict[str, list[Panel]] = {
    "service-health": [
        *now_panels(),
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
            about="A waiting request has no row yet: it is in the queue or prefilling. A parked "
            "row waits for a frame.",
        ),
        panel(
            "Head of line",
            "s",
            ("nanocp:head_of_line_age_seconds", "age of the first waiting request"),
            about="How long the first request of the queue has waited; all others wait behind it.",
        ),
        panel(
            "Tenants",
            "short",
            ("nanocp:tenants_waiting", "tenants that wait"),
            ("nanocp:tenant_service_spread_tokens", "tokens between the most and the least served"),
            about="Clients with a request in the queue, by API key. A spread that grows: one class "
            "keeps another's tenants waiting.",
        ),
        panel(
            "Ended",
            "reqps",
            (rate("request_success_total", " by (finished_reason)"), "{{finished_reason}}"),
            about="Requests that ended, by reason. Only failed is the service's fault.",
        ),
        panel(
            "Refused",
            "reqps",
            (rate("admission_rejections_total", " by (reason)"), "{{reason}}"),
            about="Requests refused at once, by the limit that was reached.",
        ),
        panel(
            "HTTP responses",
            "reqps",
            (rate("http_requests_total", " by (handler, status)"), "{{handler}} {{status}}"),
            about="Answers of the OpenAI API by path and status.",
        ),
        panel(
            "Preemptions, resyncs",
            "ops",
            (rate("num_preemptions_total"), "preemptions"),
            (rate("table_resyncs_total"), "resyncs"),
            about="A preempted request gave its frames to others and is prefilled again. A resync "
            "sends an instance its whole table.",
        ),
        panel(
            "Frames in use",
            "percentunit",
            ("nanocp:kv_cache_usage_perc", "engine {{engine}}"),
            about="Share of an instance's frames that requests hold, those for coming tokens "
            "included.",
        ),
        panel(
            "Prefix-cache hit rate",
            "percentunit",
            (
                f"{rate('prefix_cache_hits_total')} / {rate('prefix_cache_queries_total')}",
                "prefix cache hits",
            ),
            about="Share of the looked-up prompt tokens whose KV was in the cluster already.",
        ),
        *recovery_panels(),
        panel(
            "Memory of the control plane",
            "bytes",
            ('process_resident_memory_bytes{job="$job"}', "resident"),
            about="Resident memory of the process that schedules. Growth under steady load is a "
            "leak.",
        ),
        panel(
            "Processor of the control plane",
            "percentunit",
            ('rate(process_cpu_seconds_total{job="$job"}[$__rate_interval])', "cores"),
            about="Cores that the process uses. At 1 the scheduler or the front end may be the "
            "limit.",
        ),
    ],
    "latency-slos": [
        quantiles(
            "Time to first token",
            "time_to_first_token_seconds",
            about="From arrival to the first token at the front end: queue, prefill and one step.",
        ),
        quantiles(
            "Inter-token latency",
            "inter_token_latency_seconds",
            about="Time from one token of a request to the next.",
        ),
        quantiles(
            "Time per output token, by request",
            "request_time_per_output_token_seconds",
            about="Mean time between the tokens of each ended request.",
        ),
        quantiles(
            "End to end",
            "e2e_request_latency_seconds",
            about="From arrival to the last token.",
        ),
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
            about="Share of tokens that kept the objective; change the limits to your own.",
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
            about="Tokens by time since the one before: two bands mean two kinds of steps.",
        ),
    ],
    "throughput": [
        panel(
            "Tokens a second",
            "short",
            (rate("generation_tokens_total"), "generated"),
            (rate("prompt_tokens_total"), "prompt"),
            about="Generated tokens, and prompt tokens of the requests that began.",
        ),
        panel(
            "Requests a second",
            "reqps",
            (rate("e2e_request_latency_seconds_count"), "ended"),
            about="Requests that ended, for any reason.",
        ),
        panel(
            "Tokens in a step",
            "short",
            (mean("iteration_tokens_total", ENGINE), "engine {{engine}}"),
            about="Mean tokens of a step on each instance: one for each row, and accepted drafts.",
        ),
        quantiles(
            "Prompt lengths",
            "request_prompt_tokens",
            "short",
            about="Tokens of the prompts of ended requests.",
        ),
        quantiles(
            "Output lengths",
            "request_generation_tokens",
            "short",
            about="Tokens generated by ended requests.",
        ),
        quantiles(
            "Longest choice of a request",
            "request_max_num_generation_tokens",
            "short",
            about="Tokens of the longest of a request's n choices.",
        ),
        quantiles(
            "max_tokens",
            "request_params_max_tokens",
            "short",
            about="Most tokens that clients asked for. Far above the output lengths, it makes "
            "promises large.",
        ),
        panel(
            "Choices of a request",
            "short",
            (mean("request_params_n"), "mean n"),
            about="Mean n: each choice is a row of its own.",
        ),
        panel(
            "Steps a second",
            "short",
            ("max(rate(nanocp:step_seconds_count[$__rate_interval]))", "windows"),
            about="Windows of the fastest instance; all instances step together.",
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
            about="A tenth of the windows were less even than this; 1 is even.",
        ),
        panel(
            "Balance now",
            "percentunit",
            ("nanocp:kv_balance_ratio", "KV"),
            ("nanocp:rows_balance_ratio", "rows"),
            about="The latest window; 1 is even.",
        ),
        panel(
            "Room, and what a router reads",
            "short",
            ("nanocp:kv_tokens_free", "KV tokens free"),
            ("nanocp:rows_free", "rows free"),
            ("nanocp:longest_prompt_tokens", "longest prompt that fits now"),
            ("nanocp:load_tokens", "load of the mean instance, KV tokens"),
            about="Of all instances together, the load of the mean one.",
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
            about="Frames of the cluster. Stranded ones are free, but no waiting request can use "
            "them.",
        ),
        panel(
            "Moves a second",
            "short",
            (rate("pages_moved_total"), "pages"),
            (rate("binding_changes_total"), "re-bindings and changed KV bindings"),
            about="Pages that moved while their request ran, and requests whose binding changed.",
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
            about="Prompt tokens that engines compute now, and frames that wait for their pages. "
            "Only with prefill.engines.",
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
            about="Pages of KV that engines wrote into frames. Only with prefill.engines.",
        ),
        *expert_panels(),
        *offload_panels(),
    ],
    "engine-internals": [
        *step_panels(),
        panel(
            "Waiting for masks in a step",
            "s",
            (mean("grammar_mask_seconds", ENGINE), "engine {{engine}}"),
            about="Mean time of a step in which the instance waits for masks of structured output. "
            "Empty without requests that ask for it.",
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
            about="Bytes that all instances send in one window, by kind.",
        ),
        quantiles(
            "Scheduler, one call",
            "scheduler_seconds",
            about="Time of one call of the scheduler, which plans a window.",
        ),
        panel(
            "Scheduler, busy share",
            "percentunit",
            ("sum(rate(nanocp:scheduler_seconds_sum[$__rate_interval]))", "busy"),
            about="Share of time that the scheduler computes. Near 1 it delays the windows.",
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
            about="Frames of the cluster and tokens of a page, from the configuration.",
        ),
    ],
}


def dashboards() -> Iterator[tuple[Path, str]]:
    """(file, text) of each dashboard."""
    for name, panels in DASHBOARDS.items():
        yield FOLDER / f"{name}.json", json.dumps(dashboard(name, panels), indent=1) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in dashboards():
        path.write_text(text)
