"""Imbalance of ranks in Prometheus gauges of vLLM, SGLang or NanoCP: text scrapes or query JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

ROWS, WAITING, KV = "rows", "waiting", "kv"
GAUGES: Mapping[str, str] = {
    "vllm:num_requests_running": ROWS,
    "sglang:num_running_reqs": ROWS,
    "nanocp:rows": ROWS,
    "nanocp:kv_cache_usage_perc": KV,
    "vllm:num_requests_waiting": WAITING,
    "sglang:num_queue_reqs": WAITING,
    "vllm:kv_cache_usage_perc": KV,
    "vllm:gpu_cache_usage_perc": KV,
    "sglang:token_usage": KV,
}
RANK_LABELS = ("model_name", "instance", "pod", "engine", "engine_index", "dp_rank")
_FULL = 0.9

_Ranks = dict[str, float]
_Sample = tuple[str, Mapping[str, str], float, float]


@dataclass(frozen=True, slots=True)
class RankGauges:
    """Means over the moments at which two ranks or more were seen."""

    num_ranks: int
    num_moments: int
    rows_mean: float
    row_imbalance: float
    """(max - mean) / mean over summed values."""
    kv_used: float | None
    """None: no such gauges."""
    kv_imbalance: float | None
    kv_free_while_waiting: float | None
    """None: no gauges of single ranks."""
    one_waits_another_has_room: float | None
    """Share of the moments with a queue on one rank, and free KV without a queue on another."""


def read_gauges(path: Path) -> RankGauges:
    """Raises ValueError if there are no gauges of two ranks or more."""
    try:
        text = path.read_text("utf-8-sig")
        samples = list(_query(text) if text.lstrip().startswith("{") else _scrapes(text))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is neither what /metrics answers nor a range query's JSON: {error!r:.200}"
        ) from error
    # NanoCP's gauges by vLLM's names (service.vllm_metrics) are of all its ranks together.
    is_ours = any(name.startswith("nanocp:") for name, *_ in samples)
    series: dict[float, dict[str, _Ranks]] = defaultdict(lambda: defaultdict(dict))
    for name, labels, at, value in samples:
        is_whole = is_ours and name.startswith("vllm:")
        if name in GAUGES and 0 <= value < inf and not is_whole:
            rank = "/".join(labels[label] for label in RANK_LABELS if label in labels)
            series[at][GAUGES[name]][rank] = value
    moments = [of for of in series.values() if len(of[ROWS]) > 1]
    if not moments:
        raise ValueError(
            f"{path} has no gauge of two ranks or more; rows are {' or '.join(_of(ROWS))}, ranks "
            f"differ in one of the labels {', '.join(RANK_LABELS)}"
        )
    kv = [list(of[KV].values()) for of in moments if of[KV]]
    waiting = [of for of in moments if any(of[WAITING].values()) and of[KV]]
    has_waiting = any(of[WAITING] for of in moments) and bool(kv)
    rows = [list(of[ROWS].values()) for of in moments]
    return RankGauges(
        num_ranks=max(map(len, rows)),
        num_moments=len(moments),
        rows_mean=fmean(map(fmean, rows)),
        row_imbalance=_imbalance(rows),
        kv_used=fmean(map(fmean, kv)) if kv else None,
        kv_imbalance=_imbalance(kv) if kv else None,
        kv_free_while_waiting=(
            fmean(1 - fmean(of[KV].values()) for of in waiting)
            if waiting
            else (0.0 if has_waiting else None)
        ),
        one_waits_another_has_room=(
            sum(map(_has_room_elsewhere, waiting)) / len(moments) if has_waiting else None
        ),
    )


def _of(kind: str) -> list[str]:
    return [name for name, one in GAUGES.items() if one == kind]


def _imbalance(moments: list[list[float]]) -> float:
    """Weighted by load."""
    means = sum(map(fmean, moments))
    return sum(map(max, moments)) / means - 1 if means > 0 else 0.0


def _has_room_elsewhere(of: Mapping[str, _Ranks]) -> bool:
    return any(not of[WAITING].get(rank) and used < _FULL for rank, used in of[KV].items())


def _scrapes(text: str) -> Iterator[_Sample]:
    """Samples of scrapes; a repeated sample without a timestamp begins the next one."""
    scrape = 0
    seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            if key in seen and sample.timestamp is None:
                scrape, seen = scrape + 1, set()
            seen.add(key)
            at = scrape if sample.timestamp is None else float(sample.timestamp)
            yield sample.name, sample.labels, at, sample.value


def _query(text: str) -> Iterator[_Sample]:
    """Samples of the JSON of an instant or range query."""
    result: list[dict[str, Any]] = json.loads(text)["data"]["result"]
    for one in result:
        labels = one["metric"]
        for at, value in one.get("values") or [one["value"]]:
            yield labels.get("__name__", ""), labels, float(at), float(value)
