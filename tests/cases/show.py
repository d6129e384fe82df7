"""Print every case, what a service answered, and what is right.

With --checkout it asks the service of another checkout, for one from before a change. The cases are
those of this checkout, whichever service is asked.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from harness.services.cases import Case, ask, cases, wrong  # noqa: E402
from harness.services.tale_models import MODELS, make_folder  # noqa: E402


@contextmanager
def served(checkout: Path, name: str) -> Iterator[tuple[str, str]]:
    """Serve a model with the checkout's code: host:port of HTTP and of gRPC."""
    options = ["--no-ray", "--instances", "1", "--max-model-len", "4096"]
    for port in ("--grpc-port", "--metrics-port", "--http-port"):
        options += [port, "0"]
    for field, value in MODELS[name].options.items():
        options += [f"--{field.replace('_', '-')}", value]
    command = [sys.executable, "-m", "nanocp.cli.main", "serve"]
    with tempfile.TemporaryDirectory() as scratch, open(f"{scratch}/log", "w+") as log:
        process = subprocess.Popen(
            [*command, str(make_folder(name, Path(scratch))), *options],
            stderr=log,
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout)},
        )
        try:
            yield _addresses(process, Path(log.name))
        finally:
            process.terminate()
            process.wait()


def _addresses(process: subprocess.Popen[bytes], log: Path) -> tuple[str, str]:
    while process.poll() is None:
        said = log.read_text()
        http = re.search(r"API at http://(.+)/v1\n", said)
        grpc = re.search(r"^serving .* at (.+)\n", said, re.MULTILINE)
        if http and grpc:
            return http[1], grpc[1]
        time.sleep(0.1)
    raise RuntimeError(log.read_text())


def _row(case: Case, way: str, http: str, grpc: str) -> bool:
    try:
        found = wrong(case, way, ask(case, way, http, grpc))
    except Exception as error:  # A service from before a change may cut the connection.
        found = [f"{type(error).__name__}: {error}"]
    print(f"{'wrong' if found else 'right':5}  {case.name} ({way})")
    for sentence in found[:3]:
        print(f"         {sentence:.200}")
    return not found


def main() -> int:
    """Exit with 1 if an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, default=ROOT)
    checkout = parser.parse_args().checkout
    results = []
    for name in MODELS:
        if of_model := [case for case in cases() if case.model == name]:
            with served(checkout, name) as (http, grpc):
                for case in of_model:
                    results += [_row(case, way, http, grpc) for way in case.ways]
    print(f"{results.count(True)} right, {results.count(False)} wrong")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
