"""A real service on the tiny model regroups while requests of every kind run."""

import pytest

from benchmarks.service import regroup
from nanocp.cli.demo.chaos_run import NUM_CLIENTS
from nanocp.cli.demo.judge import ReferenceJudge
from nanocp.cli.demo.report import claims_of


@pytest.mark.system
def test_real_instances_begin_another_term_and_every_token_is_the_references(tiny_checkpoint):
    result = regroup.regrouping(tiny_checkpoint, ReferenceJudge(tiny_checkpoint), 5.0)
    assert result["requests"] >= NUM_CLIENTS and result["losses"] > 1
    claims = [holds for _, holds in claims_of(result)]
    assert all(claims), result
