"""Other engines in processes: `transformers`, and vLLM in an environment made on demand.

Enters: an engine's name, a checkpoint, a dtype, threads. Leaves: its tokens a second on prompts.
Does not know: how the engine decodes; the scripts beside this one do.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).parent
DEFAULT_VLLM_ENV = HERE.parent / ".venv-vllm"


@dataclass
class PeerEngine:
    """An engine that has loaded the checkpoint and waits for prompts."""

    engine: str
    threads: int
    version: str
    process: subprocess.Popen[str]
    errors: IO[str]
    """What the process says beside its answers."""

    def measure(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, Any]:
        """What the engine's script says of these prompts: at least {"tokens_per_s": x}."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "num_tokens": num_tokens}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Read the next line.

        Raises RuntimeError, with the last words of the process, if it ended instead.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            self.errors.seek(0)
            said = self.errors.read().strip().splitlines()
            raise RuntimeError(
                f"{self.engine} ended with status {status}: "
                f"{said[-1] if said else 'it said nothing'}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def peer(
    engine: str, checkpoint: Path, dtype: str, threads: int, python: str = sys.executable
) -> Iterator[PeerEngine]:
    """The engine, from loaded to ended. Raises RuntimeError if its process ends early."""
    script = HERE / f"{engine}_cpu.py"
    command = [python, str(script), str(checkpoint), "--dtype", dtype, "--threads", str(threads)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        one = PeerEngine(engine, threads, "", process, errors)
        try:
            one.version = one.answer()["version"]
            yield one
        finally:
            process.kill()


def vllm_python(path: Path) -> str:
    """The interpreter of an environment with vLLM, made at `path` if absent (4 minutes, 3.4 GB).

    The Makefile has the recipe. Raises RuntimeError if it cannot be made; a half-made one is
    finished the next time.
    """
    stamp = path.absolute() / ".installed"
    if not stamp.exists():
        command = ("make", "--silent", f"VLLM={stamp.parent}", str(stamp))
        result = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {result.stderr.strip()[-500:]}")
    return str(stamp.parent / "bin" / "python")
