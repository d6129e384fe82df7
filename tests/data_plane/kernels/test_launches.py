"""How many launches a MoE layer takes on a GPU, by kernels and torch's operators."""

import json
import os
import subprocess
import sys

import pytest

from harness.paths import TESTS

MOST = {"alone": 16, "two, no links": 24, "two, sends": 28, "two, sends and receives": 37}
"""Attention counts as two, our kernel and the merge of its parts. cuBLAS may reduce in a launch of
its own, which nothing here can see."""


@pytest.fixture(scope="module")
def counted():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    paths = [TESTS.parent, TESTS, TESTS.parent / "benchmarks"]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    command = [sys.executable, TESTS / "harness/launch_counts.py"]
    found = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)
    return json.loads(found.stdout)


@pytest.mark.parametrize("case", MOST)
def test_a_layer_takes_few_launches(counted, case):
    assert sum(counted[case].values()) <= MOST[case], counted[case]


def test_without_links_attention_asks_nothing_of_peers(counted):
    alone, apart = (set(counted[case]) for case in ("alone", "two, no links"))
    exchange = {"put_kernel", "wait_kernel", "take_kernel", "target_kernel", "return_kernel"}
    assert not alone & exchange
    assert not apart & {"take_kernel", "merge_returned_kernel"}
    assert counted["two, no links"]["put_kernel"] == 1, "the dispatch of rows to experts"
