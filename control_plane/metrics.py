"""What the service tells Prometheus: names and suffixes as vLLM's, under `nanocp:`.

Enters: what the controller planned and the members reported, what the front end observed. Leaves: a /metrics page.
Does not know: plans' insides, clients. An instance's number is the label `engine`: Prometheus owns `instance`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from control_plane.scheduler import Scheduler
from nanocp.plan import Ended, FinishReason, InstanceLoad, WindowDone

_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
_SCHEDULER_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.5)
_TTFT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
_E2E_S = (0.05, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0, 3600.0)
_CP_DEGREES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)

_CAPS = ("max_queued_requests", "max_queued_tokens")
"""Refusals name the cap; these become the label `reason`."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The brain's state after its latest plan: one value, so that a scrape never sees half of two."""

    num_running: int = 0
    num_waiting: int = 0
    loads: Sequence[InstanceLoad] = ()


class _ClusterState(Collector):
    """Gauges made when the page is scraped, so that a plan costs one assignment and not thirty."""

    def __init__(self) -> None:
        self.snapshot = _Snapshot()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """See prometheus_client.registry.Collector."""
        now = self.snapshot
        yield _gauge("num_requests_running", "Requests placed and not ended.", now.num_running)
        yield _gauge("num_requests_waiting", "Requests in the waiting queue.", now.num_waiting)
        yield _per_engine("kv_tokens", "KV tokens resident or in transfer.", [load.kv_tokens for load in now.loads])
        yield _per_engine("rows", "Rows: requests whose MoE binding it is.", [load.num_rows for load in now.loads])
        for state in ("free", "quarantined", "committed"):
            values = [getattr(load, f"frames_{state}") for load in now.loads]
            yield _per_engine(f"frames_{state}", f"Frames {state}.", values)
        kv_ratio = _balance_ratio([load.kv_tokens for load in now.loads])
        rows_ratio = _balance_ratio([load.num_rows for load in now.loads])
        yield _gauge("kv_balance_ratio", "Mean / max of kv_tokens over the instances; 1 is even.", kv_ratio)
        yield _gauge("rows_balance_ratio", "Mean / max of rows over the instances; 1 is even.", rows_ratio)


class Metrics:
    """The service's metrics in a registry of their own. Also the front end's Observer."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._server: WSGIServer | None = None
        self._state = _ClusterState()
        self.registry.register(self._state)
        self._step = self._histogram("step_seconds", "Mean step of a window.", _STEP_S, "engine")
        self._exchange = self._histogram(
            "step_exchange_seconds", "Mean wait for the exchange in a step of a window.", _STEP_S, "engine"
        )
        self._scheduler = self._histogram("scheduler_seconds", "One call of the scheduler.", _SCHEDULER_S)
        self._cp_degree = self._histogram("cp_degree", "Instances that hold KV of a request, as placed.", _CP_DEGREES)
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT_S)
        self._inter_token = self._histogram("inter_token_latency_seconds", "Token to token.", _INTER_TOKEN_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to end.", _E2E_S)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests submitted.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._success = self._counter("request_success", "Requests that ended.", "finished_reason")
        self._rejections = self._counter("admission_rejections", "Requests refused, by the cap.", "reason")
        self._pages_moved = self._counter(
            "pages_moved", "Pages sent from one instance to another while their row runs."
        )
        self._preemptions = self._counter("num_preemptions", "Requests that gave their frames to others for a while.")
        self._resyncs = self._counter("table_resyncs", "Full tables sent after a digest mismatch.")
        for reason in FinishReason:
            if reason not in (FinishReason.REFUSED, FinishReason.INVALID):
                self._success.labels(reason.value)
        for cap in _CAPS:
            self._rejections.labels(cap)

    def serve(self, host: str, port: int) -> int:
        """Serve /metrics in a thread until close; returns the port. Raises OSError naming the port."""
        try:
            self._server, _ = start_http_server(port, host, self.registry)
        except OSError as error:
            raise OSError(f"cannot listen on port {port} of {host}: {error.strerror} (service.metrics_port)") from error
        return int(self._server.server_port)

    def close(self) -> None:
        """Close the port. Idempotent."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    # --- from the controller's thread ---

    def planned(self, seconds: float, scheduler: Scheduler) -> None:
        """The brain was called, and took so long."""
        self._scheduler.observe(seconds)
        self._state.snapshot = _Snapshot(scheduler.num_running, scheduler.num_waiting, scheduler.loads())

    def ended(self, ended: Ended) -> None:
        """A request did not end by itself; also from the front end's thread."""
        if ended.reason in (FinishReason.REFUSED, FinishReason.INVALID):
            cap = next((cap for cap in _CAPS if cap in ended.message), ended.reason.value)
            self._rejections.labels(cap).inc()

    def placed(self, cp_degree: int) -> None:
        """A request got its frames: at first or after it was preempted, not when it is re-bound or extended."""
        self._cp_degree.observe(cp_degree)

    def moving(self, num_pages: int) -> None:
        """So many pages are on their way to another instance."""
        self._pages_moved.inc(num_pages)

    def preempted(self) -> None:
        """A request must wait for frames again."""
        self._preemptions.inc()

    def stepped(self, done: WindowDone) -> None:
        """An instance ran a window."""
        self._step.labels(done.instance).observe(done.step_us / 1e6)
        self._exchange.labels(done.instance).observe(done.exchange_us / 1e6)

    def resynced(self) -> None:
        """An instance asked for a full table."""
        self._resyncs.inc()

    # --- from the front end's thread (frontend.observer.Observer) ---

    def on_submitted(self, prompt_len: int) -> None:
        """See Observer."""
        self._prompt_tokens.inc(prompt_len)

    def on_first_token(self, ttft_s: float) -> None:
        """See Observer."""
        self._generation_tokens.inc()
        self._ttft.observe(ttft_s)

    def on_token(self, interval_s: float) -> None:
        """See Observer."""
        self._generation_tokens.inc()
        self._inter_token.observe(interval_s)

    def on_finished(self, reason: FinishReason, generated_len: int, e2e_s: float) -> None:
        """See Observer. Refusals are counted by their cap, where the brain's message is known."""
        if reason not in (FinishReason.REFUSED, FinishReason.INVALID):
            self._success.labels(reason.value).inc()
            self._e2e.observe(e2e_s)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"nanocp:{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"nanocp:{name}", text, labels, buckets=buckets, registry=self.registry)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"nanocp:{name}", text, value=value)


def _per_engine(name: str, text: str, values: Sequence[int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"nanocp:{name}", text, labels=["engine"])
    for engine, value in enumerate(values):
        family.add_metric([str(engine)], value)
    return family


def _balance_ratio(values: Sequence[int]) -> float:
    """Mean / max; 1 for no load at all, which is even."""
    return sum(values) / len(values) / max(values) if any(values) else 1.0
