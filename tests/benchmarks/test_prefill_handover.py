"""Pages of a benchmark's engine arrive, whichever way they take."""

import prefill_handover
import pytest


@pytest.mark.parametrize("backend", ["auto", "tcp"])
def test_pages_arrive(backend):
    handover = prefill_handover.measure(backend, seconds=0.2)
    assert handover.num_pages > 0 and handover.seconds >= 0.2
    assert handover.row.startswith("shared memory" if backend == "auto" else "tcp")
