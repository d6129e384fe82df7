"""The benchmark of makers' files in small: each form of a load is read as this load."""

import pytest

from benchmarks.simulated import log_forms
from harness.paths import ROOT
from nanocp.simulator.loads.request_logs import read_log, read_trace

(SAMPLE,) = (ROOT / "benchmarks/traces").glob("azure*.csv")
REQUESTS = read_trace("azure", SAMPLE).requests


@pytest.mark.parametrize("form", log_forms.FORMS)
def test_a_load_is_read_as_it_is_from_each_form_in_each_unit_and_cut(tmp_path, form):
    for name, how, text in log_forms.files(REQUESTS):
        if name == form:
            (tmp_path / "log").write_text(text)
            log = read_log(tmp_path / "log")
            assert log_forms.same_load(log, REQUESTS), how
            assert how in log_forms.FACTORS or 100 < len(log.requests) < 140
    assert not log_forms.same_load(log, REQUESTS[1:])


def test_what_is_claimed_of_a_line():
    line = {"load": "a", "form": "b", "how": "s", "same": True}
    judged = {"plan": 10.0, "sweep": 10.2, "judged": 2200}
    assert all(claim.holds for claim in log_forms.claims([line | judged], quickly=False))
    wrong = log_forms.claims([line | judged | {"same": False, "sweep": 11.0}], quickly=False)
    assert [claim.holds for claim in wrong] == [False, False, True]
