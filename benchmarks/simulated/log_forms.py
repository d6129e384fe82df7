"""One load in the files of five makers, in s, in ms and cut: what `nanocp plan --log` says.

Enters: the simulator, the whole public traces. Leaves: a table of forms, units, verdicts and rates
beside those of `nanocp simulate sweep`, and which claims hold. Does not know: how a policy decides.

Rates are simulated: they do not depend on the load of the machine. Files that are read alike share
their runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from benchmarks.kit.bench import BenchRun, Claim, at_least, at_most, bench
from nanocp.simulator.analyser.analysis import analyse
from nanocp.simulator.costs.cluster_file import load_cluster_file
from nanocp.simulator.loads.request_logs import RequestLog, read_log, read_trace
from nanocp.simulator.loads.workload import Workload
from nanocp.simulator.loads.workload_request import WorkloadRequest
from nanocp.simulator.sweep import sweep
from nanocp.simulator.trial import Trial

CLUSTER, NUM_INSTANCES = "h200x32-deepseek-v3", 16
EPOCH_S = 1_795_893_033
FACTORS = {"s": 1e-6, "ms": 1e-3}
"""What a microsecond is in a unit."""
NUM_READ = 2000
"""Requests of each load in a quick run."""
OFF = 0.03
"""Rates may differ by it, as the steps of both searches do."""

Line = dict[str, Any]
Requests = Sequence[WorkloadRequest]


def mooncake(requests: Requests, factor: float) -> str:
    """Lines of JSON, from 0."""
    entries = (
        {"timestamp": _at(one, factor), "input_length": one.prompt_len, "output_length": n}
        for one in requests
        for n in (one.output_len,)
    )
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def azure(requests: Requests, factor: float) -> str:
    """A CSV, from 0."""
    rows = (f"{_at(one, factor)},{one.prompt_len},{one.output_len}\n" for one in requests)
    return "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows)


def guidellm(requests: Requests, factor: float) -> str:
    """One JSON, times since 1970."""
    done = [
        {
            "request_start_time": _at(one, factor, EPOCH_S),
            "prompt_tokens": one.prompt_len,
            "output_tokens": one.output_len,
        }
        for one in requests
    ]
    return json.dumps({"benchmarks": [{"requests": {"successful": done, "errored": []}}]})


def aiperf(requests: Requests, factor: float) -> str:
    """Lines of JSON, times since 1970; the name says ns all the same."""
    return "".join(
        json.dumps(
            {
                "metadata": {
                    "request_start_ns": _at(one, factor, EPOCH_S),
                    "benchmark_phase": "profiling",
                },
                "metrics": {
                    "input_sequence_length": {"value": one.prompt_len, "unit": "tokens"},
                    "output_sequence_length": {"value": one.output_len, "unit": "tokens"},
                },
                "error": None,
            }
        )
        + "\n"
        for one in requests
    )


def vllm(requests: Requests, factor: float) -> str:
    """One JSON with a list for each field, times since the machine's start."""
    return json.dumps(
        {
            "input_lens": [one.prompt_len for one in requests],
            "output_lens": [one.output_len for one in requests],
            "start_times": [_at(one, factor, 6218.776) for one in requests],
        }
    )


FORMS: dict[str, Callable[[Requests, float], str]] = {
    each.__name__: each for each in (mooncake, azure, guidellm, aiperf, vllm)
}


def _at(one: WorkloadRequest, factor: float, since_s: float = 0.0) -> float:
    at = round((one.arrival_us + 1e6 * since_s) * factor, 3 if factor == FACTORS["s"] else 0)
    return int(at) if factor == FACTORS["ms"] else at


def files(requests: Requests) -> Iterator[tuple[str, str, str]]:
    """(form, how, text): in both units, and in s without the first third and cut in the last."""
    for form, make in FORMS.items():
        for unit, factor in FACTORS.items():
            yield form, unit, make(requests, factor)
        middle = make(requests[len(requests) // 3 :], FACTORS["s"])
        yield form, "cut in the middle", middle[: -len(middle) // 20]


def same_load(log: RequestLog, requests: Requests) -> bool:
    """Whether these requests, or a run of them, were read, to a millisecond."""
    found = [(one.prompt_len, one.output_len) for one in log.requests]
    lens = [(one.prompt_len, one.output_len) for one in requests]
    first = 0 if len(found) == len(lens) else len(requests) // 3
    part = requests[first : first + len(found)]
    gaps = zip(part, log.requests, strict=False)
    off_us = max(abs(a.arrival_us - part[0].arrival_us - b.arrival_us) for a, b in gaps)
    return lens[first : first + len(found)] == found and off_us <= 2_000


@cache
def judged(requests: tuple[WorkloadRequest, ...], is_quick: bool) -> Line:
    """Verdict and rate of `plan --log`, and the rate of `simulate sweep`."""
    rate = RequestLog(requests, ("", "", ""), 0).rate_per_s
    file = load_cluster_file(CLUSTER, NUM_INSTANCES)
    workload = Workload("log", rate, given=requests)
    trial = Trial(file, "cost_aware", workload, constants=file.default_constants)
    found = analyse(trial, requests, is_quick)
    swept = sweep(trial.at_rate(found.ours.rate_per_s), num_seeds=1)
    return {
        "verdict": str(found.verdict),
        "plan": round(found.ours.rate_per_s, 2),
        "judged": found.ours.num_judged,
        "sweep": round(swept.rate_per_s, 2),
    }


@bench("The first 2,000 requests are read, and nothing is played.")
def main(
    run: BenchRun,
    azure: Annotated[Path | None, "The whole Azure trace; needed."] = None,
    mooncake: Annotated[Path | None, "The whole Mooncake trace; needed."] = None,
    quickly: Annotated[bool, "Ask `plan --log --quick`."] = False,
) -> None:
    """Read each load in each form and unit, and judge it."""
    lines: list[Line] = []
    for kind, path in (("azure", azure), ("mooncake", mooncake)):
        if path is None or not path.exists():
            run.refuse(f"--{kind}: {path or 'the whole trace'} is not there")
        requests = read_trace(kind, path).requests[: NUM_READ if run.is_quick else None]
        with TemporaryDirectory() as folder:
            file = Path(folder) / "log"
            for form, how, text in run.track(list(files(requests)), kind, 3 * len(FORMS)):
                file.write_text(text)
                log = read_log(file)
                lines.append({"load": kind, "form": form, "how": how, "read": log.fields[0]})
                lines[-1] |= {"requests": len(log.requests), "same": same_load(log, requests)}
                if not run.is_quick:
                    # Times differ by a rounding, which decides nothing: the trace's are played.
                    first = 0 if how in FACTORS else len(requests) // 3
                    part = requests[first : first + len(log.requests)]
                    lines[-1] |= judged(tuple(part) if first == 0 else log.requests, quickly)
                run.keep(*lines[-1:], is_quick=run.is_quick)
    run.table("Each load in each form", lines)
    run.judge(claims(lines, quickly))


def claims(lines: Sequence[Line], quickly: bool) -> Iterator[Claim]:
    """What is claimed of the lines."""
    for line in lines:
        name = f"{line['load']} as {line['form']}, {line['how']}"
        yield Claim(f"{name}: the load is read as it is", line["same"])
        if "plan" in line:
            off = abs(line["plan"] / line["sweep"] - 1)
            yield at_most(f"{name}: plan off sweep by", off, 0.10 if quickly else OFF)
            yield at_least(f"{name}: requests judged", line["judged"], 1000)


if __name__ == "__main__":
    main()
