"""What all tests run under, and checkpoints and oracles that several share, made once a session."""

import gc
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, settings

from harness.paths import ROOT
from harness.programs.made_once import made_once

# Before torch is imported: two workers, and the processes that their tests start, share the
# machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before triton is: kernels are interpreted in every process of the suite, whichever test is first.
os.environ.setdefault("TRITON_INTERPRET", "1")

# A script that starts the suite in the background has it ignore Ctrl-C, and so would every process
# that a test starts and sends one to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A machine that is busy is slow, which is no fault of what is tested. Examples are the same in
# every run; `pytest --hypothesis-profile=explore` draws others.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("suite", settings.get_profile("explore"), derandomize=True)
settings.load_profile("suite")


def pytest_collection_finish():
    """Let no garbage collection visit the modules and tests, which are there to the end."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """Let the end of the process take all apart; nanobind would list what is left."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A function: a preset, or a name of harness/exact/models.py -> its checkpoint and oracle."""
    from harness.exact.models import makes_models

    return makes_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny_checkpoint(models):
    """A seeded checkpoint of preset tiny, fp32."""
    return models("tiny").path


@pytest.fixture(scope="session")
def tiny_oracle(models):
    """`transformers` on that checkpoint."""
    return models("tiny").oracle


OLDEST_TRITON = "3.6.0"
"""The oldest that the extra `gpu` takes: it comes with torch 2.11."""


@pytest.fixture(scope="session")
def oldest_triton(tmp_path_factory, worker_id):
    """A folder with the oldest Triton beside the installed one; skips where pip has none."""

    def install(marker):
        folder = ROOT / f"build/triton-{OLDEST_TRITON}"
        if not (folder / "triton").exists():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
            command += [folder, f"triton=={OLDEST_TRITON}"]
            if subprocess.run(command, timeout=300, check=False).returncode:
                folder = ""
        marker.write_text(str(folder))

    folder = made_once(tmp_path_factory, worker_id, "oldest_triton", install).read_text()
    if not folder:
        pytest.skip(f"pip finds no Triton {OLDEST_TRITON} for this machine")
    return folder
