"""The benchmarks are scripts beside each other, not a package: their folder goes on the path as
when one is run."""

import sys

from harness.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
