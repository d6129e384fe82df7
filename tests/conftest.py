"""What all tests run under, and the checkpoints and oracles that several share, made once a session."""

import os

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported: two workers, and the processes that their tests start, share the machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A machine that is busy is slow, which is no fault of what is tested.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """A seeded checkpoint of preset tiny, fp32."""
    from data_plane.model.make_checkpoint import make_checkpoint

    path = tmp_path_factory.mktemp("checkpoints") / "tiny"
    make_checkpoint(path, "tiny")
    return path


@pytest.fixture(scope="session")
def tiny_oracle(tiny_checkpoint):
    """`transformers` on that checkpoint."""
    from data_plane.oracle import Oracle

    return Oracle(tiny_checkpoint)
