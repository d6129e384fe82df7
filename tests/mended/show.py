"""Run the tests that show what was mended, and print a row for each fault: right or wrong.

With --checkout they run against the product, documents and files of another checkout, for one from
before a change. The tests are those of this checkout, whichever code they judge. A test that cannot
be imported there shows no less than one that fails: what it asks for is not there.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from mended.selection import ROWS  # noqa: E402

NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "__pycache__", "profile")
TIMEOUT_S = 150
"""Longest time of a test; what was mended may be that something never ended."""


def joined(checkout: Path, scratch: Path) -> Path:
    """A folder with the checkout's files and this checkout's tests."""
    tree = scratch / "tree"
    shutil.copytree(checkout, tree, ignore=NOT_COPIED)
    shutil.rmtree(tree / "tests")
    shutil.copytree(ROOT / "tests", tree / "tests", ignore=NOT_COPIED)
    # Test of packages ask git for the files.
    subprocess.run(["git", "init", "--quiet", tree], check=True)
    return tree


def outcomes(report: Path) -> dict[str, list[str]]:
    """FILE::TEST[CASE], FILE::TEST, or FILE where none was found -> what went wrong of each."""
    found: dict[str, list[str]] = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        dotted = case.get("classname") or case.get("name", "")
        file = dotted.replace(".", "/") + ".py"
        name = case.get("name", "") if case.get("classname") else ""
        ends = [end for end in case if end.tag in ("failure", "error", "skipped")]
        said = ""
        if ends:
            text = (ends[0].text or "") + (ends[0].get("message") or "")
            lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
            said = f"{ends[0].tag}: {(lines or [ends[0].get('message') or text])[0]}"
        for key in {f"{file}::{name}", f"{file}::{name.partition('[')[0]}"} if name else {file}:
            found[key].append(said)
    return found


def main() -> int:
    """Exit with 1 if a row is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("keys", nargs="*", help="keys of rows; default: all")
    options = parser.parse_args()
    rows = [row for row in ROWS if not options.keys or row["key"] in options.keys]
    with tempfile.TemporaryDirectory() as scratch:
        tree = options.checkout.resolve()
        if tree != ROOT:
            tree = joined(tree, Path(scratch))
        report = Path(scratch) / "report.xml"
        files = sorted({test.partition("::")[0] for row in rows for test in row["tests"]})
        command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "mended.selection"]
        command += ["--continue-on-collection-errors", f"--junitxml={report}"]
        command += [f"--timeout={TIMEOUT_S}", "--tb=short", *files]
        environment = os.environ | {"PYTHONPATH": f"{tree}:{tree / 'tests'}"}
        done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True)
        if not report.exists():
            sys.exit(done.stdout)
        found = outcomes(report)
    results = [_print(row, found) for row in rows]
    print(f"{results.count(True)} right, {results.count(False)} wrong")
    return 0 if all(results) else 1


def _print(row: dict[str, Any], found: dict[str, list[str]]) -> bool:
    lines, is_right = [], True
    for test in row["tests"]:
        ran = found.get(test) or found.get(test.partition("::")[0]) or ["error: it did not run"]
        wrong = [said for said in ran if said]
        is_right &= not wrong
        lines.append(f"{'wrong' if wrong else 'right'} {test}" + f" ({len(ran)})" * (len(ran) > 1))
        lines += [f"      {said:.160}" for said in wrong[:1]]
    of_suite = " (of the suite itself)" * ("suite" in row)
    print(f"{'right' if is_right else 'WRONG'}  {row['key']}{of_suite}")
    for word in ("wrong", "right"):
        print(
            textwrap.fill(
                f"{word}: {row[word]}", 100, initial_indent=" " * 7, subsequent_indent=" " * 14
            )
        )
    print(textwrap.indent("\n".join(lines), " " * 7), flush=True)
    return is_right


if __name__ == "__main__":
    sys.exit(main())
