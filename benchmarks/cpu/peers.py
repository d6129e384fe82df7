"""Other engines in processes: `transformers`, and vLLM in an environment made on demand.

Enters: an engine's name, a checkpoint, a dtype, threads. Leaves: its tokens a second on prompts.
Does not know: how the engine decodes; the scripts beside this one do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.kit.machine import ROOT

DEFAULT_VLLM_ENV = ROOT / ".venv-vllm"
Measure = Callable[[Sequence[Sequence[int]], int], dict[str, Any]]
"""What an engine's script says of prompts and a number of tokens: {"tokens_per_s": x, ...}."""
ANSWER_LIMIT_S = 600.0
"""A peer that has not loaded, or measured one batch, after so long is given up."""
UP_TO_AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "TORCHINDUCTOR_CPP_SIMDLEN": "256",
    "NANOCP_PEER_INSTRUCTIONS": "avx2",
}
"""Environment that limits torch's operators, its libraries and its compiler to AVX2, and tells
vllm_cpu.py to load vLLM's kernels for AVX2."""


@dataclass
class PeerEngine:
    """An engine that has loaded the checkpoint and waits for prompts."""

    engine: str
    threads: int
    version: str
    process: subprocess.Popen[str]
    errors: IO[str]
    """What the process says beside its answers."""
    limit_s: float = ANSWER_LIMIT_S

    def measure(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, Any]:
        """What the engine's script says of these prompts."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "num_tokens": num_tokens}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Read the next line.

        Raises RuntimeError, with the last words of the process, if it ended instead, or if nothing
        came within limit_s.
        """
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], self.limit_s)[0]:
            raise RuntimeError(f"{self.engine} did not answer within {self.limit_s:g} s")
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
    module = f"benchmarks.cpu.{engine}_cpu"
    words = (str(checkpoint), "--dtype", dtype, "--threads", str(threads))
    command = [python, "-m", module, *words]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
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
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {result.stderr.strip()[-500:]}")
    return str(stamp.parent / "bin" / "python")


def answer_lines(load: Callable[[str, str, int], tuple[str, Measure]]) -> None:
    """Be such a process: load, say the version, then answer each line of input by a line.

    load: checkpoint, dtype, threads -> the engine's version, and what measures prompts.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    # An engine may print to standard output too: the real one is for the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    version, measure = load(options.checkpoint, options.dtype, options.threads)
    print(json.dumps({"version": version}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(measure(asked["prompts"], asked["num_tokens"])), file=answers, flush=True)
