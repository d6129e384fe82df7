"""OpenTelemetry traces: one span for each ended request, with its parts as children.

Spans go to a collector by OTLP over gRPC, in the background, only with
service.otlp_traces_endpoint.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from control_plane.observe.observer import EndedRequest, Observer
from control_plane.observe.timelines import Timeline, sentences
from nanocp.values.plan import FinishReason, Transfer

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

_EXPORT_TIMEOUT_S = 5.0
"""Longest time of one export; the last one may delay the end of the service so long."""
_FINE = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORTED)

TimelineOf = Callable[[int], Timeline | None]
"""The timeline of a request by its number."""


class Tracing:
    """Spans to one collector.

    Methods may be called from any thread and never block, except `stop`.
    """

    def __init__(self, endpoint: str, timeline_of: TimelineOf) -> None:
        """endpoint: http://host:port, or https. Raises ValueError without the packages."""
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            raise ValueError(
                f"otlp_traces_endpoint is set and the package {error.name} is not installed; pip "
                "install '.[otel]' brings it"
            ) from error
        exporter = OTLPSpanExporter(
            endpoint=endpoint,
            insecure=not endpoint.startswith("https://"),
            timeout=_EXPORT_TIMEOUT_S,
        )
        # `create` reads OTEL_RESOURCE_ATTRIBUTES.
        name = os.environ.get("OTEL_SERVICE_NAME", "nanocp")
        resource = Resource.create({"service.name": name})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("nanocp")
        self._timeline_of = timeline_of

    def ended(self, reason: FinishReason, request: EndedRequest) -> None:
        """Record a request that ends now."""
        from opentelemetry import trace
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {"traceparent": request.traceparent}
        context = TraceContextTextMapPropagator().extract(carrier)
        end_s = time.monotonic()
        arrived_s = end_s - request.e2e_s
        span = self._tracer.start_span(
            "llm_request",
            context,
            SpanKind.SERVER,
            _attributes(reason, request),
            start_time=_unix_ns(arrived_s),
        )
        if reason not in _FINE:
            span.set_status(Status(StatusCode.ERROR, request.message))
        timeline = self._timeline_of(request.request_id)
        moments = timeline.moments if timeline else ()
        for moment, (title, detail) in zip(
            moments, sentences(timeline) if timeline else (), strict=True
        ):
            span.add_event(title, {"detail": detail}, _unix_ns(moment.at_us / 1e6))
        self._add_parts(trace.set_span_in_context(span), arrived_s, end_s, request, moments)
        span.end(_unix_ns(end_s))

    def stop(self) -> None:
        """Export the rest, for a few seconds at most."""
        self._provider.force_flush(int(1000 * _EXPORT_TIMEOUT_S))
        self._provider.shutdown()

    def _add_parts(
        self, root: Context, arrived_s: float, end_s: float, request: EndedRequest, moments: Any
    ) -> None:
        from opentelemetry import trace

        placed_s = end_s if request.queue_s is None else arrived_s + request.queue_s
        self._child("queue", root, arrived_s, placed_s)
        if request.queue_s is None:
            return
        first_s = end_s if request.prefill_s is None else placed_s + request.prefill_s
        prefill = self._child("prefill", root, placed_s, first_s)
        there_s = next(
            (
                moment.at_us / 1e6
                for moment in moments
                if isinstance(moment.what, Transfer) and moment.what.source is None
            ),
            None,
        )
        if there_s is not None:
            self._child("transfer", trace.set_span_in_context(prefill), placed_s, there_s)
        if request.decode_s is not None:
            self._child("decode", root, first_s, first_s + request.decode_s)

    def _child(self, name: str, parent: Context, from_s: float, to_s: float) -> Span:
        span = self._tracer.start_span(name, parent, start_time=_unix_ns(from_s))
        span.end(_unix_ns(max(from_s, to_s)))
        return span


class TracedObserver:
    """An Observer that also makes a span of every ended request."""

    def __init__(self, observer: Observer, tracing: Tracing) -> None:
        self._observer, self._tracing = observer, tracing
        self.on_request = observer.on_request
        self.on_submitted = observer.on_submitted
        self.on_first_token = observer.on_first_token
        self.on_token = observer.on_token
        self.on_request_over = observer.on_request_over
        self.http_responded = observer.http_responded

    def on_finished(self, reason: FinishReason, times: EndedRequest) -> None:
        """Record an ended request, and make its span."""
        self._observer.on_finished(reason, times)
        self._tracing.ended(reason, times)


def _attributes(reason: FinishReason, request: EndedRequest) -> dict[str, Any]:
    """Use vLLM's names, where vLLM has them."""
    first_s = None
    if request.queue_s is not None and request.prefill_s is not None:
        first_s = request.queue_s + request.prefill_s
    values = {
        "gen_ai.request.id": request.client_id,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.usage.prompt_tokens": request.prompt_len,
        "gen_ai.usage.completion_tokens": request.generated_len,
        "gen_ai.response.finish_reasons": (reason.value,),
        "gen_ai.latency.time_in_queue": request.queue_s,
        "gen_ai.latency.time_to_first_token": first_s,
        "gen_ai.latency.e2e": request.e2e_s,
        "nanocp.request_number": request.request_id,
        "nanocp.endpoint": request.endpoint,
        "nanocp.cp_degree": request.cp_degree,
        "nanocp.moe_binding": request.moe_binding,
        "nanocp.num_attempts": request.num_attempts,
    }
    return {name: value for name, value in values.items() if value is not None}


def _unix_ns(monotonic_s: float) -> int:
    return time.time_ns() - time.monotonic_ns() + round(monotonic_s * 1e9)
