"""What clients asked for and got: latencies, lengths, ends, and answers over HTTP.

Enters: what the front ends observed of each request. Leaves: metrics. Does not know: the scheduler,
instances. Names, suffixes and buckets are vLLM's, where vLLM has the metric.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from control_plane.observe.metric_families import (
    INTER_TOKEN_S,
    PAUSE_S,
    REQUEST_S,
    TTFT_S,
    counter,
    histogram,
    lengths_up_to,
)
from control_plane.observe.observer import PAUSES, EndedRequest
from nanocp.values.plan import FinishReason

_NOT_ADMITTED = (FinishReason.REFUSED, FinishReason.INVALID)
"""Counted by their cap, in SchedulingMetrics."""


class RequestMetrics:
    """An Observer of every front end, each in a thread of its own."""

    def __init__(self, registry: CollectorRegistry, max_model_len: int) -> None:
        self._init_latencies(registry)
        self._init_lengths(registry, max_model_len)
        self._prompt_tokens = counter(
            registry, "prompt_tokens", "Prompt tokens of requests submitted."
        )
        self._generation_tokens = counter(registry, "generation_tokens", "Tokens generated.")
        self._success = counter(
            registry, "request_success", "Requests that ended.", "finished_reason"
        )
        for reason in FinishReason:
            if reason not in _NOT_ADMITTED:
                self._success.labels(reason.value)
        self._http_requests = counter(
            registry,
            "http_requests",
            "HTTP responses, refusals included.",
            "handler",
            "method",
            "status",
        )

    def _init_latencies(self, registry: CollectorRegistry) -> None:
        self._ttft = histogram(
            registry, "time_to_first_token_seconds", "Arrival to first token.", TTFT_S
        )
        self._inter_token = histogram(
            registry, "inter_token_latency_seconds", "Token to token.", INTER_TOKEN_S
        )
        self._pause = histogram(
            registry,
            "stream_pause_seconds",
            "Token to token, across the beginning of another attempt.",
            PAUSE_S,
            "cause",
        )
        for cause in PAUSES:
            self._pause.labels(cause)
        self._tpot = histogram(
            registry,
            "request_time_per_output_token_seconds",
            "Mean token to token of a request.",
            INTER_TOKEN_S,
        )
        self._e2e = histogram(registry, "e2e_request_latency_seconds", "Arrival to end.", REQUEST_S)
        self._queue = histogram(
            registry, "request_queue_time_seconds", "Arrival to placement.", REQUEST_S
        )
        self._inference = histogram(
            registry, "request_inference_time_seconds", "Placement to last token.", REQUEST_S
        )
        self._prefill = histogram(
            registry, "request_prefill_time_seconds", "Placement to first token.", REQUEST_S
        )
        self._decode = histogram(
            registry, "request_decode_time_seconds", "First token to last.", REQUEST_S
        )

    def _init_lengths(self, registry: CollectorRegistry, max_model_len: int) -> None:
        lengths = lengths_up_to(max_model_len)
        self._prompt_len = histogram(
            registry, "request_prompt_tokens", "Prompt tokens of requests that ended.", lengths
        )
        self._generated_len = histogram(
            registry, "request_generation_tokens", "Tokens that ended requests generated.", lengths
        )
        self._max_tokens = histogram(
            registry, "request_params_max_tokens", "max_tokens of requests that ended.", lengths
        )
        self._longest = histogram(
            registry,
            "request_max_num_generation_tokens",
            "Tokens of the longest choice of a client's request.",
            lengths,
        )
        self._num_choices = histogram(
            registry, "request_params_n", "Choices that a client asks for.", (1, 2, 5, 10, 20)
        )

    def inter_token_sums(self) -> tuple[int, float]:
        """(tokens, seconds between them) that clients got since the start; from any thread."""
        (family,) = self._inter_token.collect()
        sums = {
            sample.name.rsplit("_", 1)[1]: sample.value
            for sample in family.samples
            if not sample.labels
        }
        return int(sums["count"]), sums["sum"]

    def http_responded(self, endpoint: str, method: str, status: int) -> None:
        """An HTTP response began. Labels are vLLM's (prometheus-fastapi-instrumentator): `4xx`."""
        self._http_requests.labels(endpoint, method, f"{status // 100}xx").inc()

    # --- observer.Observer ---

    def on_request(self, num_choices: int) -> None:
        """See Observer."""
        self._num_choices.observe(num_choices)

    def on_submitted(self, prompt_len: int) -> None:
        """See Observer."""
        self._prompt_tokens.inc(prompt_len)

    def on_first_token(self, ttft_s: float) -> None:
        """See Observer."""
        self._generation_tokens.inc()
        self._ttft.observe(ttft_s)

    def on_token(self, interval_s: float, paused_by: str = "") -> None:
        """See Observer."""
        self._generation_tokens.inc()
        self._inter_token.observe(interval_s)
        if paused_by:
            self._pause.labels(paused_by).observe(interval_s)

    def on_finished(self, reason: FinishReason, request: EndedRequest) -> None:
        """See Observer. A refusal is counted elsewhere, where its cap is known."""
        if reason in _NOT_ADMITTED:
            return
        self._success.labels(reason.value).inc()
        self._e2e.observe(request.e2e_s)
        self._prompt_len.observe(request.prompt_len)
        self._generated_len.observe(request.generated_len)
        self._max_tokens.observe(request.max_tokens)
        if request.queue_s is not None:
            self._queue.observe(request.queue_s)
        if request.prefill_s is not None and request.decode_s is not None:
            self._prefill.observe(request.prefill_s)
            self._decode.observe(request.decode_s)
            self._inference.observe(request.prefill_s + request.decode_s)
            if request.generated_len > 1:
                self._tpot.observe(request.decode_s / (request.generated_len - 1))

    def on_request_over(self, longest: int) -> None:
        """See Observer."""
        self._longest.observe(longest)
