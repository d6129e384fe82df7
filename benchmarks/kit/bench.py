"""What benchmarks share: options, the machine, progress, tables, claims and the file of results.

Enters: a function that measures. Leaves: a program with `--quick`, `--json PATH` and the function's
own options; its exit status is 1 if a claim is missed, 2 if none could be judged or the time was
over. Does not know: what is measured. Only tables and progress need more than the standard library:
a GPU machine may have torch and Triton only.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from benchmarks.kit import machine

Result = dict[str, Any]
Each = TypeVar("Each")
CANNOT_JUDGE = 2
"""Exit status of a run that judged none of its claims, or not all: it is no success."""
_NUM_RESAMPLES = 4000


class Claim(NamedTuple):
    """What is claimed and was found, and whether it holds."""

    sentence: str
    holds: bool | None
    """None: it cannot be judged here."""
    reason: str = ""
    """Why it cannot."""

    def unless(self, reason: str) -> Claim:
        """The claim, not judged if there is a reason why this run cannot."""
        return self._replace(holds=None, reason=self.reason or reason) if reason else self

    def __str__(self) -> str:
        verdict = {True: "holds", False: "missed", None: "cannot be judged here"}[self.holds]
        return f"{verdict}{f' ({self.reason})' if self.reason else ''}: {self.sentence}"


def at_most(what: str, found: float, bound: float) -> Claim:
    """Claim that a number is not above a bound. what: the sentence, {} for the number."""
    return Claim(f"{_said(what, found)}, at most {bound}", found <= bound)


def at_least(what: str, found: float, bound: float) -> Claim:
    """Claim that a number is not below a bound. what: the sentence, {} for the number."""
    return Claim(f"{_said(what, found)}, at least {bound}", found >= bound)


def none(what: str, found: Any) -> Claim:
    """Claim that there is nothing of this."""
    return Claim(f"no {what}" + (f", but {found}" if found else ""), not found)


def _said(what: str, found: float) -> str:
    number = f"{found:.4g}" if isinstance(found, float) else f"{found}"
    return what.format(number) if "{" in what else f"{what}: {number}"


class Interval(NamedTuple):
    """The median of noisy measurements, and the interval that has it with 95%."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Resample the values."""
        import numpy as np

        array = np.asarray(values)
        drawn = np.random.default_rng(0).choice(array, (_NUM_RESAMPLES, len(array)))
        low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
        return cls(float(np.median(array)), float(low), float(high))

    def at_most(self, what: str, bound: float) -> Claim:
        """Claim that the median is not above a bound; not judged if the interval has the bound."""
        claim = at_most(what, self.median, bound)
        claim = claim._replace(sentence=f"{claim.sentence} ({self.low:.3f} to {self.high:.3f})")
        if self.high <= bound or self.low > bound:
            return claim._replace(holds=self.high <= bound)
        return claim.unless("the bound is in the interval")


class BenchRun:
    """One run of a benchmark: what it found so far, and where that goes."""

    def __init__(self, options: argparse.Namespace, refuse: Callable[[str], NoReturn]) -> None:
        self.is_quick: bool = getattr(options, "quick", False)
        self.is_tiny: bool = getattr(options, "tiny", False)
        self.too_quick = "a quick run" if self.is_quick else ""
        """Why a quick run cannot judge; empty in a whole one."""
        self.refuse = refuse
        """Ends the program: an option is wrong, as its argument says."""
        self.path: Path | None = options.json
        self.load_before = os.getloadavg()[0]
        self.results: list[Result] = []
        self.about: Result = {}
        """What stands beside the results with the machine."""
        self.claims: list[Claim] = []
        self._limit_s = getattr(options, "limit_s", float("inf"))
        self._began_s, self._is_over, self._has_failed = time.monotonic(), False, False

    def say(self, line: object) -> None:
        """Print a line."""
        print(line, flush=True)

    def facts(self, result: Mapping[str, Any]) -> None:
        """Print each name and value."""
        for name, value in result.items():
            self.say(f"{name}: {value}")

    def table(self, title: str, rows: Sequence[Mapping[str, Any]], **formats: str) -> None:
        """Print a line for each row. formats: of the columns that are shown; all if none is given.

        Lists, dicts and what a row lacks are left out.
        """
        from rich.box import SIMPLE
        from rich.table import Table

        from nanocp.cli.options.console import output

        names = list(formats) or [
            name for name, value in rows[0].items() if not isinstance(value, list | dict)
        ]
        table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
        for name in names:
            is_text = isinstance(rows[0].get(name), str)
            justify: Any = "left" if is_text else "right"
            table.add_column(name.replace("_", " "), justify=justify, overflow="fold")
        for row in rows:
            cells = [(row.get(name), formats.get(name, "")) for name in names]
            table.add_row(*("" if value is None else f"{value:{form}}" for value, form in cells))
        output().print(table, highlight=False, markup=False)

    def track(
        self, each: Iterable[Each], description: str, total: float | None = None
    ) -> Iterator[Each]:
        """Show on standard error how far it is."""
        from nanocp.cli.options.console import progress

        with progress() as bar:
            yield from bar.track(each, total, description=description)

    def keep(self, *results: Result, **about: Any) -> None:
        """Add to the results, and write all to the file of --json."""
        self.results += results
        self.about |= about
        self.write(self.results)

    def write(self, results: Any) -> None:
        """Write results to the file of --json, and the machine beside it."""
        if self.path is not None:
            about = machine.describe(self.load_before) | self.about
            machine.write_results(self.path, results, about)

    @property
    def is_over(self) -> bool:
        """Whether the time of --limit-s is over; that is said once."""
        if not self._is_over and time.monotonic() > self._began_s + self._limit_s:
            self._is_over = True
            self.say(f"{self._limit_s} s are over; the same command goes on where this one stopped")
        return self._is_over

    def attempt(self, what: object, measure: Callable[[], Iterable[Result]]) -> None:
        """Keep what this measures, unless the time is over.

        A failure is said and makes the exit status 1; all else is measured still.
        """
        if self.is_over:
            return
        try:
            found = list(measure())
        except Exception:
            self._has_failed = True
            self.say(f"FAILED {what}\n{traceback.format_exc(limit=-3)}")
            return
        for result in found:
            self.say(" ".join(f"{name}={value}" for name, value in result.items()))
        self.keep(*found)

    def play(self, runs: Iterable[Each], play: Callable[[Each], Any], processes: int) -> list[Any]:
        """Simulate each run once, so many at a time; what each gives, in any order."""
        from multiprocessing import get_context

        tasks = list(dict.fromkeys(runs))
        with get_context("spawn").Pool(processes) as pool:
            done = pool.imap_unordered(play, tasks)
            return list(self.track(done, "simulating", len(tasks)))

    def markdown(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print the table of a document: a paper's claims beside what was found, and `holds`."""
        self.say(f"| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
        for row in rows:
            holds = {True: "yes", False: "**no**"}
            cells = (holds.get(value, value) for value in row.values())
            self.say(f"| {' | '.join(map(str, cells))} |")

    def judge(
        self, claims: Iterable[Claim | tuple[str, bool | None]], unless: str | None = ""
    ) -> None:
        """Add claims. unless: why this run can judge none of them; empty if it can."""
        self.claims += [Claim(*claim).unless(unless or "") for claim in claims]

    def end(self) -> int:
        """Print every claim with its verdict; the exit status."""
        for claim in self.claims:
            self.say(claim)
        if self._has_failed or any(claim.holds is False for claim in self.claims):
            return 1
        is_open = bool(self.claims) and all(claim.holds is None for claim in self.claims)
        return CANNOT_JUDGE if self._is_over or is_open else 0


def bench(
    quick: str = "", *, on_gpu_s: int = 0
) -> Callable[[Callable[..., None]], Callable[[Sequence[str] | None], NoReturn]]:
    """Make a program of a function that measures: `main(run, option=default, ...)`.

    quick: help of --quick; empty: there is no such option. on_gpu_s: seconds after which a GPU's
    benchmark begins no further measurement; what its file holds of this code is not measured again.
    A parameter's annotation is `Annotated[type, help]`; one before `/` is no option, but an
    argument. The module's docstring is the program's help.
    """

    def decorated(measure: Callable[..., None]) -> Callable[[Sequence[str] | None], NoReturn]:
        @wraps(measure)
        def main(arguments: Sequence[str] | None = None) -> NoReturn:
            parser = _parser(measure, quick, on_gpu_s)
            options = parser.parse_args(arguments)
            run = BenchRun(options, parser.error)
            if on_gpu_s:
                run.about["gpu"] = _gpu(parser.prog, options.tiny)
                run.results = machine.read_results(options.json)
            run.say(machine.headline(run.load_before))
            given = [getattr(options, name) for name in list(signature(measure).parameters)[1:]]
            measure(run, *given)
            sys.exit(run.end())

        return main

    return decorated


def _parser(measure: Callable[..., None], quick: str, on_gpu_s: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=measure.__globals__["__doc__"],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick.replace("%", "%%"))
    if on_gpu_s:
        tiny = "Small shapes, on the CPU under TRITON_INTERPRET=1 too: does it run at all?"
        limit = "Begin no measurement after so long; the same command goes on, if the code is too."
        parser.add_argument("--tiny", action="store_true", help=tiny)
        parser.add_argument("--limit-s", type=int, default=on_gpu_s, help=limit)
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="Write the results here, the machine beside it."
    )
    hints = get_type_hints(measure, include_extras=True)
    for parameter in list(signature(measure).parameters.values())[1:]:
        _add(parser, parameter, *get_args(hints[parameter.name]))
    return parser


def _add(parser: argparse.ArgumentParser, parameter: Parameter, kind: Any, text: str) -> None:
    """Add an option, or an argument. kind: bool, int, float, str, Path, a Literal, a list."""
    more: dict[str, Any] = {"default": parameter.default, "help": text.replace("%", "%%")}
    if isinstance(kind, UnionType) or type(None) in get_args(kind):
        (kind,) = (each for each in get_args(kind) if each is not type(None))
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
        more["action"] = "append"
    if get_origin(kind) is Literal:
        more["choices"], kind = get_args(kind), str
    if kind is bool:
        more["action"] = "store_true"
    else:
        more["type"] = kind
    if parameter.kind is Parameter.POSITIONAL_ONLY:
        parser.add_argument(parameter.name, nargs="?", **more)
    else:
        parser.add_argument(f"--{parameter.name.replace('_', '-')}", **more)


def _gpu(program: str, is_tiny: bool) -> str:
    """The GPU's name; ends the program if there is none, except to interpret small shapes."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    if not (is_tiny and os.environ.get("TRITON_INTERPRET") == "1"):
        sys.exit(
            f"{Path(program).stem}: no NVIDIA GPU is here (torch sees none); run it on a machine "
            "that has one"
        )
    return "none"
