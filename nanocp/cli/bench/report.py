"""Prints and saves results of `nanocp bench serve` in vLLM's form."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanocp.bench.names import GOODPUT_METRICS, METRICS
from nanocp.cli.bench.target import pairs
from nanocp.cli.options.typed import Option
from nanocp.config.choices import one_of

if TYPE_CHECKING:
    from nanocp.bench.backends import RequestOutput


@dataclass(frozen=True, slots=True)
class Report:
    """Options of the report."""

    save_result: Annotated[bool, typer.Option("--save-result")] = False
    """Write a JSON file."""
    result_dir: Option[Path | None] = None
    """Folder of the file."""
    goodput: list[str] = field(default_factory=list)
    """KEY:VALUE, most milliseconds of a good request; KEY is ttft, tpot or e2el."""
    percentile_metrics: str = "ttft,tpot,itl"
    """Metrics, separated by commas, of ttft, tpot, itl, e2el, client_queue_time and
    e2el_including_client_queue."""
    metric_percentiles: str = "99"
    """Percentiles of these metrics, separated by commas."""
    save_detailed: bool = False
    """The file has every request."""
    append_result: bool = False
    """Add a line to the file instead."""
    metadata: list[str] = field(default_factory=list)
    """KEY=VALUE for the JSON file."""
    label: str | None = None
    """The result's name; by default the backend."""
    result_filename: str | None = None
    """The file's name."""

    def check(self) -> None:
        """Raises ValueError, naming the option, for bad ones."""
        self._goodput_ms(), self._metrics(), self._percentiles(), pairs("--metadata", self.metadata)

    def result(
        self,
        outputs: Sequence[RequestOutput],
        duration_s: float,
        rate_per_s: float,
        max_concurrency: int | None,
    ) -> dict[str, Any]:
        """Print failures and the block; returns the values."""
        from nanocp.bench import report

        failed = [output for output in outputs if not output.success]
        if failed:
            print("Failed requests during benchmark run detected (capping to 10):")
            for number, output in enumerate(failed[:10]):
                # A server may say what a terminal cannot show.
                print(f"Error {number}: {output.error.encode(errors='backslashreplace').decode()}")
        metrics, percentiles = self._metrics(), self._percentiles()
        values = report.result(outputs, duration_s, self._goodput_ms(), metrics, percentiles)
        print("\n".join(report.block(values, rate_per_s, max_concurrency, metrics, percentiles)))
        return values

    def save(self, about: dict[str, Any], values: dict[str, Any]) -> None:
        """Write the JSON file if wanted; `about` describes the load."""
        from nanocp.bench.report import DETAILS

        if not (self.save_result or self.append_result):
            return
        moment = datetime.now().strftime("%Y%m%d-%H%M%S")
        tree = {"date": moment, **about}
        tree |= {
            key: value for key, value in values.items() if self.save_detailed or key not in DETAILS
        }
        path = (self.result_dir or Path()) / (self.result_filename or self._name(about, moment))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+" if self.append_result else "w", encoding="utf-8") as file:
            if self.append_result and file.tell():
                file.write("\n")
            json.dump(tree, file)
        print(f"result in {path}", file=sys.stderr)

    def _name(self, about: dict[str, Any], moment: str) -> str:
        concurrency, model = about["max_concurrency"], about["model_id"].split("/")[-1]
        beside = "" if concurrency is None else f"-concurrency{concurrency}"
        name = self.label or about["backend"]
        return f"{name}-{about['request_rate']}qps{beside}-{model}-{moment}.json"

    def _goodput_ms(self) -> dict[str, float]:
        limits: dict[str, float] = {}
        for item in self.goodput:
            name, _, value = item.partition(":")
            try:
                limits[name] = float(value)
            except ValueError:
                raise ValueError(
                    f"--goodput is {item!r}; it must be KEY:MILLISECONDS, as in ttft:500"
                ) from None
            if name not in GOODPUT_METRICS or not limits[name] >= 0:
                raise ValueError(
                    f"--goodput is {item!r}; the key must be {one_of(GOODPUT_METRICS)}, the value "
                    "0 or more"
                )
        return limits

    def _metrics(self) -> list[str]:
        names = [name.strip() for name in self.percentile_metrics.split(",") if name.strip()]
        for name in names:
            if name not in METRICS:
                raise ValueError(
                    f"--percentile-metrics has {name!r}; it must be {one_of(tuple(METRICS))}"
                )
        return names

    def _percentiles(self) -> list[float]:
        try:
            percentiles = [float(part) for part in self.metric_percentiles.split(",")]
        except ValueError:
            percentiles = [math.nan]
        if not all(0 <= percentile <= 100 for percentile in percentiles):
            raise ValueError(
                f"--metric-percentiles is {self.metric_percentiles!r}; it must be numbers from 0 "
                "to 100, separated by commas, as in 50,99"
            )
        return percentiles
