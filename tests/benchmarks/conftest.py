"""Puts the benchmarks' folder on the path: they are scripts beside each other, not a package."""

import sys

from harness.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
