"""What benchmarks share: options from a function, verdicts, the exit status, results on disk."""

import json
import subprocess
from pathlib import Path
from typing import Annotated, Literal

import pytest

from benchmarks.kit import bench as kit
from benchmarks.kit.bench import BenchRun, Claim, Interval, at_least, at_most, bench, none
from benchmarks.kit.machine import ROOT


def ended(main, *arguments):
    with pytest.raises(SystemExit) as raised:
        main([*arguments])
    return raised.value.code


def benchmark(claims, quick="Short."):
    """A benchmark with these claims; what it was given is in `given`."""
    given = []

    @bench(quick)
    def main(
        run: BenchRun,
        folder: Annotated[Path | None, "A folder."] = None,
        /,
        minutes: Annotated[float, "At 50% load."] = 5.0,
        only: Annotated[list[Literal["this", "that"]] | None, "A part."] = None,
        all_of_it: Annotated[bool, "Everything."] = False,
    ) -> None:
        given.append((run.is_quick, folder, minutes, only, all_of_it))
        run.keep({"us": 1.5}, preset="tiny")
        run.table("us", run.results)
        run.judge(claims, run.too_quick)

    main.given = given
    return main


def test_options_are_the_parameters_of_the_function(capsys):
    main = benchmark([])
    assert ended(main) == 0
    flags = ("somewhere", "--quick", "--minutes", "2", "--only", "this", "--only", "that")
    assert ended(main, *flags, "--all-of-it") == 0
    assert main.given == [
        (False, None, 5.0, None, False),
        (True, Path("somewhere"), 2.0, ["this", "that"], True),
    ]
    assert ended(main, "--only", "other") == 2 and "other" in capsys.readouterr().err
    assert ended(benchmark([], quick=""), "--quick") == 2
    capsys.readouterr()
    assert ended(main, "--help") == 0
    printed = capsys.readouterr().out
    assert "options from a function, verdicts" in printed and "At 50% load." in printed


@pytest.mark.parametrize(("holds", "status"), [
    ([], 0),
    ([True], 0),
    ([True, None], 0),
    ([None, None], kit.CANNOT_JUDGE),
    ([True, None, False], 1),
])  # fmt: skip
def test_the_exit_status_says_what_the_claims_are(holds, status, capsys):
    assert ended(benchmark([Claim("it is so", each) for each in holds])) == status
    words = {True: "holds", False: "missed", None: "cannot be judged here"}
    assert capsys.readouterr().out.endswith("".join(f"{words[one]}: it is so\n" for one in holds))


def test_a_quick_run_judges_nothing_and_says_so(capsys):
    assert ended(benchmark([Claim("it is so", False)]), "--quick") == kit.CANNOT_JUDGE
    assert "cannot be judged here (a quick run): it is so" in capsys.readouterr().out


def test_a_run_that_its_limit_cut_off_is_no_success(monkeypatch):
    monkeypatch.setattr(kit, "_gpu", lambda *_: "none")

    @bench(on_gpu_s=60)
    def main(run: BenchRun) -> None:
        run.attempt("all else", list)
        run.judge([Claim("it is so", True)])

    assert (ended(main), ended(main, "--limit-s", "-1")) == (0, kit.CANNOT_JUDGE)


def test_a_claim_is_its_number_beside_its_bound():
    assert str(at_most("it takes {} s", 1.0625, 1.1)) == "holds: it takes 1.062 s, at most 1.1"
    assert str(at_least("pages", 3, 4)) == "missed: pages: 3, at least 4"
    assert not at_most("memory", float("nan"), 1.0).holds
    assert str(none("frame is left", 2)) == "missed: no frame is left, but 2"
    assert at_most("x", 2, 1).unless("noise").unless("a quick run").reason == "noise"


@pytest.mark.parametrize(
    ("values", "holds"), [([0.9] * 9, True), ([1.1] * 9, False), ([0.5, 1.5] * 9, None)]
)
def test_noisy_measurements_are_judged_by_the_interval_of_their_median(values, holds):
    interval = Interval.of(values)
    assert interval.low <= interval.median <= interval.high
    assert interval.at_most("{}", 1.0).holds is holds


def test_results_are_the_list_and_the_machine_lies_beside(tmp_path, capsys):
    path = tmp_path / "results" / "found.json"
    ended(benchmark([]), "--json", str(path))
    assert json.loads(path.read_text()) == [{"us": 1.5}]
    machine = json.loads(path.with_suffix(".machine.json").read_text())
    head = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(head, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert (machine["commit"], machine["preset"]) == (commit, "tiny") and machine["cores"] >= 1
    printed = capsys.readouterr().out
    assert f"{machine['cores']} cores, torch" in printed and commit[:12] in printed
    assert "us" in printed and "1.5" in printed
