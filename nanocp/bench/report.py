"""Benchmark results under the names of vllm/benchmarks/serve.py: printed block and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nanocp.bench.backends import RequestOutput
from nanocp.bench.names import METRICS

DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")


def tpot_s(output: RequestOutput) -> float:
    """Mean seconds per token after the first; 0 for one token, which goodput counts as good."""
    num_later = output.output_len - 1
    return (output.latency_s - output.ttft_s) / num_later if num_later > 0 else 0.0


def result(
    outputs: Sequence[RequestOutput],
    duration_s: float,
    goodput_ms: Mapping[str, float],
    percentile_metrics: Sequence[str],
    percentiles: Sequence[float],
) -> dict[str, Any]:
    """The JSON's values under vLLM's keys.

    goodput_ms: metric -> milliseconds that a good request does not exceed.
    """
    done = [output for output in outputs if output.success]
    total_input, total_output = sum(o.prompt_len for o in done), sum(o.output_len for o in done)
    peak_tokens, peak_requests = _peaks(done)
    values: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(outputs) - len(done),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(done) / duration_s,
        "request_goodput": sum(_is_good(o, goodput_ms) for o in done) / duration_s
        if goodput_ms
        else None,
        "output_throughput": total_output / duration_s,
        "total_token_throughput": (total_input + total_output) / duration_s,
        "input_lens": [o.prompt_len for o in outputs],
        "output_lens": [o.output_len if o.success else 0 for o in outputs],
        "ttfts": [o.ttft_s for o in outputs],
        "itls": [o.itl_s for o in outputs],
        "latencies": [o.latency_s for o in outputs],
        "start_times": [o.start_s for o in outputs],
        "queue_times": [o.client_queue_s for o in outputs],
        "generated_texts": [o.text for o in outputs],
        "errors": [o.error for o in outputs],
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
    }
    seconds = {
        "ttft": [o.ttft_s for o in done],
        "tpot": [tpot_s(o) for o in done if o.output_len > 1],
        "itl": [gap_s for o in done for gap_s in o.itl_s],
        "e2el": [o.latency_s for o in done],
        "client_queue_time": [o.client_queue_s for o in done],
        "e2el_including_client_queue": [o.latency_s + o.client_queue_s for o in done],
    }
    for name in METRICS:
        if name in percentile_metrics:
            ms = np.array(seconds[name] or [0.0]) * 1000
            values |= {
                f"mean_{name}_ms": float(ms.mean()),
                f"median_{name}_ms": float(np.median(ms)),
            }
            values[f"std_{name}_ms"] = float(ms.std())
            for percentile in percentiles:
                values[f"p{percentile:g}_{name}_ms"] = float(np.percentile(ms, percentile))
    return values


def block(
    values: Mapping[str, Any],
    rate_per_s: float,
    max_concurrency: int | None,
    percentile_metrics: Sequence[str],
    percentiles: Sequence[float],
) -> list[str]:
    """The lines that vLLM prints."""
    lines = [f"{' Serving Benchmark Result ':=^50}"]

    def say(name: str, value: float) -> None:
        lines.append(
            f"{name:<40} {value:<10}" if isinstance(value, int) else f"{name:<40} {value:<10.2f}"
        )

    say("Successful requests:", values["completed"])
    say("Failed requests:", values["failed"])
    if max_concurrency is not None:
        say("Maximum request concurrency:", max_concurrency)
    if not math.isinf(rate_per_s):
        say("Request rate configured (RPS):", float(rate_per_s))
    say("Benchmark duration (s):", values["duration"])
    say("Total input tokens:", values["total_input_tokens"])
    say("Total generated tokens:", values["total_output_tokens"])
    say("Request throughput (req/s):", values["request_throughput"])
    if values["request_goodput"] is not None:
        say("Request goodput (req/s):", values["request_goodput"])
    say("Output token throughput (tok/s):", values["output_throughput"])
    say("Peak output token throughput (tok/s):", values["max_output_tokens_per_s"])
    say("Peak concurrent requests:", float(values["max_concurrent_requests"]))
    say("Total token throughput (tok/s):", values["total_token_throughput"])
    for name, (short, header) in METRICS.items():
        if name in percentile_metrics:
            lines.append(f"{header:-^50}")
            say(f"Mean {short} (ms):", values[f"mean_{name}_ms"])
            say(f"Median {short} (ms):", values[f"median_{name}_ms"])
            for percentile in percentiles:
                say(f"P{percentile:g} {short} (ms):", values[f"p{percentile:g}_{name}_ms"])
    return [*lines, "=" * 50]


def _is_good(output: RequestOutput, goodput_ms: Mapping[str, float]) -> bool:
    took_s = {"ttft": output.ttft_s, "tpot": tpot_s(output), "e2el": output.latency_s}
    return all(took_s[name] * 1000 <= limit_ms for name, limit_ms in goodput_ms.items())


def _peaks(done: Sequence[RequestOutput]) -> tuple[float, int]:
    """Most tokens in a second counted from the first request, and most requests at a time."""
    if not done:
        return 0.0, 0
    first_s = min(output.start_s for output in done)
    times_s = [output.start_s + output.ttft_s + np.cumsum([0.0, *output.itl_s]) for output in done]
    tokens = np.concatenate([output.tokens or [1.0] * (1 + len(output.itl_s)) for output in done])
    per_second = np.bincount((np.concatenate(times_s) - first_s).astype(int), tokens)
    # A request that ends when another begins does not overlap it.
    edges = sorted([(o.start_s, 1) for o in done] + [(o.start_s + o.latency_s, -1) for o in done])
    return float(per_second.max()), int(np.cumsum([sign for _, sign in edges]).max())
