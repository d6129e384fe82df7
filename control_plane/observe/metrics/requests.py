"""Metrics of requests: latencies, lengths, ends, and answers over HTTP, with vLLM's names."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from control_plane.observe.metrics.families import NOT_ADMITTED, REQUESTS, Recorded
from control_plane.observe.observer import EndedRequest, Observer
from nanocp.values.plan import FinishReason


class RequestMetrics(Observer):
    """An Observer of every front end, each in its own thread."""

    def __init__(self, registry: CollectorRegistry, max_model_len: int) -> None:
        self._recorded = Recorded(registry, REQUESTS, max_model_len)

    def inter_token_sums(self) -> tuple[int, float]:
        """Return (tokens, seconds between them) of clients since the start; from any thread."""
        (family,) = self._recorded.histograms["inter_token_latency_seconds"].collect()
        sums = {
            sample.name.rsplit("_", 1)[1]: sample.value
            for sample in family.samples
            if not sample.labels
        }
        return int(sums["count"]), sums["sum"]

    def http_responded(self, endpoint: str, method: str, status: int) -> None:
        """Record an HTTP response. Labels are vLLM's (prometheus-fastapi-instrumentator): `4xx`."""
        self._recorded.count("http_requests", endpoint, method, f"{status // 100}xx")

    # --- observer.Observer ---

    def on_request(self, num_choices: int) -> None:
        self._recorded.observe("request_params_n", num_choices)

    def on_submitted(self, prompt_len: int) -> None:
        self._recorded.count("prompt_tokens", by=prompt_len)

    def on_first_token(self, ttft_s: float) -> None:
        self._recorded.count("generation_tokens")
        self._recorded.observe("time_to_first_token_seconds", ttft_s)

    def on_token(self, interval_s: float, paused_by: str = "") -> None:
        self._recorded.count("generation_tokens")
        self._recorded.observe("inter_token_latency_seconds", interval_s)
        if paused_by:
            self._recorded.observe("stream_pause_seconds", interval_s, paused_by)

    def on_finished(self, reason: FinishReason, request: EndedRequest) -> None:
        """Record an ended request; a refusal is counted elsewhere, with its cap."""
        if reason in NOT_ADMITTED:
            return
        self._recorded.count("request_success", reason.value)
        prefill_s, decode_s = request.prefill_s, request.decode_s
        observed: dict[str, float | None] = {
            "e2e_request_latency_seconds": request.e2e_s,
            "request_prompt_tokens": request.prompt_len,
            "request_generation_tokens": request.generated_len,
            "request_params_max_tokens": request.max_tokens,
            "request_queue_time_seconds": request.queue_s,
        }
        if prefill_s is not None and decode_s is not None:
            observed["request_prefill_time_seconds"] = prefill_s
            observed["request_decode_time_seconds"] = decode_s
            observed["request_inference_time_seconds"] = prefill_s + decode_s
            if request.generated_len > 1:
                per_token_s = decode_s / (request.generated_len - 1)
                observed["request_time_per_output_token_seconds"] = per_token_s
        for name, value in observed.items():
            if value is not None:
                self._recorded.observe(name, value)

    def on_request_over(self, longest: int) -> None:
        self._recorded.observe("request_max_num_generation_tokens", longest)
