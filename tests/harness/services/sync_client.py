"""The client for threads, made from the one for event loops.

    PYTHONPATH=tests python -m harness.services.sync_client

A table of patterns says in what the two differ.
"""

import re
import subprocess
import sys

from harness.paths import ROOT

SOURCE = ROOT / "nanocp/client/async_client.py"
TARGET = ROOT / "nanocp/client/sync_client.py"
HEADER = "# Generated from async_client.py by `make client`; change that file.\n"
REPLACED = {
    # A blocking call could not be cancelled when its thread is interrupted.
    r"inference\.GenerateUnary\(": "inference.GenerateUnary.future(",
    r"await call\)": "call.result())",
    r" for one asyncio event loop\.\n\n.*loop\.\n    \"\"\"": ', which threads may share."""',
    r"for one asyncio event loop": "for threads", r"An asynchronous iterator": "An iterator",
    r"grpc\.aio": "grpc", r"asyncio": "time", r"async (?=def|with|for)|await ": "",
    r"__a(?=iter__|next__|enter__|exit__)": "__", r"\ba(?=(iter|next)\()": "",
    r"Async(?=Client|Chunks|Iterator)|(?<=Stop)Async": "",
}  # fmt: skip
"""Patterns and what stands in their place, in this order."""


def generated() -> str:
    """The text of the client for threads. Raises ValueError for a pattern that is nowhere."""
    text = SOURCE.read_text()
    for pattern, replacement in REPLACED.items():
        text, times = re.subn(pattern, replacement, text)
        if not times:
            raise ValueError(f"{pattern!r} is nowhere in {SOURCE.name}: drop it from REPLACED")
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", TARGET, "-"]
    formatted = subprocess.run(
        command, input=HEADER + text, cwd=ROOT, check=True, capture_output=True, text=True
    )
    return formatted.stdout


if __name__ == "__main__":
    TARGET.write_text(generated())
