"""How many launches a MoE layer takes on a GPU, by kernels and torch's operators."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from harness.paths import TESTS
from nanocp.simulator.costs.cluster_file import WireForm, load_cluster_file
from nanocp.simulator.costs.cost import CostModel, Loads

MOST = {"alone": 16, "two, no links": 24, "two, sends": 28, "two, sends and receives": 37}
"""Attention counts as two, our kernel and the merge of its parts. cuBLAS may reduce in a launch of
its own, which nothing here can see."""


@pytest.fixture(scope="module")
def counted():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    paths = [TESTS.parent, TESTS]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    command = [sys.executable, TESTS / "harness/gpu/launch_counts.py"]
    found = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)
    return json.loads(found.stdout)


@pytest.mark.parametrize("case", MOST)
def test_a_layer_takes_few_launches(counted, case):
    assert sum(counted[case].values()) <= MOST[case], counted[case]


def us_by_the_order_of_launches(order, costs, own_us, received_us):
    """Walk a layer's launches on two equal instances: when the merge can begin, without bytes."""
    now_us, sent_us, attentions = 0.0, [], iter((own_us, received_us))
    waits = iter((0, 1))
    for name in order[: order.index("merge_returned_kernel")]:
        if name == "put_kernel":
            sent_us.append(now_us)
        elif name == "decode_kernel":
            now_us += costs.attention_us + next(attentions)
        elif name == "wait_kernel":
            now_us = max(now_us, sent_us[next(waits)] + costs.exchange_us / 2)
    assert next(waits, None) is None and next(attentions, None) is None
    return now_us


@pytest.mark.parametrize("own_tokens", [0, 1_000, 100_000])
def test_the_cost_model_charges_an_exchange_in_the_order_of_the_step(counted, own_tokens):
    """The simulator's microseconds against the step's own sequence of puts and waits."""
    file = load_cluster_file("h200x32-deepseek-v3")
    slow = replace(file.costs_of("operators"), attention_ns_per_row=0.0, exchange_us=90.0)
    shape = replace(file.model, wire_forms={"none": WireForm(0)})
    model = CostModel(replace(file, model=shape, costs={"operators": slow}), "operators")
    loads = Loads([2 * own_tokens] * 2, [1] * 2, [2] * 2, [1] * 2, [0] * 2)
    layer = model.step(loads).layer
    us = slow.attention_ps_per_token * own_tokens / 1e6
    walked_us = us_by_the_order_of_launches(counted["order"], slow, us, us)
    # The model's attention is of all tokens; own rows have their share of its one launch.
    share_us = slow.attention_us / 2
    assert layer.attention_us + layer.exchange_us == pytest.approx(walked_us, abs=share_us + 0.01)


def test_without_links_attention_asks_nothing_of_peers(counted):
    alone, apart = (set(counted[case]) for case in ("alone", "two, no links"))
    exchange = {"put_kernel", "wait_kernel", "take_kernel", "target_kernel", "return_kernel"}
    assert not alone & exchange
    assert not apart & {"take_kernel", "merge_returned_kernel"}
    assert counted["two, no links"]["put_kernel"] == 1, "the dispatch of rows to experts"
