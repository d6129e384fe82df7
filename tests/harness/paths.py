"""Where the checkout and its tests are, for tests of any depth."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
