"""Workloads: the paper's mixes, its static scenario, and traces that repeat."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate, count, takewhile
from pathlib import Path
from random import Random

from nanocp.config.choices import none_of
from nanocp.files.inputs import readable
from nanocp.simulator.loads.request_logs import STRICT, read_trace
from nanocp.simulator.loads.workload_request import WorkloadRequest

# Table 1 of the paper (arXiv 2605.21100), in percent. It bounds the lengths; within a range they
# are log-uniform here.
SHORT_LENGTHS = ((85.7, 32, 1_000), (10.7, 1_000, 10_000), (3.5, 10_000, 100_000))
"""ShareGPT-4o: (percent, from, below) tokens of prompt."""
LONG_LENGTHS = ((65.06, 100_000, 500_000), (34.94, 500_000, 1_000_000))
"""GitHub Issue."""
# The paper gives no output lengths. 2,279 requests running at peak (Figure 18) at 45 ms a token and
# 50 requests/s are 1,000 tokens each: log-normal with that mean.
OUTPUT_LEN_MEDIAN, OUTPUT_LEN_SIGMA, OUTPUT_LEN_MAX = 800.0, 0.7, 4096

# ShareGPT as vLLM's benchmark takes it: first turns of at most 1,024 tokens each way. 1,000 of them
# have 229,711 tokens of prompt and 203,068 of output (vllm-project/vllm, pull request 18566). The
# paper of pipelines that draws on it (DynaPipe) shows its lengths in a picture only.
SHAREGPT_PROMPT = (132.0, 1.25)
"""Median and sigma of a log-normal that is cut at SHAREGPT_LEN_MAX: mean 230 tokens."""
SHAREGPT_OUTPUT = (120.0, 1.1)
"""Median and sigma of the outputs: mean 203 tokens."""
SHAREGPT_LEN_MAX = 1024

MIXES = {"issue-0": 0.0, "issue-1": 0.01, "issue-5": 0.05, "issue-100": 1.0}
"""Share of long requests, by name."""
STATIC = {"static-1": 1, "static-3": 3, "static-5": 5, "static-7": 7}
"""Long requests per node of the static scenario (6.2), by name."""
_FACTOR_MAX = 1e9
_BURSTINESS_MIN = 0.01
"""With less, a seed's first arrivals practically coincide."""
_NUM_KEPT = 8


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests and their arrival process."""

    name: str
    """issue-0, issue-1, issue-5, issue-100, static-1, -3, -5, -7, sharegpt, fixed:PROMPT:OUTPUT,
    mooncake:PATH, azure:PATH; or log, of `given`."""
    rate_per_s: float
    """Requests a second. A trace is scaled in time to have it on average; the static scenario has
    none."""
    seed: int = 0
    burstiness: float = 1.0
    """Shape of the gamma-distributed gaps between arrivals: 1 is Poisson, less is burstier. Traces
    keep their own."""
    length_scale: float = 1.0
    """Factor on prompt lengths."""
    steady_tpot_us: int = 0
    """A mix or a trace begins in the steady state of this time per token (Little's law). 0: it
    begins empty. `nanocp.simulator.steady` finds the time."""
    given: tuple[WorkloadRequest, ...] = ()
    """Requests of a log, in order of arrival; it repeats as a trace does."""
    begins_us: int = 0
    """A trace is played from this microsecond of its time at the rate on."""
    num_instances: int = 32
    """Instances of the cluster that the static scenario fills."""
    instances_per_node: int = 8

    def __post_init__(self) -> None:
        if self.steady_tpot_us < 0:
            raise ValueError(f"steady_tpot_us is {self.steady_tpot_us}; it must not be negative")
        for name in ("rate_per_s", "burstiness", "length_scale"):
            value = getattr(self, name)
            if not 0 < value <= _FACTOR_MAX:
                raise ValueError(f"{name} is {value}; it must be positive, at most {_FACTOR_MAX:g}")
        if self.burstiness < _BURSTINESS_MIN:
            raise ValueError(
                f"burstiness is {self.burstiness}; it must be at least {_BURSTINESS_MIN}"
            )
        kind, _, path = self.name.partition(":")
        if self.name in MIXES or self.name in STATIC or self.name == "sharegpt":
            return
        if self.name == "log" and self.given:
            return
        if (kind in STRICT and path) or (kind == "fixed" and _fixed_lens(path)):
            return
        names = [*MIXES, *STATIC, "sharegpt", "fixed:PROMPT:OUTPUT"]
        names += [f"{kind}:PATH" for kind in STRICT]
        raise ValueError(f"workload is {self.name!r}; {none_of(self.name, names)}")

    def requests(self, max_model_len: int) -> Iterator[WorkloadRequest]:
        """The requests in order of arrival, those that are running at the start first.

        Mixes and repeated traces are endless. Prompts are cut to fit max_model_len. Raises
        ValueError for a malformed trace line, and for an output that leaves no room for a prompt.
        """
        for number, (at_us, drawn) in enumerate(self._drawn(), start=1):
            request = self._sized(number, drawn, max_model_len)
            if at_us >= 0:
                yield replace(request, arrival_us=round(at_us))
                continue
            num_done = self._num_done(at_us)
            yield replace(
                request,
                prompt_len=request.prompt_len + num_done,
                output_len=request.output_len - num_done,
                max_tokens=request.max_tokens - num_done,
                is_running=True,
            )

    def _sized(self, number: int, request: WorkloadRequest, max_model_len: int) -> WorkloadRequest:
        prompt_len = min(
            max(1, round(request.prompt_len * self.length_scale)),
            max_model_len - request.max_tokens,
        )
        if prompt_len < 1:
            raise ValueError(
                f"request {number} of {self.name} has {request.max_tokens} output tokens, which "
                f"leave no room for a prompt; max_model_len is {max_model_len}"
            )
        if prompt_len == request.prompt_len and self.length_scale == 1:
            return request
        # A prompt that is cut has the ids of what is left; a scaled one has none.
        hash_ids = request.hash_ids if self.length_scale == 1 else ()
        return replace(request, prompt_len=prompt_len, hash_ids=hash_ids)

    def _drawn(self) -> Iterator[tuple[float, WorkloadRequest]]:
        """(microsecond of arrival, request): those before 0 are still running then."""
        if self.name in MIXES or self.name == "sharegpt" or self.name.startswith("fixed:"):
            return self._mix()
        if self.name in STATIC:
            # No request ends in a run of two minutes: what is measured stays as it is.
            nodes = (self.num_instances, self.instances_per_node)
            static = static_scenario(*nodes, STATIC[self.name], OUTPUT_LEN_MAX)
            return ((0.0, request) for request in static)
        return self._trace()

    def _mix(self) -> Iterator[tuple[float, WorkloadRequest]]:
        """Draw past requests by a seed of their own, so that all policies get equal future ones."""
        past = takewhile(
            lambda drawn: drawn[0] < OUTPUT_LEN_MAX * self.steady_tpot_us,
            self._arrivals(f"past {self.seed}"),
        )
        running = [
            (-at_us, request)
            for at_us, request in past
            if request.output_len > self._num_done(-at_us)
        ]
        yield from reversed(running)
        yield from self._arrivals(self.seed)

    def _arrivals(self, seed: int | str) -> Iterator[tuple[float, WorkloadRequest]]:
        gap_us = 1e6 / (self.rate_per_s * self.burstiness)
        at_us = 0.0
        for gap, prompt_len, output_len in _draws(self.name, seed, self.burstiness):
            at_us += gap * gap_us
            yield at_us, WorkloadRequest(0, prompt_len, output_len, output_len)

    def _num_done(self, at_us: float) -> int:
        return int(-at_us / self.steady_tpot_us) if at_us < 0 else 0

    def _trace(self) -> Iterator[tuple[float, WorkloadRequest]]:
        kind, _, path = self.name.partition(":")
        file = readable(Path(path))
        changed_ns = file.stat().st_mtime_ns if file.exists() else 0
        requests = self.given or _read(kind, Path(path), changed_ns)
        if not requests:
            raise ValueError(f"{path} holds no request")
        span_us = max(requests[-1].arrival_us, 1)
        scale = len(requests) / (span_us / 1e6) / self.rate_per_s
        period_us = scale * span_us + 1e6 / self.rate_per_s
        num_ids = 1 + max((max(request.hash_ids, default=-1) for request in requests), default=-1)
        begins_us = -self.steady_tpot_us * max(request.output_len for request in requests)
        num_past = math.ceil(-begins_us / period_us)
        for cycle in count():
            cycle_us = (cycle - num_past) * period_us - self.begins_us
            for request in requests:
                at_us = cycle_us + scale * request.arrival_us
                if at_us >= begins_us and request.output_len > self._num_done(at_us):
                    hash_ids = tuple(cycle * num_ids + number for number in request.hash_ids)
                    yield at_us, replace(request, arrival_us=0, hash_ids=hash_ids)


class _Draws:
    """Cached draws of a mix, for searches over rates."""

    def __init__(self, name: str, seed: int | str, burstiness: float) -> None:
        self._name = name
        self._random = Random(seed)
        self._burstiness = burstiness
        self._drawn: list[tuple[float, int, int]] = []

    def __iter__(self) -> Iterator[tuple[float, int, int]]:
        """Yield (gap before it, prompt, output) of each request; gaps have mean burstiness."""
        for number in count():
            if number == len(self._drawn):
                gap = self._random.gammavariate(self._burstiness, 1.0)
                self._drawn.append((gap, *_draw_lens(self._name, self._random)))
            yield self._drawn[number]


_draws = lru_cache(_NUM_KEPT)(_Draws)


@lru_cache(_NUM_KEPT)
def _read(kind: str, path: Path, changed_ns: int) -> tuple[WorkloadRequest, ...]:
    """The requests of a trace. changed_ns: a cache key."""
    return read_trace(kind, path).requests


def _draw_lens(name: str, random: Random) -> tuple[int, int]:
    if name in MIXES:
        output_len = draw_output_len(random)
        return _draw_prompt_len(random, MIXES[name]), output_len
    if name == "sharegpt":
        prompt_len, output_len = (
            min(max(4, round(random.lognormvariate(math.log(median), sigma))), SHAREGPT_LEN_MAX)
            for median, sigma in (SHAREGPT_PROMPT, SHAREGPT_OUTPUT)
        )
        return prompt_len, output_len
    prompt_len, output_len = _fixed_lens(name.partition(":")[2])
    return prompt_len, output_len


def _fixed_lens(words: str) -> tuple[int, ...]:
    """(prompt, output) tokens of PROMPT:OUTPUT; empty for anything else."""
    lens = words.split(":")
    is_pair = len(lens) == 2 and all(n.isascii() and n.isdigit() and int(n) > 0 for n in lens)
    return tuple(map(int, lens)) if is_pair else ()


def static_scenario(
    num_instances: int, instances_per_node: int, long_per_node: int, output_len: int
) -> list[WorkloadRequest]:
    """Make the static scenario: 64 requests of 2,048 tokens a GPU, long_per_node of 512K a node.

    All arrive at once (6.2).
    """
    num_nodes = -(-num_instances // instances_per_node)
    long = [WorkloadRequest(0, 512 * 1024, output_len, output_len)] * (num_nodes * long_per_node)
    return long + [WorkloadRequest(0, 2048, output_len, output_len)] * (64 * num_instances)


def draw_len(random: Random, lengths: tuple[tuple[float, int, int], ...]) -> int:
    """A prompt length of the histogram: a range by its weight, log-uniform within it."""
    _, low, high = random.choices(lengths, cum_weights=_cumulative(lengths))[0]
    return min(int(low * (high / low) ** random.random()), high - 1)


@cache
def _cumulative(lengths: tuple[tuple[float, int, int], ...]) -> list[float]:
    return list(accumulate(weight for weight, _, _ in lengths))


def _draw_prompt_len(random: Random, share_long: float) -> int:
    return draw_len(random, LONG_LENGTHS if random.random() < share_long else SHORT_LENGTHS)


def draw_output_len(random: Random) -> int:
    """Draw the tokens of an output."""
    drawn = OUTPUT_LEN_MEDIAN * random.lognormvariate(0.0, OUTPUT_LEN_SIGMA)
    return min(max(1, round(drawn)), OUTPUT_LEN_MAX)
