"""What the service tells Prometheus: names, suffixes and buckets as vLLM's, under `nanocp:`.

Enters: what the controller planned and the members reported, what the front end observed. Leaves: a
/metrics page. Does not know: plans' insides, clients. An instance's number is the label `engine`:
Prometheus owns `instance`. docs/operate.md says what each is for.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from control_plane.observe.observer import RequestTimes
from control_plane.scheduler.scheduler import Scheduler
from nanocp.config import ClusterConfig, Config
from nanocp.plan import PAGE_SIZE, ClusterLoad, Ended, FinishReason, InstanceLoad, WindowDone

_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
_SPREAD_S = (
    0.0001,
    0.0002,
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    5.0,
    30.0,
)
_SCHEDULER_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.5)
_RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99, 1.0)
_CP_DEGREES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)
# As vLLM has them (vllm/v1/metrics/loggers.py), so that panels made for it show the same.
# fmt: off
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
           80.0, 160.0, 640.0, 2560.0)
_INTER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                  80.0)
_REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
              960.0, 1920.0, 7680.0)
# fmt: on
_ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

_CAPS = ("max_queued_requests", "max_queued_tokens")
"""Refusals name the cap; these become the label `reason`."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The brain's state after its latest plan: one value, so that a scrape never sees half of two."""

    num_running: int = 0
    num_waiting: int = 0
    head_arrived_us: int | None = None
    """When the first of the queue arrived; None: nobody waits there."""
    loads: Sequence[InstanceLoad] = ()
    attention_rows: Sequence[int] = ()
    rows_committed: Sequence[int] = ()
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0


class _EngineHistograms(Collector):
    """A histogram for each instance in plain numbers, made metrics when the page is scraped.

    Every instance reports in every window: with the library's own observations 32 reports took
    three times as long as the call of the brain that follows them (docs/log.md).
    """

    def __init__(self, name: str, text: str, buckets: Sequence[float], num_engines: int) -> None:
        self._name, self._text, self._buckets = f"nanocp:{name}", text, tuple(buckets)
        self._bounds = [floatToGoString(bound) for bound in (*buckets, float("inf"))]  # type: ignore[no-untyped-call]
        self._counts = [[0] * len(self._bounds) for _ in range(num_engines)]
        self._sums = [0.0] * num_engines

    def observe(self, engine: int, value: float) -> None:
        """One value."""
        self._counts[engine][bisect_left(self._buckets, value)] += 1
        self._sums[engine] += value

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client.registry.Collector."""
        family = HistogramMetricFamily(self._name, self._text, labels=["engine"])
        for engine, (counts, total) in enumerate(zip(self._counts, self._sums, strict=True)):
            family.add_metric(
                [str(engine)], list(zip(self._bounds, accumulate(counts), strict=True)), total
            )
        yield family


@dataclass(slots=True)
class _EngineSums:
    """What an instance reported, since the start."""

    route_bytes: int = 0
    expert_bytes: int = 0
    own_slots: int = 0
    """Rows of the buckets replayed, padding included, by step."""
    own_padding: int = 0
    received_slots: int = 0
    received_padding: int = 0


@dataclass(slots=True)
class _Sums:
    """Plain numbers, made counters when the page is scraped: a report costs additions, not thirty
    label look-ups."""

    engines: list[_EngineSums]
    windows: dict[tuple[int, int], int] = field(default_factory=dict)
    """Bucket (rows, received) -> windows of it."""

    def add(self, done: WindowDone, num_steps: int) -> None:
        """Of one window."""
        engine = self.engines[done.instance]
        engine.route_bytes += done.route_bytes
        engine.expert_bytes += done.expert_bytes
        engine.own_slots += done.bucket_rows * num_steps
        engine.own_padding += (done.bucket_rows - done.num_rows) * num_steps
        engine.received_slots += done.bucket_received * num_steps
        engine.received_padding += (done.bucket_received - done.num_received) * num_steps
        bucket = done.bucket_rows, done.bucket_received
        self.windows[bucket] = self.windows.get(bucket, 0) + 1

    def collect(self) -> Iterable[CounterMetricFamily]:
        """As counters."""
        for name, text, kinds in (
            (
                "exchange_bytes",
                "Bytes of rows put into others' memory.",
                ("route_bytes", "expert_bytes"),
            ),
            (
                "graph_rows",
                "Rows of the buckets replayed, padding included.",
                ("own_slots", "received_slots"),
            ),
            ("graph_padding_rows", "Rows of padding in them.", ("own_padding", "received_padding")),
        ):
            family = CounterMetricFamily(f"nanocp:{name}", text, labels=["engine", "kind"])
            for engine, sums in enumerate(self.engines):
                for kind in kinds:
                    family.add_metric([str(engine), kind.split("_")[0]], getattr(sums, kind))
            yield family
        family = CounterMetricFamily(
            "nanocp:graph_windows",
            "Windows by the bucket replayed.",
            labels=["bucket_rows", "bucket_received"],
        )
        for (rows, received), count in sorted(self.windows.copy().items()):
            family.add_metric([str(rows), str(received)], count)
        yield family


class _ClusterState(Collector):
    """Gauges and counters made when the page is scraped, so that a plan costs one assignment and
    not thirty."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self._num_frames = cluster.num_frames
        self._engines = [str(engine) for engine in range(cluster.num_instances)]
        # Before the first call every frame is free.
        empty = [0] * cluster.num_instances
        loads = [InstanceLoad(0, 0, cluster.num_frames, 0, 0) for _ in empty]
        self.snapshot = _Snapshot(loads=loads, attention_rows=empty, rows_committed=empty)
        self.sums = _Sums([_EngineSums() for _ in self._engines])

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client.registry.Collector."""
        yield from self.sums.collect()
        now = self.snapshot
        loads = now.loads
        yield _gauge("num_requests_running", "Requests placed and not ended.", now.num_running)
        yield _gauge("num_requests_waiting", "Requests in the waiting queue.", now.num_waiting)
        age_s = 0.0 if now.head_arrived_us is None else time.monotonic() - now.head_arrived_us / 1e6
        yield _gauge(
            "head_of_line_age_seconds",
            "How long the first of the waiting queue waits; 0: nobody.",
            age_s,
        )
        yield CounterMetricFamily(
            "nanocp:prefix_cache_queries",
            "Prompt tokens of placed requests, looked up in the prefix cache.",
            value=now.num_queried_tokens,
        )
        yield CounterMetricFamily(
            "nanocp:prefix_cache_hits",
            "Those of them whose pages were there and are shared.",
            value=now.num_hit_tokens,
        )
        yield _per_engine(
            "kv_tokens", "KV tokens resident or in transfer.", [load.kv_tokens for load in loads]
        )
        yield _per_engine(
            "rows", "Rows: requests whose MoE binding it is.", [load.num_rows for load in loads]
        )
        parked = [
            all_ - load.num_rows for all_, load in zip(now.rows_committed, loads, strict=True)
        ]
        yield _per_engine(
            "rows_parked", "Rows that wait for a frame in the middle of their output.", parked
        )
        yield _per_engine(
            "attention_rows", "Attention rows: its own and those received.", now.attention_rows
        )
        for state in ("free", "quarantined", "committed"):
            values = [getattr(load, f"frames_{state}") for load in loads]
            yield _per_engine(f"frames_{state}", f"Frames {state}.", values)
        stranded = [load.frames_free if now.num_waiting else 0 for load in loads]
        yield _per_engine("frames_stranded", "Frames free while requests wait.", stranded)
        usage = [1 - load.frames_free / self._num_frames for load in loads]
        yield _per_engine(
            "kv_cache_usage_perc", "Frames not free, of all. 1 means 100 percent.", usage
        )
        kv_ratio, rows_ratio = _balance_ratios(loads)
        yield _gauge(
            "kv_balance_ratio", "Mean / max of kv_tokens over the instances; 1 is even.", kv_ratio
        )
        yield _gauge(
            "rows_balance_ratio", "Mean / max of rows over the instances; 1 is even.", rows_ratio
        )
        config = GaugeMetricFamily(
            "nanocp:cache_config_info",
            "Pages and frames.",
            labels=["engine", "block_size", "num_gpu_blocks"],
        )
        for engine in self._engines:
            config.add_metric([engine, str(PAGE_SIZE), str(self._num_frames)], 1)
        yield config


class Metrics:
    """The service's metrics in a registry of their own. Also the front end's Observer."""

    def __init__(self, config: Config) -> None:
        cluster = config.cluster
        self._num_steps = config.scheduler.steps_per_window
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._state = _ClusterState(cluster)
        self.registry.register(self._state)
        self._busy_us: dict[int, tuple[int, int]] = {}
        """Window -> (least, most) time that an instance was busy in a step, of those that have
        reported it."""
        self._init_engines(cluster)
        self._init_requests(cluster)

    def _init_engines(self, cluster: ClusterConfig) -> None:
        histogram, counter = self._histogram, self._counter
        num = cluster.num_instances
        self._step = _EngineHistograms("step_seconds", "Mean step of a window.", _STEP_S, num)
        self._exchange = _EngineHistograms(
            "step_exchange_seconds",
            "Mean wait for the exchange in a step of a window.",
            _STEP_S,
            num,
        )
        self._iteration = _EngineHistograms(
            "iteration_tokens_total", "Tokens of a step.", _ITERATION_TOKENS, num
        )
        for engines in (self._step, self._exchange, self._iteration):
            self.registry.register(engines)
        self._spread = histogram(
            "step_spread_seconds",
            "Most minus least time that an instance was busy in a window's mean step, waits left out.",
            _SPREAD_S,
        )
        self._kv_ratio = histogram(
            "step_kv_balance_ratio", "kv_balance_ratio of each window planned.", _RATIOS
        )
        self._rows_ratio = histogram(
            "step_rows_balance_ratio", "rows_balance_ratio of each window planned.", _RATIOS
        )
        self._scheduler = histogram("scheduler_seconds", "One call of the scheduler.", _SCHEDULER_S)
        self._pages_moved = counter(
            "pages_moved", "Pages sent from one instance to another while their row runs."
        )
        self._binding_changes = counter(
            "binding_changes", "Times a placed request was re-bound, or its KV binding changed."
        )
        self._resyncs = counter("table_resyncs", "Full tables sent after a digest mismatch.")

    def _init_requests(self, cluster: ClusterConfig) -> None:
        histogram, counter = self._histogram, self._counter
        lengths = _one_two_five(cluster.max_model_len)
        self._cp_degree = histogram(
            "cp_degree", "Instances that hold KV of a request, as placed.", _CP_DEGREES
        )
        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT_S)
        self._inter_token = histogram(
            "inter_token_latency_seconds", "Token to token.", _INTER_TOKEN_S
        )
        self._tpot = histogram(
            "request_time_per_output_token_seconds",
            "Mean token to token of a request.",
            _INTER_TOKEN_S,
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to end.", _REQUEST_S)
        self._queue = histogram("request_queue_time_seconds", "Arrival to placement.", _REQUEST_S)
        self._inference = histogram(
            "request_inference_time_seconds", "Placement to last token.", _REQUEST_S
        )
        self._prefill = histogram(
            "request_prefill_time_seconds", "Placement to first token.", _REQUEST_S
        )
        self._decode = histogram("request_decode_time_seconds", "First token to last.", _REQUEST_S)
        self._prompt_len = histogram(
            "request_prompt_tokens", "Prompt tokens of requests that ended.", lengths
        )
        self._generated_len = histogram(
            "request_generation_tokens", "Tokens generated by them.", lengths
        )
        self._max_tokens = histogram("request_params_max_tokens", "max_tokens of them.", lengths)
        self._longest = histogram(
            "request_max_num_generation_tokens",
            "Tokens of the longest choice that a client asked for.",
            lengths,
        )
        self._num_choices = histogram(
            "request_params_n", "Choices that a client asks for.", (1, 2, 5, 10, 20)
        )
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests submitted.")
        self._generation_tokens = counter("generation_tokens", "Tokens generated.")
        self._success = counter("request_success", "Requests that ended.", "finished_reason")
        self._rejections = counter(
            "admission_rejections", "Requests refused, by the cap.", "reason"
        )
        self._preemptions = counter(
            "num_preemptions", "Requests that gave their frames to others for a while."
        )
        self._http_requests = counter(
            "http_requests",
            "Answers of the HTTP door, refusals too.",
            "handler",
            "method",
            "status",
        )
        for reason in FinishReason:
            if reason not in (FinishReason.REFUSED, FinishReason.INVALID):
                self._success.labels(reason.value)
        for cap in (*_CAPS, FinishReason.INVALID.value):
            self._rejections.labels(cap)

    @property
    def load(self) -> ClusterLoad:
        """After the brain's latest call; from any thread."""
        now = self._state.snapshot
        return ClusterLoad(now.num_running, now.num_waiting, tuple(now.loads))

    # --- from the controller's thread ---

    def planned(self, seconds: float, scheduler: Scheduler, has_window: bool) -> None:
        """The brain was called, took so long, and issued a window or not."""
        self._scheduler.observe(seconds)
        state, queue = scheduler.decided
        head = next(iter(queue), None)
        loads = scheduler.loads()
        self._state.snapshot = _Snapshot(
            scheduler.num_running,
            scheduler.num_waiting,
            None if head is None else head.arrived_us,
            loads,
            tuple(state.committed.attention_rows),
            tuple(state.committed.rows),
            scheduler.prefix_sharing.num_queried_tokens,
            scheduler.prefix_sharing.num_hit_tokens,
        )
        if has_window:
            kv_ratio, rows_ratio = _balance_ratios(loads)
            self._kv_ratio.observe(kv_ratio)
            self._rows_ratio.observe(rows_ratio)

    def ended(self, ended: Ended) -> None:
        """A request did not end by itself; also from the front end's thread."""
        if ended.reason in (FinishReason.REFUSED, FinishReason.INVALID):
            cap = next((cap for cap in _CAPS if cap in ended.message), ended.reason.value)
            self._rejections.labels(cap).inc()

    def placed(self, cp_degree: int) -> None:
        """A request got its frames: at first or after it was preempted, not when it is re-bound or
        extended."""
        self._cp_degree.observe(cp_degree)

    def binding_changed(self) -> None:
        """A placed request was re-bound, or its KV binding changed."""
        self._binding_changes.inc()

    def moving(self, num_pages: int) -> None:
        """So many pages are on their way to another instance."""
        self._pages_moved.inc(num_pages)

    def preempted(self) -> None:
        """A request must wait for frames again."""
        self._preemptions.inc()

    def stepped(self, done: WindowDone, is_complete: bool) -> None:
        """An instance ran a window, perhaps as the last of all."""
        engine = done.instance
        self._step.observe(engine, done.step_us / 1e6)
        self._exchange.observe(engine, done.exchange_us / 1e6)
        self._iteration.observe(engine, done.num_tokens / self._num_steps)
        self._state.sums.add(done, self._num_steps)
        busy_us = done.step_us - done.exchange_us
        least, most = self._busy_us.get(done.window, (busy_us, busy_us))
        self._busy_us[done.window] = min(least, busy_us), max(most, busy_us)
        if is_complete:
            least, most = self._busy_us.pop(done.window)
            self._spread.observe((most - least) / 1e6)

    def resynced(self) -> None:
        """An instance asked for a full table."""
        self._resyncs.inc()

    def inter_token_sums(self) -> tuple[int, float]:
        """(tokens, seconds between them) that clients got since the start."""
        (family,) = self._inter_token.collect()
        sums = {
            sample.name.rsplit("_", 1)[1]: sample.value
            for sample in family.samples
            if not sample.labels
        }
        return int(sums["count"]), sums["sum"]

    # --- from the front end's thread (frontend.observer.Observer) ---

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

    def on_token(self, interval_s: float) -> None:
        """See Observer."""
        self._generation_tokens.inc()
        self._inter_token.observe(interval_s)

    def on_finished(self, reason: FinishReason, times: RequestTimes) -> None:
        """See Observer. Refusals are counted by their cap, where the brain's message is known."""
        if reason in (FinishReason.REFUSED, FinishReason.INVALID):
            return
        self._success.labels(reason.value).inc()
        self._e2e.observe(times.e2e_s)
        self._prompt_len.observe(times.prompt_len)
        self._generated_len.observe(times.generated_len)
        self._max_tokens.observe(times.max_tokens)
        if times.queue_s is not None:
            self._queue.observe(times.queue_s)
        if times.prefill_s is not None and times.decode_s is not None:
            self._prefill.observe(times.prefill_s)
            self._decode.observe(times.decode_s)
            self._inference.observe(times.prefill_s + times.decode_s)
            if times.generated_len > 1:
                self._tpot.observe(times.decode_s / (times.generated_len - 1))

    def on_request_over(self, longest: int) -> None:
        """See Observer."""
        self._longest.observe(longest)

    def http_answered(self, endpoint: str, method: str, status: int) -> None:
        """The HTTP door began an answer. Labels as vLLM's (prometheus-fastapi-instrumentator's):
        `4xx`."""
        self._http_requests.labels(endpoint, method, f"{status // 100}xx").inc()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"nanocp:{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"nanocp:{name}", text, labels, buckets=buckets, registry=self.registry)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"nanocp:{name}", text, value=value)


def _per_engine(name: str, text: str, values: Sequence[float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"nanocp:{name}", text, labels=["engine"])
    for engine, value in enumerate(values):
        family.add_metric([str(engine)], value)
    return family


def _balance_ratios(loads: Sequence[InstanceLoad]) -> tuple[float, float]:
    """Of KV tokens and of rows."""
    return _balance_ratio([load.kv_tokens for load in loads]), _balance_ratio(
        [load.num_rows for load in loads]
    )


def _balance_ratio(values: Sequence[int]) -> float:
    """Mean / max; 1 for no load at all, which is even."""
    return sum(values) / len(values) / max(values) if any(values) else 1.0


def _one_two_five(high: int) -> list[int]:
    """1, 2, 5, 10, ... up to `high`, as vLLM's buckets of lengths."""
    return [
        m * 10**power for power in range(len(str(high))) for m in (1, 2, 5) if m * 10**power <= high
    ]
